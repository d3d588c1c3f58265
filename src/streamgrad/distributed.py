"""`streamgrad.parallel`, and the formulas of `memory.engines`, under the name that they had until 0.1."""

from streamgrad.memory.engines import RankBytes, longest_sequence, rank_bytes
from streamgrad.parallel import make_zero3_leaves, sequence_loss, sequence_parallel

__all__ = ["RankBytes", "longest_sequence", "make_zero3_leaves", "rank_bytes", "sequence_loss", "sequence_parallel"]
