"""Runs a layer forward, chunk after chunk without a graph; before backward, up to the keys again where these were not kept.

    out[:, a:b] = layer(h[:, a:b], keys and values of [0, b))

Forward may run several neighbouring chunks, a *stretch*, in one call of the layer, because it holds no graph. The plan says how
many need no more memory than the backward of one chunk (`memory.costs.chunks_in_forward`). The results are then cut into chunks.
A chunk runs alone if it draws random numbers, which backward must draw again chunk by chunk, if the layer chooses by values
(`checks.value_choices`; the first stretch of its kind shows that, and is run again), if its attention holds a score or a mask
for every key, or after memory has run out in a stretch. What runs chunks forward again, for keys or for the input of a layer
above, runs them in the same stretches.

Shapes: B batch, T sequence, L chunk or stretch, E model width, H query heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from streamgrad.engine.call import StreamedCall
from streamgrad.engine.checks.first_run import FirstRun, is_leaving_weights, with_graph
from streamgrad.engine.checks.guards import RerunGuard, Unchanged, check_leaves
from streamgrad.engine.checks.kept_graphs import is_to_be_watched
from streamgrad.engine.checks.module_state import ModuleState, undone_if_refused
from streamgrad.engine.checks.trial import Trial
from streamgrad.engine.checks.value_choices import ValueChoices, chose_before, note_choice
from streamgrad.engine.kv_chunk import Attended, Chunk, KeyValueStream, Span, StopAfterWrite
from streamgrad.engine.projection import noting_projection
from streamgrad.engine.replay import RandomTape
from streamgrad.engine.saved import Reader, Saved
from streamgrad.engine.shortage import is_only_process
from streamgrad.engine.unread import UnreadProducts
from streamgrad.ops.memory_label import labelled, memory_label

logger = logging.getLogger("streamgrad")

Drawing = Callable[[int], AbstractContextManager[None]]
_Ran = tuple["Stretch", Tensor, Chunk]  # with its output and the chunk that it was run as


@dataclass(frozen=True)
class Stretch:
    """Chunks next to each other, by number from `first` on, that run forward together."""

    first: int
    spans: Sequence[Span]

    @property
    def span(self) -> Span:
        return self.spans[0][0], self.spans[-1][1]

    @property
    def apart(self) -> list[Stretch]:
        """Return its chunks, each alone."""
        return [Stretch(self.first + place, [span]) for place, span in enumerate(self.spans)]


def stretches(spans: Sequence[Span], sizes: Iterable[int]) -> list[Stretch]:
    """Return the chunks in stretches of these sizes, of which the last may have fewer."""
    found: list[Stretch] = []
    first = 0
    for size in sizes:
        if first < len(spans):
            found.append(Stretch(first, spans[first : first + size]))
        first += size
    return found


@labelled("activations")
def run_forward(
    call: StreamedCall, h_BTE: Tensor, tape: RandomTape, drawing: Drawing, guard: RerunGuard | None, kept: Saved | None
) -> tuple[list[Tensor], KeyValueStream]:
    """Run all chunks in order, without a graph but for some; return hidden states and what was recorded, and the stream.

    `guard` and `kept`, given if a backward pass follows, are told of each chunk, which runs in `drawing` of its number.
    """
    stream, spans = call.new_stream(h_BTE.shape[1]), call.spans(h_BTE.shape[1])
    trial = call.trial(h_BTE.shape[1]) if len(spans) > 1 else None
    first_run, is_first = None, trial is not None and trial.is_due(h_BTE, before_backward=guard is not None)
    if guard is not None and (is_first or (trial is None and is_to_be_watched(call.modules))):
        first_run = FirstRun(call.modules, call.name, of_input=h_BTE.requires_grad)
    is_new = is_first or first_run is not None
    told = nullcontext() if guard is None else _told_of_no_graph(call.name)
    with call.surroundings(), undone_if_refused(call.modules) if is_new else nullcontext() as before, told:
        # Detached, else chunks would require a gradient, and hooks on submodules would see that.
        one_pass = _ForwardPass(call, h_BTE.detach(), stream, tape, drawing, guard, kept, trial, first_run, before)
        return one_pass.run(spans), stream


@dataclass
class _ForwardPass:
    """One pass of a layer over its chunks."""

    call: StreamedCall
    h_BTE: Tensor
    stream: KeyValueStream
    tape: RandomTape
    drawing: Drawing
    guard: RerunGuard | None
    kept: Saved | None
    trial: Trial | None  # where there are several chunks
    first_run: FirstRun | None  # where nobody has seen what the layer keeps
    before: ModuleState | None  # of a layer that is new, so that it may be refused
    one_by_one: bool = False  # whether chunks run alone from now on

    def run(self, spans: Sequence[Span]) -> list[Tensor]:
        """Return hidden states, and what was recorded, of the whole sequence."""
        call, h_BTE, outputs_BT, ran = self.call, self.h_BTE, list[Tensor](), list[int]()
        is_again = bool(call.stretch_sizes)
        unchanged = Unchanged(call.modules, h_BTE, runs_again=self.kept is not None)
        combined = UnreadProducts(call.layer, call.tokens_at_once(h_BTE.shape), h_BTE.device.type).may_be_left_out
        # The first chunk runs alone, and shows whether chunks have to.
        for planned in stretches(spans, call.stretch_sizes or [1] + [call.chunks_at_once] * len(spans)):
            for stretch, out_BLE, chunk in self._run(planned):
                chunk.check_finished()
                check_leaves(out_BLE, [], call.name)
                unchanged.check()
                if stretch.first == 0 and self.trial is not None and not is_again:
                    self.trial(h_BTE, before_backward=self.guard is not None, before=self.before)
                self._note(stretch, out_BLE, chunk, combined=combined)
                ran.append(len(stretch.spans))
                made, start, stop = [out_BLE, *chunk.recorded], chunk.start, chunk.stop
                if stop - start == h_BTE.shape[1]:
                    outputs_BT = made
                    del chunk
                    break
                if not outputs_BT:
                    # Not empty_like(h): under autocast a layer's output may have another dtype than its input.
                    with memory_label("hidden states"):
                        outputs_BT += [part.new_empty(*h_BTE.shape[:2], *part.shape[2:]) for part in made]
                for whole, part in zip(outputs_BT, made, strict=True):
                    whole[:, start:stop] = part
                del out_BLE, chunk, made, part  # before the next chunks run
        call.stretch_sizes = ran
        if self.first_run is not None:
            self.first_run.check()
        return outputs_BT

    def _run(self, stretch: Stretch) -> Iterable[_Ran]:
        """Run the chunks of a stretch together, or one by one where they must be alone. None is held on to here."""
        if len(stretch.spans) == 1:
            return map(self._run_together, [stretch])
        together = self._tried_together(stretch) if self.call.stretch_sizes or self._may_join(stretch) else []
        return together or map(self._run_together, stretch.apart)

    def _may_join(self, stretch: Stretch) -> bool:
        if self.one_by_one or self.tape.has_draws or not self.call.may_join(*stretch.span):
            return False
        if is_leaving_weights(self.call.layer):
            return False
        return not chose_before(self.call.layer, self._kind(stretch))

    def _kind(self, stretch: Stretch) -> Hashable:
        """Return what stretches have in common that all choose or none do: what the layer consists of, and about their length."""
        assert self.trial is not None, "there are several chunks"
        start, stop = stretch.span
        return (stop - start).bit_length(), self.trial.contents

    def _tried_together(self, stretch: Stretch) -> list[_Ran]:
        """Return what the chunks gave together; nothing where they have to run once more, one by one."""
        layer, kind = self.call.layer, self._kind(stretch)
        is_new = not self.call.stretch_sizes and chose_before(layer, kind) is None
        choices = ValueChoices() if is_new else None
        try:
            with nullcontext() if choices is None else choices:
                found = [self._run_together(stretch)]
        except torch.OutOfMemoryError:
            if not is_only_process():
                raise
            self.call.on_full_stretch()
            found, choices = [], None
        except Exception:  # of code that does not run while it is looked at (whole graphs of torch.compile), or that comes again
            if choices is None:
                raise
            found, choices.made = [], True
        if choices is not None:
            note_choice(layer, kind, choices.made)
            if choices.made:
                what = choices.operator or "code that is not torch's"
                logger.debug("streamgrad: chunks of %s run forward one by one, for %s", self.call.name, what)
        if self.tape.forget(stretch.first) or (choices is not None and choices.made):
            found = []
        self.one_by_one |= not found
        return found

    def _run_together(self, stretch: Stretch) -> _Ran:
        start, stop = stretch.span
        keep_attention = self.kept is not None and self.call.policy.keep == "attention"
        chunk = self.call.chunk((start, stop), self.stream, keep_attention=keep_attention)
        if len(stretch.spans) > 1:
            chunk.ends = [last - start - 1 for _, last in stretch.spans]
        run, h_BLE = (lambda h_BLE: self.call.run(h_BLE, chunk)), self.h_BTE[:, start:stop]
        if keep_attention and self.call.policy.projection:
            run = noting_projection(run, self.call.modules, chunk)
        is_first = self.first_run is not None and stretch.first == 0
        is_last = self.guard is not None and stop == self.h_BTE.shape[1] and is_leaving_weights(self.call.layer)
        with self.drawing(stretch.first), with_graph() if is_last else nullcontext():
            out_BLE = self.first_run(run, h_BLE) if self.first_run is not None and is_first else run(h_BLE)
        if is_first or is_last:
            out_BLE, chunk.recorded = out_BLE.detach(), [tensor.detach() for tensor in chunk.recorded]
        self.one_by_one |= chunk.holds_scores
        return stretch, out_BLE, chunk

    def _note(self, stretch: Stretch, out_BLE: Tensor, chunk: Chunk, *, combined: bool) -> None:
        """Tell guard and store of each chunk of a stretch."""
        start, together = stretch.spans[0][0], len(stretch.spans) > 1
        for place, (first, last) in enumerate(stretch.spans):
            if self.guard is not None:
                others = chunk.attended_with[place] if chunk.attended_with else ()
                out = out_BLE[:, first - start : last - start] if together else out_BLE
                self.guard.note(out, others, combined=combined)
            if self.kept is not None:
                attended = _part(chunk.kept, first - start, last - start) if together else chunk.kept
                self.kept.note(stretch.first + place, attended)


@contextmanager
def _told_of_no_graph(name: str) -> Iterator[None]:
    """Say why there is no graph in errors of code that needs one, as `Tensor.register_hook` in a module's forward hook does."""
    try:
        yield
    except RuntimeError as error:
        if "n't require grad" in str(error) or "not require grad" in str(error):
            error.add_note(
                f"streamgrad: {name} runs forward without a graph, and again with one in backward. Code that needs a graph, as a "
                'hook on a tensor does, should ask tensor.requires_grad first. keep="all" runs layers as in the stock model.'
            )
        raise


