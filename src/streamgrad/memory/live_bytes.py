"""Bytes of live tensors, counted: every storage that torch operations make, from its birth to its death.

On a GPU the allocator keeps this count (`torch.cuda.max_memory_allocated`); on CPU nothing does, so `LiveBytes` watches each
operation. It slows a program down several times: plans measure a layer by it on a few tokens (`memory.measure`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operation's arguments or results, alone or in lists. Equals `tree_leaves`' tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


class LiveBytes(TorchDispatchMode):
    """Count within a block: `live.peak_bytes` is the most that tensors made inside `with LiveBytes() as live:` held at a time.

    `largest` is the shape and size of the biggest single storage made inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.largest: tuple[int, tuple[int, ...]] = (0, ())
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Inputs made before the block are known from their first use on; they are not counted.
        kwargs = kwargs or {}
        for tensor in tensors_in((args, *kwargs.values())):
            self._meet(tensor, born_here=False)
        result = function(*args, **kwargs)
        for tensor in tensors_in((result,)):
            self._meet(tensor, born_here=True)
        return result

    def _meet(self, tensor: Tensor, *, born_here: bool) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if born_here else 0
        self.largest = max(self.largest, (size, tuple(tensor.shape)))
        self._born(key, size)
        weakref.finalize(storage, self._die, key, size)

    def _born(self, key: int, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _die(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def peak_bytes_of(function: Any, device: torch.device) -> tuple[Any, int]:
    """Return `(function(), peak bytes above those held before)`, by the allocator on CUDA and by counting elsewhere."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = function()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device) - before
    with LiveBytes() as live:
        result = function()
    return result, live.peak_bytes
