"""Recurrent layers, which remember earlier tokens in a state of fixed size: linear attention, state spaces, short convolutions.

    out[:, a:b], state_b = layer(h[:, a:b], state_a)          for each chunk [a, b) of the sequence

Forward passes each chunk's state to the next. Backward recomputes the states before all chunks by running every chunk until it
has written its states. Then it goes through the chunks in reverse order: a chunk's gradient for the state before it is the
gradient of the state after the previous chunk.

A layer reads and writes its states through the methods of transformers' `Cache`: convolution states, (B, C, K), the last K inputs
of a convolution over tokens, and recurrent states of any shape. It may have attention as well, by the seams of `kv_chunk`.

Packed documents begin with new states. So no chunk has tokens of two documents, and the first chunk of a document is given none.

With `keep="all"` each chunk's graph is kept, and autograd goes from state to state; a layer that has attention too runs whole.
Autograd adds the chunks' gradients of a parameter in its own precision, so such chunks are long.

Known limits: otherwise nothing but a layer's input is kept for backward, so `keep="attention"` keeps no more than `"input"` here.
Neither does `keep="all"` with packed documents.

Shapes: B batch, T sequence, E model width, C channels, K width of a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.call import StreamedCall
from streamgrad.engine.checks.guards import Unchanged
from streamgrad.engine.checks.trial import Trial
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, SeamError, Span, StopAfterWrite, spans

# Keyed by kind, "conv" or "recurrent", and number: a layer may have several of each.
States = dict[tuple[str, int], Tensor]
_KEYS = ("keys", 0)
# The fewest tokens of a chunk whose graph is kept.
KEPT_TOKENS = 4096


class RecurrentStream(KeyValueStream):
    """States before each chunk, by its first token, and the gradients of the states after the current chunk; keys, if any."""

    def __init__(
        self,
        length: int,
        names: set[tuple[str, int]] | None = None,
        document_starts: Sequence[int] = (),
        *,
        in_one_graph: bool = False,
    ) -> None:
        super().__init__(length)
        self.in_one_graph = in_one_graph  # whether states lead autograd from chunk to chunk
        self.names = set() if names is None else names  # of all that the layer writes, known once a chunk has run
        self.document_starts = document_starts
        self.before: dict[int, States] = {0: {}}
        self.gradients: States = {}


@dataclass
class RecurrentChunk(Chunk):
    """Cache of one call of a recurrent layer over `[start, stop)`, with the methods of `Cache` that transformers' layers call."""

    stream: RecurrentStream
    given: States = field(init=False, repr=False)
    read: set[tuple[str, int]] = field(default_factory=set, repr=False)
    written: States = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.given = {} if self.start in self.stream.document_starts else self.stream.before[self.start]
        if self.in_backward:
            self.given = {name: state.detach().requires_grad_() for name, state in self.given.items()}

    # --- the cache seam --------------------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._read("conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._read("recurrent", state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return bool(self.given)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True, so that layers do not take a single token for a decoding step, which overwrites states."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Return a convolution's inputs, preceded by the last ones before the chunk; write the last of all as the new state."""
        if conv_kernel_size is None:
            raise SeamError("its layers call update_conv_state without conv_kernel_size")
        before = self._read("conv", state_idx)
        if before is None:
            before = conv_states.new_zeros(*conv_states.shape[:-1], conv_kernel_size)
        whole = torch.cat([before, conv_states], dim=-1)
        self._write("conv", state_idx, whole[..., -conv_kernel_size:])
        return whole

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._write("recurrent", state_idx, recurrent_states)
        return recurrent_states

    def _read(self, kind: str, number: int) -> Tensor | None:
        self.read.add((kind, number))
        return self.given.get((kind, number))

    def _write(self, kind: str, number: int, state: Tensor) -> None:
        if (kind, number) in self.written:
            raise SeamError("its layers write a state more than once")
        self.written[kind, number] = state
        self._stop_if_all_is_written()

    def _stop_if_all_is_written(self) -> None:
        if self.stop_after_write and self._names() == self.stream.names:
            self._hand_on()
            raise StopAfterWrite

    def _names(self) -> set[tuple[str, int]]:
        return {*self.written, *([_KEYS] if self.attention_calls else [])}

    def _hand_on(self) -> None:
        # Cloned: a state may be a slice of a long tensor, which would stay alive.
        states = {name: state if self.stream.in_one_graph else state.detach() for name, state in self.written.items()}
        self.stream.before[self.stop] = {name: state.clone() for name, state in states.items()}
        if not self.stop_after_write:  # in forward, which no longer needs the state before the chunk
            self.stream.before.pop(self.start)

    def check_finished(self) -> None:
        super().check_finished()
        if not self.written:
            raise SeamError("its layers write no state into their cache")
        if self.given.keys() - self.read:
            raise SeamError("its layers do not read the states that they have written")
        self.stream.names.update(self._names())
        self._hand_on()

    # --- gradients -------------------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> list[Tensor]:
        return list(self.given.values())

    def outputs(self) -> list[tuple[Tensor, Tensor]]:
        states = [(self.written[name], gradient) for name, gradient in self.stream.gradients.items()]
        return states + super().outputs()

    def settle(self) -> None:
        self.stream.gradients = {name: state.grad for name, state in self.given.items() if state.grad is not None}
        self.stream.before.pop(self.start, None)


