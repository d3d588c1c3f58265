"""Where a layer's kept tensors wait for backward: on the device, or in pinned host memory.

Copies to the host run on a stream of their own beside the computation; copies back start one layer ahead of their use. Values are
bit for bit what was stored. Host buffers are pinned once and handed from step to step: pinning costs seconds per 10 GB.

Known limits: the host is asked for what a step needs as the step runs. On a device other than CUDA there is nothing to move.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor


class PinnedPool:
    """Pinned host buffers that are reused across steps and lengths."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self.total_bytes = 0
        self._can_pin = True

    def take(self, size_bytes: int) -> Tensor:
        """A byte buffer of at least `size_bytes`: the smallest free one that is large enough, else a new one."""
        fitting = [buffer for buffer in self._free if buffer.numel() >= size_bytes]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        # Too small for this length: a longer one would leave them unused for good.
        for buffer in self._free:
            self.total_bytes -= buffer.numel()
        self._free.clear()
        self.total_bytes += size_bytes
        return self._allocate(size_bytes)

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def _allocate(self, size_bytes: int) -> Tensor:
        if self._can_pin:
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._can_pin = False
                warnings.warn(
                    f"streamgrad: host memory could not be pinned, so copies will not overlap with computation: {error}",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return torch.empty(size_bytes, dtype=torch.uint8)


class HostStore:
    """Puts tensors of one CUDA device into host memory and brings them back; one store serves one model."""

    def __init__(self) -> None:
        self.pool = PinnedPool()
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._latest: weakref.ref[StoredOnHost] | None = None

    def __reduce__(self) -> tuple:
        """A copied or unpickled model gets host buffers of its own."""
        return HostStore, ()

    def put(self, tensors: Sequence[Tensor]) -> StoredOnHost:
        """Start copying `tensors` out. The layer below is remembered, to be brought back while this one runs backward."""
        stored = StoredOnHost(self, tensors, None if self._latest is None else self._latest())
        self._latest = weakref.ref(stored)
        return stored

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class StoredOnHost:
    """Tensors of one layer in host memory."""

    def __init__(self, store: HostStore, tensors: Sequence[Tensor], below: StoredOnHost | None) -> None:
        self.store, self.device = store, tensors[0].device
        self._below = None if below is None else weakref.ref(below)
        self._arriving: tuple[list[Tensor], torch.cuda.Event] | None = None
        self._layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in map(_dense, tensors)]
        self._buffers = [store.pool.take(tensor.nbytes) for tensor in tensors]
        weakref.finalize(self, _return_buffers, store.pool, self._buffers)
        outward, inward = store.streams(self.device)
        outward.wait_stream(torch.cuda.current_stream(self.device))
        outward.wait_stream(inward)  # a buffer's last owner may still be reading it
        with torch.cuda.stream(outward):
            for tensor, view in zip(tensors, self._views(), strict=True):
                view.copy_(tensor, non_blocking=True)
                tensor.record_stream(outward)  # its memory is not reused before the copy has read it

    def fetch(self) -> None:
        """Start copying back, if that has not begun."""
        if self._arriving is not None:
            return
        outward, inward = self.store.streams(self.device)
        inward.wait_stream(outward)
        inward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(inward):
            tensors = [view.to(self.device, non_blocking=True) for view in self._views()]
            arrived = torch.cuda.Event()
            arrived.record()
        self._arriving = tensors, arrived

    def get(self) -> list[Tensor]:
        """The tensors, on their device; the layer below starts its way back."""
        self.fetch()
        assert self._arriving is not None
        tensors, arrived = self._arriving
        self._arriving = None  # a second backward through a retained graph fetches again
        below = None if self._below is None else self._below()
        if below is not None:
            below.fetch()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(arrived)
        for tensor in tensors:
            tensor.record_stream(current)
        return tensors

    def _views(self) -> list[Tensor]:
        """The buffers as tensors of the stored layouts: a kernel given other strides may round differently."""
        return [
            buffer[: shape.numel() * dtype.itemsize].view(dtype).as_strided(shape, stride)
            for buffer, (shape, stride, dtype) in zip(self._buffers, self._layouts, strict=True)
        ]


def _dense(tensor: Tensor) -> Tensor:
    """A tensor without gaps in memory and with the strides of this one where it has none itself; values do not matter."""
    return torch.empty_like(tensor, device="meta")


def _return_buffers(pool: PinnedPool, buffers: list[Tensor]) -> None:
    for buffer in buffers:
        pool.give_back(buffer)
