"""Streamed models on several GPUs: which ranks share a sequence, and ZeRO-3's leaf modules. Other engines need nothing."""

from streamgrad.parallel.sequence import sequence_loss, sequence_parallel
from streamgrad.parallel.zero3 import make_zero3_leaves

__all__ = ["make_zero3_leaves", "sequence_loss", "sequence_parallel"]
