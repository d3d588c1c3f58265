"""Stores what one layer keeps between forward and backward, on the device or in host memory.

That is its input and, with `keep="attention"`, also the keys and values of the whole sequence and each chunk's attention output
and log-sum-exp; on the host, the product that reads this too (`engine.projection`). There everything lies chunk by chunk, so that
backward holds only the chunk at work and the next one. Layers whose input is made again keep nothing (`engine.segment`).

Shapes: B batch, T sequence, L chunk, E model width.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor

from streamgrad.engine.host_offload import HostStore, Shelf
from streamgrad.engine.kv_chunk import Attended, Span
from streamgrad.ops.memory_label import labelled, memory_label


class Saved(Protocol):
    """What is kept, written chunk by chunk in forward."""

    def note(self, index: int, attended: Attended | None) -> None:
        """Keep what chunk `index`, which has run, leaves; `attended` is None where attention is not kept."""
        ...

    def finish(self, ctx: Any, keys_and_values: tuple[Tensor, ...]) -> None:
        """Leave what backward needs with `ctx`, once all chunks have run."""
        ...

    def reader(self, ctx: Any) -> Reader: ...

    def will_be_read_whole(self) -> None:
        """Note that backward of a layer above reads the whole input, before this layer's own backward reads it in chunks."""
        ...

    def release(self) -> None:
        """Free everything: backward has run and will not run again."""
        ...


class Reader(Protocol):
    """What was kept, read in backward: keys and values, or in order the chunks that recompute them; then all in reverse order."""

    has_attention: bool

    def keys_and_values(self) -> tuple[Tensor, ...]: ...

    def chunk(self, index: int) -> tuple[Tensor, Attended | None]:
        """Return the layer's input for a chunk, and what is kept of its attention."""
        ...

    def inputs(self, first: int, count: int) -> Tensor:
        """Return the layer's input for `count` chunks that lie next to each other, from number `first` on."""
        ...


class SavedOnDevice:
    """Kept by autograd: freed, and checked for changes in place, like any saved tensor."""

    def __init__(self, h_BTE: Tensor, spans: Sequence[Span]) -> None:
        self._tensors, self._spans = [h_BTE], spans
        self._attended: list[list[Tensor]] = []
        self._counts: list[int] = []  # of the tensors of each chunk's attention
        self._read: list[Tensor] = []
        self._versions: list[int] = []  # of what was read

    def note(self, index: int, attended: Attended | None) -> None:
        if attended is not None:
            self._attended.append(attended.tensors)

    def finish(self, ctx: Any, keys_and_values: tuple[Tensor, ...]) -> None:
        # Every chunk or none: attention that drew dropout cannot be kept, and then keys are recomputed as well.
        if len(self._attended) == len(self._spans):
            self._tensors += map(_alone, keys_and_values)
            self._tensors += [tensor for entry in self._attended for tensor in entry]
            self._counts = [len(entry) for entry in self._attended]
        ctx.save_for_backward(*self._tensors)
        self._tensors, self._attended = [], []

    def will_be_read_whole(self) -> None:
        """Do nothing: it is there."""

    def read_whole(self, ctx: Any) -> Tensor:
        """Return the layer's input. All is held for `reader`: hooks of checkpointing give what was saved only once."""
        self._read = [tensor.detach() for tensor in ctx.saved_tensors]
        self._versions = [tensor._version for tensor in self._read]
        return self._read[0]

    def reader(self, ctx: Any) -> Reader:
        tensors, self._read = self._read, []
        # Changed since, if the pass that read it ended before this layer's turn: autograd then says so.
        if not tensors or [tensor._version for tensor in tensors] != self._versions:
            tensors = [tensor.detach() for tensor in ctx.saved_tensors]
        return _DeviceReader(tensors, self._spans, self._counts)

    def release(self) -> None:
        """Drop what was read; autograd frees what it saved."""
        self._read = []


