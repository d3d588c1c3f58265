"""What an engine still needs to be told about a streamed model: which ranks share a sequence, and ZeRO-3's leaf modules."""

from streamgrad.parallel.sequence import sequence_loss, sequence_parallel
from streamgrad.parallel.zero3 import make_zero3_leaves

__all__ = ["make_zero3_leaves", "sequence_loss", "sequence_parallel"]
