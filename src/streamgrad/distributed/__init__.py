"""What an engine still needs to be told about a streamed model, and what each engine keeps on a rank."""

from streamgrad.distributed.memory import RankBytes, longest_sequence, rank_bytes
from streamgrad.distributed.ulysses import sequence_loss, sequence_parallel
from streamgrad.distributed.zero3 import make_zero3_leaves

__all__ = ["RankBytes", "longest_sequence", "make_zero3_leaves", "rank_bytes", "sequence_loss", "sequence_parallel"]
