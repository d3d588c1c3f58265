"""What one layer costs, measured by running it forward and backward on its first few tokens.

Nothing of the runs remains: graphs are dropped, no parameter gets a gradient, and the generators stand where they stood.

Shapes: B batch, L tokens, E model width, G key/value heads, S keys, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.checks.value_choices import ValueChoices
from streamgrad.engine.kv_chunk import Chunk
from streamgrad.engine.module_walk import trainable_parameters
from streamgrad.engine.projection import noting_projection
from streamgrad.engine.recurrent_chunk import RecurrentChunk, RecurrentStream
from streamgrad.engine.replay import Autocast
from streamgrad.engine.ulysses import ALONE, SequenceSharing
from streamgrad.memory.costs import LayerCosts
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.autograd import as_saved, own_graph

PROBED_TOKENS = 256


def measured_costs(
    layer: nn.Module,
    run: Callable[[Tensor, Any], Tensor],
    mask: object,
    backends: list[Any],
    h_BTE: Tensor,
    sharing: SequenceSharing = ALONE,
    *,
    recurrent: bool = False,
) -> LayerCosts:
    """Measure the layer whose chunks `run` computes (see `StreamedCall`) on the first tokens of `h_BTE`."""
    # Scans over states pad their tokens to blocks of 64 to 256: two lengths within one block would cost the same.
    wanted = 2 * PROBED_TOKENS if recurrent else PROBED_TOKENS
    tokens = min(wanted, h_BTE.shape[1])
    trial = _Trial(layer, run, mask, backends, sharing, recurrent)
    counted = trial(h_BTE[:, :tokens])
    states, weights = counted.states, 0.0
    looped = math.inf if recurrent else 0.0  # until enough tokens show it
    if tokens > 1 and (tokens == wanted or not recurrent):
        # The difference of two lengths leaves out what does not grow with tokens, such as weights in another precision.
        shorter = trial(h_BTE[:, : tokens // 2])
        weights = counted.constant(shorter, tokens / (tokens - tokens // 2))
        looped = (len(counted.timeline) - len(shorter.timeline)) / (tokens - tokens // 2) if recurrent else 0.0
        counted = counted.less(shorter)
        tokens -= tokens // 2
    count = h_BTE.shape[0] * tokens
    trainable = trainable_parameters(layer)
    return LayerCosts(
        input=counted.input / count,
        keys_and_values=counted.keys_and_values / count / sharing.ring_ranks,
        key_sums=counted.key_sums / count / sharing.ring_ranks,
        attention=counted.attention / count,
        projection=counted.projection / count,
        # An ordinary graph saves keys and values too, which chunks leave to the stream.
        graph=(counted.input + counted.saved + counted.keys_and_values) / count,
        widest=(max(counted.timeline) - counted.keys_and_values) / count,
        # Without keys and values, and without their gradients.
        at_attention=(counted.at_attention - 2 * counted.keys_and_values) / count,
        gradients=sum(parameter.nbytes for parameter in trainable),
        gradient_sums=sum(parameter.numel() * accumulator_dtype(parameter.dtype).itemsize for parameter in trainable),
        largest_gradient=max((parameter.nbytes for parameter in trainable), default=0),
        chunk_gradients=sum(parameter.nbytes for parameter in trainable if parameter.dim() > 2),
        states=states / h_BTE.shape[0],
        weights=weights,
        recorded=counted.recorded / count,
        looped=max(0.0, looped),
        forward=max(0, max(counted.forward) - counted.keys_and_values) / count if counted.forward else 0.0,
    )


@dataclass(frozen=True)
class _Counted:
    """Bytes in one trial."""

    input: int
    recorded: int
    keys_and_values: int
    key_sums: int
    attention: int
    projection: int
    states: int
    saved: int  # by the graph, beside its input and the layer's weights
    at_attention: int  # alive when attention's backward had run
    timeline: tuple[int, ...]  # alive after each tensor that was made on the way
    forward: tuple[int, ...]  # the same without a graph; empty where chunks run forward one by one

    def less(self, other: _Counted) -> _Counted:
        counts = {name: max(0, n - getattr(other, name)) for name, n in vars(self).items() if isinstance(n, int)}
        # At each moment: a weight in another precision can be most of the memory for few tokens, at another moment than for many.
        timeline, forward = (
            tuple(max(0, here - there) for here, there in _comparable(*both))
            for both in ((self.timeline, other.timeline), (self.forward, other.forward))
        )
        return _Counted(**counts, timeline=timeline, forward=forward)

    def constant(self, shorter: _Counted, ratio: float) -> float:
        """Return the most that is alive at a moment and does not grow with tokens; `shorter` lacks one in `ratio` of them."""
        both = _comparable(self.timeline, shorter.timeline)
        return max(max(0.0, here - ratio * (here - there)) for here, there in both)


def _comparable(ours: tuple[int, ...], theirs: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield what was alive at each moment of two timelines, or only at their peaks where the layer did not do the same.

    That is so with experts that none chose.
    """
    if not (ours and theirs):  # the layer chooses by values, if only in one of them
        return iter(())
    if len(ours) != len(theirs):
        ours, theirs = (max(ours),), (max(theirs),)
    return zip(ours, theirs, strict=True)


class _Timeline(LiveBytes):
    """Notes what is alive after each birth."""

    def __init__(self) -> None:
        super().__init__()
        self.timeline: list[int] = []

    def _born(self, key: int, size: int) -> None:
        super()._born(key, size)
        self.timeline.append(self.live_bytes)