@labelled("keys and values")
def _alone(tensor: Tensor) -> Tensor:
    """Return a copy if the tensor is a slice: a slice of a joint projection of queries, keys and values keeps all of it alive."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


class _DeviceReader:
    def __init__(self, tensors: list[Tensor], spans: Sequence[Span], counts: Sequence[int]) -> None:
        self._h_BTE, *rest = tensors
        self._keys, attended = rest[:2], iter(rest[2:])
        self._attended = [list(islice(attended, count)) for count in counts]
        self._spans = spans
        self.has_attention = bool(rest)

    def keys_and_values(self) -> tuple[Tensor, ...]:
        return tuple(self._keys)

    def chunk(self, index: int) -> tuple[Tensor, Attended | None]:
        start, stop = self._spans[index]
        return self._h_BTE[:, start:stop], Attended.of(self._attended[index]) if self.has_attention else None

    def inputs(self, first: int, count: int) -> Tensor:
        return self._h_BTE[:, self._spans[first][0] : self._spans[first + count - 1][1]]


class SavedOnHost:
    """Kept on a shelf of the model's host store; `restored` chunks are read in order before all are read in reverse order."""

    def __init__(self, h_BTE: Tensor, spans: Sequence[Span], restored: Sequence[int], store: HostStore) -> None:
        self._h_BTE: Tensor | None = h_BTE.detach()
        self._spans, self._restored = spans, restored
        self._shelf: Shelf | None = store.shelf()
        self._order: list[Hashable] = []  # in which the layer's own backward reads
        self._at_once = 1  # of these are read before the layer computes
        self.has_attention = True

    def note(self, index: int, attended: Attended | None) -> None:
        assert self._h_BTE is not None and self._shelf is not None
        start, stop = self._spans[index]
        tensors = [self._h_BTE[:, start:stop]]
        if attended is None:
            self.has_attention = False
        else:
            tensors += attended.tensors
        self._shelf.put(index, tensors)

    def finish(self, ctx: Any, keys_and_values: tuple[Tensor, ...]) -> None:
        assert self._shelf is not None
        self._h_BTE = None
        chunks = list(range(len(self._spans)))
        if self.has_attention:
            self._shelf.put(_KEYS_AND_VALUES, keys_and_values)
            self._order, self._at_once = [_KEYS_AND_VALUES, *reversed(chunks)], 2
        else:
            self._order = [*self._restored, *reversed(chunks)]
        self._shelf.will_be_got(self._order, at_once=self._at_once)

    def will_be_read_whole(self) -> None:
        assert self._shelf is not None
        self._shelf.will_be_got(range(len(self._spans)))

    def read_whole(self, ctx: Any) -> Tensor:
        """Return the layer's input, copied back chunk by chunk."""
        shelf, length = self._rewound(range(len(self._spans))), self._spans[-1][1]
        whole_BTE: Tensor | None = None
        for index, (start, stop) in enumerate(self._spans):
            part_BLE = shelf.get(index)[0]
            if whole_BTE is None:
                with memory_label("hidden states"):
                    whole_BTE = part_BLE.new_empty(part_BLE.shape[0], length, *part_BLE.shape[2:])
            whole_BTE[:, start:stop] = part_BLE
        assert whole_BTE is not None
        shelf.will_be_got(self._order, at_once=self._at_once)
        return whole_BTE

    def reader(self, ctx: Any) -> Reader:
        return _HostReader(self._rewound(self._order, at_once=self._at_once), self.has_attention)

    def _rewound(self, order: Sequence[Hashable], *, at_once: int = 1) -> Shelf:
        if self._shelf is None:
            raise already_freed()
        self._shelf.will_be_got(order, at_once=at_once)
        self._shelf.rewind()
        return self._shelf

    def release(self) -> None:
        self._shelf = None


def already_freed() -> RuntimeError:
    return RuntimeError(
        "backward was called a second time through a streamed layer whose kept tensors have been freed. Pass "
        "retain_graph=True to the first backward if it is meant to be called again."
    )


class _HostReader:
    def __init__(self, shelf: Shelf, has_attention: bool) -> None:
        self._shelf, self.has_attention = shelf, has_attention

    def keys_and_values(self) -> tuple[Tensor, ...]:
        return tuple(self._shelf.get(_KEYS_AND_VALUES))

    def chunk(self, index: int) -> tuple[Tensor, Attended | None]:
        h_BLE, *attended = self._shelf.get(index)
        return h_BLE, Attended.of(attended) if self.has_attention else None

    def inputs(self, first: int, count: int) -> Tensor:
        parts = [self._shelf.get(index)[0] for index in range(first, first + count)]
        return parts[0] if count == 1 else torch.cat(parts, dim=1)


_KEYS_AND_VALUES = "keys and values"
