"""Where memory ran out, and what would take less of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class ShortOfMemory(torch.OutOfMemoryError):
    """Out of memory in a part of a streamed step that the message names."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host ran out of memory. On a CPU, torch says so only in the text of a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def is_only_process() -> bool:
    """Return whether no other rank may wait for this one, so that it may run something once more in another way."""
    return not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1


@contextmanager
def naming_shortage(told: Callable[[], str]) -> Iterator[None]:
    """Add `told()` to torch's error if memory runs out within the block, unless a block inside has already done so."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ShortOfMemory) or not is_out_of_memory(error):
            raise
        raise ShortOfMemory(f"{error} Memory ran out {told()}") from error


in_head = naming_shortage(
    lambda: (
        "in the language-modelling head. To use less, pass a smaller head_chunk_size (chunk_size, where you call the head "
        "yourself), or a shorter sequence."
    )
)
