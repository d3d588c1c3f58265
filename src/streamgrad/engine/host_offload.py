"""Host memory for what layers keep between forward and backward.

Copies to the host run on their own stream beside the computation. Copies back start one item ahead of their use; a layer's keys
and the chunk after them count as one, as nothing is computed between the two. Values and layouts come back bit for bit. Host
buffers are pinned once and reused in every step: pinning 10 GB takes seconds. The first items of all come back while layers above
run backward that have kept their graphs.

Known limits: there is nothing to move on a device other than CUDA.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.shortage import naming_shortage
from streamgrad.ops.memory_label import memory_label


class PinnedPool:
    """Pinned host buffers for copies to and from one device, reused across steps and lengths."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        self.total_bytes = 0
        self._can_pin = True

    def take(self, size_bytes: int) -> Tensor:
        """Return a buffer of at least `size_bytes`: the smallest free one that is large enough, or a new one.

        Far larger ones are not taken: hidden states would find theirs occupied by a log-sum-exp in every step.
        """
        fitting = [buffer for buffer in self._free if size_bytes <= buffer.numel() < 8 * size_bytes]
        if fitting:
            best = min(fitting, key=Tensor.numel)
            self._free = [buffer for buffer in self._free if buffer is not best]
            return best
        # Free buffers a little too small for what is stored now would never be used again, so they are dropped.
        smaller = [buffer for buffer in self._free if buffer.numel() < size_bytes < 2 * buffer.numel()]
        for buffer in smaller:
            self.total_bytes -= buffer.numel()
        self._free = [buffer for buffer in self._free if not any(buffer is other for other in smaller)]
        buffer = self._allocate(size_bytes)
        self.total_bytes += size_bytes
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._free.append(buffer)

    def _allocate(self, size_bytes: int) -> Tensor:
        buffer = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        if self._can_pin:
            # Pinned here and not by torch, which rounds pinned buffers up to a power of two.
            code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), size_bytes, 0))
            if code == 0:
                weakref.finalize(buffer, _unpin, buffer.data_ptr(), self._device).atexit = False  # the driver is gone by then
            else:
                self._can_pin = False
                _forget_error()
                warnings.warn(
                    f"streamgrad: host memory could not be pinned (CUDA error {code}), so copies will not overlap with "
                    "computation.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return buffer


def _forget_error() -> None:
    """Clear CUDA's last error, which it would report again at the next launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros((), device="cuda")


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may still be reading it
    torch.cuda.cudart().cudaHostUnregister(address)


class HostStore:
    """Host memory and copy streams of one model; each layer of each step gets a `Shelf`."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, PinnedPool] = {}
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}
        self._latest: weakref.ref[Shelf] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Give a copied or unpickled model host buffers of its own."""
        return HostStore, ()

    @property
    def total_bytes(self) -> int:
        return sum(pool.total_bytes for pool in self._pools.values())

    def pool(self, device: torch.device) -> PinnedPool:
        """Return the device's pool. Its buffers are written again only after the device's copy streams are done with them."""
        return self._pools.setdefault(device, PinnedPool(device))

    def shelf(self) -> Shelf:
        """Return a shelf that knows the one before it: with its own last item in use, it brings back the first of that one."""
        shelf = Shelf(self, None if self._latest is None else self._latest())
        self.note_latest(shelf)
        return shelf

    def note_latest(self, shelf: Shelf) -> None:
        """Let the next shelf lie above this one."""
        self._latest = weakref.ref(shelf)

    def bring_back_before(self, node: Any) -> None:
        """Let the latest shelf's first items come back when backward reaches `node`, of a layer above that has no shelf."""
        shelf, self._latest = self._latest, None
        if shelf is not None:
            node.register_prehook(lambda gradients: bring_back_first(shelf))

    def streams(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams for copies out and for copies back."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class Shelf:
    """Items, each a few tensors of one device, put once and then got in an order that is known when all are put."""

    def __init__(self, store: HostStore, below: Shelf | None) -> None:
        self._store = store
        self._below = None if below is None else weakref.ref(below)
        self._items: dict[Hashable, _Item] = {}
        self._order: list[Hashable] = []
        self._at_once = 1
        self._position = 0
        self._arriving: dict[int, _Arrival] = {}

    def put(self, name: Hashable, tensors: Sequence[Tensor]) -> None:
        """Start copying `tensors` out; the caller may drop them at once, and must not change them in place."""
        self._items[name] = _Item(self._store, tensors)

    def will_be_got(self, order: Sequence[Hashable], *, at_once: int = 1) -> None:
        """Note the order of the next pass, whose first `at_once` items are got before anything is computed.

        What is on its way in another order is dropped.
        """
        self._at_once = at_once
        if list(order) != self._order:
            self._order = list(order)
            self._arriving.clear()

    def rewind(self) -> None:
        """Start a pass over the items; there may be several. Shelves that are filled meanwhile are used up before this one."""
        self._position = 0
        self._store.note_latest(self)

    def get(self, name: Hashable) -> list[Tensor]:
        """Return the tensors of the next item on their device, and start copying back the item after it."""
        assert self._order[self._position] == name, f"{name} was got where {self._order[self._position]} is next"
        self._fetch(self._position)
        arrival = self._arriving.pop(self._position)
        self._position += 1
        if self._position < len(self._order):
            self._fetch(self._position)
        elif self._below is not None:
            bring_back_first(self._below)
        return arrival.taken()

    def _fetch(self, position: int) -> None:
        if position not in self._arriving and position < len(self._order):
            self._arriving[position] = self._items[self._order[position]].copied_back()


def bring_back_first(shelf: weakref.ref[Shelf]) -> None:
    """Start copying back what a shelf's layer gets before it computes, if the shelf is still there."""
    found = shelf()
    if found is not None:
        for position in range(found._at_once):
            found._fetch(position)


class _Arrival:
    """Tensors on their way back, in memory of the stream `owner`, which waits for the copy even if nobody takes them."""

    def __init__(self, tensors: list[Tensor], arrived: torch.cuda.Event, owner: torch.cuda.Stream) -> None:
        self._tensors, self._arrived, self._owner = tensors, arrived, owner

    def taken(self) -> list[Tensor]:
        """Return the tensors, once the current stream waits for their copy."""
        current = torch.cuda.current_stream(self._owner.device)
        current.wait_event(self._arrived)
        for tensor in self._tensors:
            tensor.record_stream(current)
        return self._tensors

    def __del__(self) -> None:
        # Else the next tensor in this memory could be written before the copy ends.
        self._owner.wait_event(self._arrived)


class _Item:
    def __init__(self, store: HostStore, tensors: Sequence[Tensor]) -> None:
        self._store, self._device = store, tensors[0].device
        self._layouts = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in map(_dense, tensors)]
        pool = store.pool(self._device)
        self._buffers: list[Tensor] = []
        weakref.finalize(self, _return_buffers, pool, self._buffers)
        with naming_shortage(lambda: _shortage(sum(tensor.nbytes for tensor in tensors), store.total_bytes)):
            self._buffers += (pool.take(tensor.nbytes) for tensor in tensors)
        outward, inward = store.streams(self._device)
        outward.wait_stream(torch.cuda.current_stream(self._device))
        outward.wait_stream(inward)  # a buffer's last owner may still be reading it
        with torch.cuda.stream(outward):
            for tensor, view in zip(tensors, self._views(), strict=True):
                view.copy_(tensor, non_blocking=True)
                tensor.record_stream(outward)  # its memory is not reused before the copy has read it

    def copied_back(self) -> _Arrival:
        """Start copying the item back and return its tensors."""
        outward, inward = self._store.streams(self._device)
        current = torch.cuda.current_stream(self._device)
        # Allocated on the stream that computes: memory of the copy stream could not be reused for anything else.
        with memory_label("kept inputs"):
            tensors = [torch.empty_strided(*layout[:2], dtype=layout[2], device=self._device) for layout in self._layouts]
        inward.wait_stream(outward)
        inward.wait_stream(current)  # which may still be using this memory
        with torch.cuda.stream(inward):
            for tensor, view in zip(tensors, self._views(), strict=True):
                tensor.copy_(view, non_blocking=True)
        return _Arrival(tensors, inward.record_event(), current)

    def _views(self) -> list[Tensor]:
        """Return the buffers as tensors of the stored layouts: a kernel given other strides may round differently."""
        return [
            buffer[: shape.numel() * dtype.itemsize].view(dtype).as_strided(shape, stride)
            for buffer, (shape, stride, dtype) in zip(self._buffers, self._layouts, strict=True)
        ]


def _shortage(wanted_bytes: int, held_bytes: int) -> str:
    return (
        f"where {wanted_bytes} bytes of host memory were needed for what a layer keeps, beside {held_bytes} that are held "
        'for it. To use less, pass offload="none", keep="input" or a shorter sequence.'
    )


def _dense(tensor: Tensor) -> Tensor:
    """Return an empty tensor of this one's shape and order of strides, without gaps in memory."""
    return torch.empty_like(tensor, device="meta")


def _return_buffers(pool: PinnedPool, buffers: list[Tensor]) -> None:
    for buffer in buffers:
        pool.give_back(buffer)