class _WatchedStream(RecurrentStream):
    """A stream longer than its chunk, as in a sequence of chunks, that notes what is alive when gradients are deposited."""

    def __init__(self, length: int, live: LiveBytes) -> None:
        super().__init__(length)
        self._live = live
        self.bytes_at_deposit = 0

    def deposit(self, first: int, last: int, dkey_BGSD: Tensor, dvalue_BGSD: Tensor) -> None:
        self.bytes_at_deposit = max(self.bytes_at_deposit, self._live.live_bytes)
        self._gradients = dkey_BGSD, dvalue_BGSD

    def sums(self, start: int, stop: int) -> list[Tensor]:
        """Return zeros of the right shape: in padded rows, deposits may be for keys other than the chunk's own."""
        self._gradients = None
        return [torch.zeros_like(tensor_BGLD) for tensor_BGLD in self.read(start, stop)]


@dataclass
class _Trial:
    layer: nn.Module
    run: Callable[[Tensor, Any], Tensor]
    mask: object
    backends: list[Any]
    sharing: SequenceSharing
    recurrent: bool

    def __call__(self, h_BLE: Tensor) -> _Counted:
        """Count in runs of their own: the hook that counts what is saved also keeps it alive longer, which would raise the peak.

        Forward without a graph is not counted for a layer with states, nor for one that chooses by values: their chunks run
        forward one by one.
        """
        h_BLE = h_BLE.detach().clone().requires_grad_()
        autocast = Autocast(h_BLE.device.type)
        with torch.random.fork_rng(devices=[h_BLE.device] if h_BLE.device.type == "cuda" else []), torch.enable_grad():
            counts = self._sizes(h_BLE)
            autocast.forget_casts()
            timeline, at_attention, held = self._alive(h_BLE)
            autocast.forget_casts()
            forward = () if self.recurrent else self._alive_in_forward(h_BLE)
            autocast.forget_casts()
        # Autograd functions may also hold tensors that torch does not save for them, as products of quantised weights do.
        counts["saved"] = max(counts["saved"], held)
        return _Counted(**counts, timeline=timeline, at_attention=at_attention, forward=forward)

    def _sizes(self, h_BLE: Tensor) -> dict[str, int]:
        chunk, saved = self._chunk(h_BLE, LiveBytes()), _SavedBytes(self.layer, h_BLE)
        with saved:
            out_BLE = noting_projection(lambda h_BLE: self.run(h_BLE, chunk), [*self.layer.modules()], chunk)(h_BLE)
        chunk.check_finished()
        # As many as this process holds for its tokens: where ranks share a sequence, copies and other ranks' as well.
        keys = [tensor_BGTD[:, :, : self.sharing.ranks * h_BLE.shape[1]] for tensor_BGTD in chunk.stream.tensors]
        kept = chunk.kept
        states = chunk.written.values() if isinstance(chunk, RecurrentChunk) else ()
        return {
            "input": max(h_BLE.nbytes, out_BLE.nbytes),
            # Of all ranks that share the sequence, and then with probabilities or with gradients.
            "recorded": 2 * self.sharing.ranks * sum(tensor.nbytes for tensor in chunk.recorded),
            "keys_and_values": sum(key.nbytes for key in keys),
            "key_sums": sum(key.numel() * accumulator_dtype(key.dtype).itemsize for key in keys),
            "attention": 0 if kept is None else kept.out_BHLD.nbytes + kept.lse_BHL.nbytes,
            "projection": 0 if kept is None or kept.projection_BLE is None else kept.projection_BLE.nbytes,
            "states": sum(state.nbytes for state in states),
            "saved": saved.total_bytes,
        }

    def _alive(self, h_BLE: Tensor) -> tuple[tuple[int, ...], int, int]:
        """Return the live bytes after each birth, those when attention's backward had run, and those that the graph holds."""
        dout_BLE = torch.zeros_like(h_BLE)
        with own_graph(), _Timeline() as live, torch.autograd.set_multithreading_enabled(False):
            chunk = self._chunk(h_BLE, live)
            out_BLE = self.run(h_BLE, chunk)
            chunk.release()
            held = live.live_bytes - out_BLE.nbytes - sum(tensor.nbytes for tensor in chunk.stream.tensors)
            # Differentiate by the input alone: hooks would see gradients of parameters, which are counted separately.
            torch.autograd.grad(out_BLE, h_BLE, dout_BLE.to(out_BLE.dtype))
        return tuple(live.timeline), chunk.stream.bytes_at_deposit, held

    @torch.no_grad()
    def _alive_in_forward(self, h_BLE: Tensor) -> tuple[int, ...]:
        """Return the live bytes after each birth in a run without a graph; none for a layer that chooses by values."""
        with ValueChoices() as choices, _Timeline() as live:
            self.run(h_BLE.detach(), self._chunk(h_BLE, live))
        return () if choices.made else tuple(live.timeline)

    def _chunk(self, h_BLE: Tensor, live: LiveBytes) -> Any:
        length = h_BLE.shape[1]
        stream = _WatchedStream(self.sharing.ranks * (length + 1), live)
        if self.recurrent:
            return RecurrentChunk(0, length, stream, self.mask, self.backends)
        return Chunk(0, length, stream, self.mask, self.backends, keep_attention=True, sharing=self.sharing)


class _SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that a graph saves beside the layer's input and its weights, each storage once; a slice counts as its own size."""

    def __init__(self, layer: nn.Module, h_BLE: Tensor) -> None:
        others = {tensor.untyped_storage()._cdata for tensor in (h_BLE, *layer.parameters())}
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in others:
                # A slice counts as its own size: rotary angles are slices of the whole sequence's.
                sizes[storage._cdata] = max(sizes.get(storage._cdata, 0), min(storage.nbytes(), tensor.nbytes))
            return as_saved(tensor)

        super().__init__(note, lambda tensor: tensor)
        self._sizes = sizes

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes.values())