def _part(attended: Attended | None, first: int, last: int) -> Attended | None:
    """Return what queries `[first, last)` of a stretch have attended to, laid out as if they had run alone."""
    if attended is None:
        return None
    out_BHLD, lse_BHL = attended.out_BHLD[:, :, first:last], attended.lse_BHL[:, :, first:last].contiguous()
    product = attended.projection_BLE
    return Attended(_dense(out_BHLD), lse_BHL, projection_BLE=None if product is None else _dense(product[:, first:last]))


def _dense(part: Tensor) -> Tensor:
    """Return some tokens without gaps. One row has none, but for a stride that says nothing, by which kernels look up plans."""
    return part.squeeze(0).unsqueeze(0) if part.shape[0] == 1 else part.clone()


# --- keys and values, for backward -------------------------------------------------------------------------------------


def restored_stream(call: StreamedCall, tape: RandomTape, reader: Reader, length: int) -> KeyValueStream:
    """Return the keys and values of the whole sequence, as kept or by running every chunk but the last up to its keys."""
    if reader.has_attention and call.sharing.ring_ranks == 1:
        return call.new_stream(length, reader.keys_and_values())
    stream, spans = call.new_stream(length), call.spans(length)
    if reader.has_attention:
        kept = reader.keys_and_values()
        each = kept[0].shape[2] // length  # tokens of the ranks that trade heads with this one
        for start, stop in spans:
            call.chunk((start, stop), stream).gather(*(tensor[:, :, each * start : each * stop] for tensor in kept))
        return stream
    restored = set(call.restored(length))
    for stretch in stretches(spans, call.stretch_sizes):  # as in forward, so that keys are the same
        parts = [span for index, span in enumerate(stretch.spans, stretch.first) if index in restored]
        if parts:
            again = Stretch(stretch.first, parts)
            with torch.no_grad(), tape.replaying(again.first):
                _write_keys(call, reader.inputs(again.first, len(parts)), again.span, stream)
    return stream


def _write_keys(call: StreamedCall, h_BLE: Tensor, span: Span, stream: KeyValueStream) -> None:
    with suppress(StopAfterWrite):
        call.run(h_BLE, call.chunk(span, stream, stop_after_write=True))
