"""What an engine still needs to be told about a streamed model, and what each engine keeps on a rank."""

from streamgrad.distributed.zero3 import make_zero3_leaves

__all__ = ["make_zero3_leaves"]