@dataclass
class RecurrentCall(StreamedCall):
    """One call of a recurrent layer, whose `run` takes a `RecurrentChunk`; `mask` is None for a layer without attention."""

    names: set[tuple[str, int]] = field(default_factory=set)
    document_starts: Sequence[int] = ()  # without the first document's

    @property
    def may_keep_graph(self) -> bool:
        return not self.document_starts

    def with_ordinary_graph(self, h_BTE: Tensor) -> tuple[Tensor, ...]:
        """Run one chunk after the other, from the states after the one before, and let autograd keep the graphs of all."""
        spans_of_chunks = self._spans_of(h_BTE.shape[1], max(self.chunk_size, KEPT_TOKENS))
        if self.mask is not None or len(spans_of_chunks) == 1:
            return super().with_ordinary_graph(h_BTE)
        stream = RecurrentStream(h_BTE.shape[1], self.names, self.document_starts, in_one_graph=True)
        trial, unchanged = self.trial(h_BTE.shape[1]), Unchanged(self.modules, h_BTE, runs_again=False)
        made: list[tuple[Tensor, ...]] = []
        # One node for all slices of a tensor: the gradient of each slice alone would be as long as the whole.
        cut = [tensor.split([stop - start for start, stop in spans_of_chunks], dim=1) for tensor in (h_BTE, *self.token_inputs)]
        with self.surroundings():
            for span, (h_BLE, *token_inputs) in zip(spans_of_chunks, zip(*cut, strict=True), strict=True):
                chunk = self.chunk(span, stream)
                chunk.token_inputs = token_inputs
                out_BLE = self.run(h_BLE, chunk)
                chunk.check_finished()
                unchanged.check()
                if not made:
                    trial(h_BTE.detach(), before_backward=True)
                made.append((out_BLE, *chunk.recorded))
        return tuple(torch.cat(parts, dim=1) for parts in zip(*made, strict=True))

    def spans(self, length: int) -> list[tuple[int, int]]:
        return self._spans_of(length, self.chunk_size)

    def _spans_of(self, length: int, chunk_size: int) -> list[tuple[int, int]]:
        """Return spans inside of documents, of two tokens or more, as layers run other code for one, which takes a state up."""
        found: list[tuple[int, int]] = []
        for first, last in pairwise([0, *self.document_starts, length]):
            own = [(first + start, first + stop) for start, stop in spans(last - first, max(2, chunk_size))]
            if len(own) > 1 and own[-1][1] - own[-1][0] == 1:
                own[-2:] = [(own[-2][0], own[-1][1])]
            found += own
        return found

    def restored(self, length: int) -> list[int]:
        """Return the chunks whose states another of the same document takes up; all but the last where there are keys."""
        if self.mask is not None:
            return super().restored(length)
        starts = [start for start, _ in self.spans(length)]
        return [index for index, start in enumerate(starts[1:]) if start not in self.document_starts]

    def chunk(self, span: tuple[int, int], stream: Any, *, keep_attention: bool = False, kept: Any = None, **options: Any) -> Any:
        """Return the chunk; attention is never kept (`keep_attention`, `kept`), as the states are restored in any case."""
        return RecurrentChunk(*span, stream=stream, mask=self.mask, backends=self.backends, **options)

    def new_stream(self, length: int, tensors: tuple[Tensor, ...] | None = None) -> Any:
        return RecurrentStream(length, self.names, self.document_starts)

    def trial(self, length: int) -> Trial:
        """Return the trial of a layer whose code may ignore the state before a chunk."""
        return Trial(self.modules, self.name, self._run_from_start, self.adapters, self.called_as, least=2, mixes_by_states=True)

    def _run_from_start(self, h_BNE: Tensor, parts: Sequence[Span]) -> Tensor:
        """Run the layer on the parts of one sequence, each from the states after the one before."""
        outputs, stream = [], RecurrentStream(0, in_one_graph=True)
        for span in parts:
            chunk = RecurrentChunk(*span, stream=stream, mask=None, backends=[], alone=True)
            outputs.append(self.run(h_BNE[:, slice(*span)], chunk))
            chunk.check_finished()
        return torch.cat(outputs, dim=1)
