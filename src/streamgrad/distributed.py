"""`streamgrad.parallel` under the name that it had until 0.1."""

from streamgrad.parallel import make_zero3_leaves, sequence_loss, sequence_parallel

__all__ = ["make_zero3_leaves", "sequence_loss", "sequence_parallel"]
