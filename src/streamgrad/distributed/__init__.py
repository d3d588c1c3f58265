"""What an engine still needs to be told about a streamed model, and what each engine keeps on a rank."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamgrad.distributed.memory import RankBytes, longest_sequence, rank_bytes
    from streamgrad.distributed.ulysses import sequence_loss, sequence_parallel
    from streamgrad.distributed.zero3 import make_zero3_leaves

__all__ = ["RankBytes", "longest_sequence", "make_zero3_leaves", "rank_bytes", "sequence_loss", "sequence_parallel"]

# Imported when they are first used: the formulas of `memory` need neither torch nor transformers.
_HOMES = {
    "RankBytes": "memory",
    "longest_sequence": "memory",
    "make_zero3_leaves": "zero3",
    "rank_bytes": "memory",
    "sequence_loss": "ulysses",
    "sequence_parallel": "ulysses",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES.values():
        return importlib.import_module(f"streamgrad.distributed.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'streamgrad.distributed' has no attribute {name!r}")
    return getattr(importlib.import_module(f"streamgrad.distributed.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
