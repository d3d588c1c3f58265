"""One chunk `[start, stop)` of a sequence on its way through one decoder layer.

The same `Chunk` object is handed to a Hugging Face layer twice: as its key/value cache, whose `update` the attention module
calls for the chunk, and as its attention mask, which the attention module passes on untouched to the attention function, with
the chunk's keys and values. So the two seams share state through the call itself and the engine needs no globals.

Shapes: B batch, H query heads, G key/value heads, T sequence, L chunk, D head size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from streamgrad.engine.ulysses import ALONE, Arriving, SequenceSharing
from streamgrad.ops.accumulate import as_sum, zeros_for_sum
from streamgrad.ops.memory_label import labelled, relabel

Span = tuple[int, int]  # tokens [start, stop)


def spans(length: int, chunk_size: int, uncut: Sequence[Span] = ()) -> list[Span]:
    """Return `[(0, c), (c, 2c), ...]` up to `length`, with no border inside one of `uncut`, which are apart and in order.

    A span ends before an uncut one that it cannot hold, and is longer than `chunk_size` only if that one is.
    """
    found, start = [], 0
    while start < length:
        stop = min(start + chunk_size, length)
        before = bisect_left(uncut, (stop,)) - 1  # the last that begins before `stop`
        if before >= 0 and stop < uncut[before][1]:
            stop = uncut[before][0] if uncut[before][0] > start else uncut[before][1]
        found.append((start, stop))
        start = stop
    return found


def with_dense_rows(tensor_BHLD: Tensor) -> Tensor:
    """Return the tensor with each head's values consecutive in memory, which kernels assume and do not check."""
    return tensor_BHLD if tensor_BHLD.stride(-1) == 1 else tensor_BHLD.contiguous()


class StopAfterWrite(Exception):
    """Raised by a chunk to leave a layer's forward as soon as its keys and values, and states, are written."""


# Keys [first, last), and a gradient of these keys and their values.
KeyGradient = tuple[int, int, Tensor, Tensor]


class KeyValueStream:
    """Keys and values of the whole sequence for one layer, and the gradient that queries owe them.

    The gradient is summed in fp32 for 16-bit keys: a position collects one term per later chunk.
    """

    def __init__(self, length: int, tensors: tuple[Tensor, ...] | None = None) -> None:
        self.length = length
        self.written = 0 if tensors is None else length  # so many of the first keys are there
        self._tensors = tensors
        self._gradients: tuple[Tensor, Tensor] | None = None
        self._arriving: tuple[int, int, Arriving] | None = None  # keys that other ranks send

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return keys and values, (B, G, T, D) each; nothing for a layer that has none."""
        self.settle()
        return self._tensors or ()

    def expect(self, start: int, stop: int, arriving: Arriving) -> None:
        """Note that the keys and values `[start, stop)` are on their way; whoever reads them first waits for them."""
        self.settle()
        self.written = stop
        self._arriving = start, stop, arriving

    def settle(self) -> None:
        """Wait for keys and values that are on their way."""
        if self._arriving is not None:
            start, stop, arriving = self._arriving
            self._arriving = None
            key_BGLD, value_BGLD = arriving()
            self.write(start, stop, key_BGLD, value_BGLD)

    @labelled("keys and values")
    def write(self, start: int, stop: int, key_BGLD: Tensor, value_BGLD: Tensor) -> None:
        self.written = stop
        if stop - start == self.length:
            self._tensors = with_dense_rows(key_BGLD.detach()), with_dense_rows(value_BGLD.detach())
            return
        if self._tensors is None:
            self._tensors = self._full_length(key_BGLD), self._full_length(value_BGLD)
        self._tensors[0][:, :, start:stop] = key_BGLD.detach()
        self._tensors[1][:, :, start:stop] = value_BGLD.detach()

    def read(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values `[first, last)`."""
        if self._arriving is not None and last > self._arriving[0]:
            self.settle()
        assert self._tensors is not None, "nothing was written"
        key_BGTD, value_BGTD = self._tensors
        return key_BGTD[:, :, first:last], value_BGTD[:, :, first:last]

    @labelled("keys and values")
    def deposit(self, first: int, last: int, dkey_BGSD: Tensor, dvalue_BGSD: Tensor) -> None:
        """Add gradients of the keys and values `[first, last)`; the stream may keep and overwrite the tensors."""
        terms = dkey_BGSD, dvalue_BGSD
        if self._gradients is None and last - first == self.length:
            self._gradients = terms  # the first term of every key is the sum so far
            relabel("keys and values", *terms)
            return
        if self._gradients is not None:
            self._gradients = as_sum(self._gradients[0]), as_sum(self._gradients[1])
        for total, term in zip(self.sums(first, last), terms, strict=True):
            total += term

    @property
    def is_owed(self) -> bool:
        """Return whether queries have left a gradient for keys."""
        return self._gradients is not None

    @labelled("keys and values")
    def sums(self, start: int, stop: int) -> list[Tensor]:
        """Return views of the sums for `[start, stop)`, complete once every later chunk has run."""
        if self._gradients is None:
            key, value = self.tensors
            self._gradients = zeros_for_sum(key), zeros_for_sum(value)
        return [total[:, :, start:stop] for total in self._gradients]

    @labelled("keys and values")
    def collect(self, start: int, stop: int, arriving: Arriving | None = None) -> tuple[Tensor, Tensor]:
        """Return the sums for `[start, stop)`, or what ranks have made of them, in the dtype of keys and values."""
        totals = self.sums(start, stop) if arriving is None else arriving()
        dkey, dvalue = (total.to(tensor.dtype) for total, tensor in zip(totals, self.tensors, strict=True))
        return dkey, dvalue

    def _full_length(self, chunk_BGLD: Tensor) -> Tensor:
        """Return (B, G, T, D) with a token's heads beside each other, as layers make them: strides are alike at every length."""
        batch, heads, _, size = chunk_BGLD.shape
        return chunk_BGLD.new_empty(batch, self.length, heads, size).transpose(1, 2)


@dataclass
class Attended:
    """The results of one chunk's attention: all that its backward needs beside queries, keys and values."""

    out_BHLD: Tensor
    lse_BHL: Tensor
    dropped_BHLS: Tensor | None = None
    held_scores: bool = field(default=False, kw_only=True)  # whether the kernel has had one for every query and key at a time
    projection_BLE: Tensor | None = field(default=None, kw_only=True)  # the product that reads it, where it is kept too

    @property
    def tensors(self) -> list[Tensor]:
        """Return what is kept of it; `of` makes the same of them again."""
        return [self.out_BHLD, self.lse_BHL, *([] if self.projection_BLE is None else [self.projection_BLE])]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Attended:
        out_BHLD, lse_BHL, *rest = tensors
        return cls(out_BHLD, lse_BHL, projection_BLE=rest[0] if rest else None)


@dataclass
class Chunk:
    """Cache and mask of one layer call over `[start, stop)`; see the module's docstring.

    `start` and `stop` count tokens of this process, to which the layer's arguments are cut. `span` counts tokens of the sequence,
    by which keys and masks are addressed: where ranks share a sequence, their chunks together are one chunk of it.
    `recorded` holds the layer's other outputs by token, (B, L, ...), such as the logits of a router, and `token_inputs` what
    stands in backward for its inputs by token beside hidden states. `shared_keys` are keys and values, by name, that the layer
    attends to in place of its own, or leaves for others. `attended_with` are the last token's query, key and value where the
    attention output is kept, so that a re-run with others gives the same output; for each of `ends` one, which are the last
    tokens of the chunks that run together.
    """

    start: int
    stop: int
    stream: KeyValueStream
    mask: object
    backends: list[Any]
    keep_attention: bool = False
    stop_after_write: bool = False
    in_backward: bool = False  # a re-run, whose keys may be in the stream already
    alone: bool = False  # in a trial, where every token sees itself only and none is padding
    kept: Attended | None = None
    own: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    cached: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    attention_calls: int = 0
    sharing: SequenceSharing = ALONE
    recorded: list[Tensor] = field(default_factory=list, repr=False)
    token_inputs: list[Tensor] | None = field(default=None, repr=False)
    shared_keys: MutableMapping[str, Any] | None = field(default=None, repr=False)
    ends: Sequence[int] = (-1,)
    ran_by: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # the kernels of attention, for when it runs again
    holds_scores: bool = False  # whether its attention has held a score for every query and key
    attended_with: list[list[Tensor]] = field(default_factory=list, repr=False)
    attended: Tensor | None = field(default=None, repr=False)  # comes with attention's output and has no elements
    span: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.span = self.sharing.ranks * self.start, self.sharing.ranks * self.stop

    @property
    def query_spans(self) -> list[tuple[int, int]]:
        """Return the positions in the sequence of the queries that this process attends with."""
        return self.sharing.query_spans(self.start, self.stop)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return what is to be cached unchanged, as the layer's cache. It may not be keys and values yet (latent attention)."""
        if self.cached is not None:
            raise SeamError("its attention writes keys and values more than once a layer")
        self.check_tokens(key_states)
        self.cached = key_states, value_states
        return key_states, value_states

    def receive(self, key_BGLD: Tensor, value_BGLD: Tensor) -> None:
        """Write the chunk's own keys and values, as attention is called with them, into the stream."""
        self.check_tokens(key_BGLD)
        self.attention_calls += 1
        self.own = key_BGLD, value_BGLD
        if not self.in_backward or self.span[1] > self.stream.written:
            self.gather(*(self.sharing.keys_to_heads(tensor.detach()) for tensor in self.own))
        self._stop_if_all_is_written()

    def gather(self, key_BGLD: Tensor, value_BGLD: Tensor) -> None:
        """Write keys and values of this rank's heads into the stream, with those that ranks of its ring send."""
        arriving = self.sharing.gather_over_ring(self.start, self.stop, key_BGLD, value_BGLD)
        if arriving is None:
            self.stream.write(*self.span, key_BGLD, value_BGLD)
        else:
            self.stream.expect(*self.span, arriving)

    def _stop_if_all_is_written(self) -> None:
        if self.stop_after_write:
            raise StopAfterWrite

    def check_tokens(self, key_BGLD: Tensor) -> None:
        if key_BGLD.shape[-2] != self.stop - self.start:
            raise SeamError(
                f"its attention makes {key_BGLD.shape[-2]} keys for a chunk of {self.stop - self.start} tokens, "
                "so keys do not belong to single tokens"
            )

    @property
    def is_whole(self) -> bool:
        return self.span == (0, self.stream.length)

    def check_finished(self) -> None:
        """Raise for a layer that went around either seam: it mixed tokens in a way the stream does not know.

        One without a mask is said to have no attention, and fails its trial if it mixes tokens in another way.
        """
        has_keys = self.cached is not None or bool(self.shared_keys)
        if not has_keys and (self.attention_calls or self.mask is not None):
            raise SeamError("its layer never called past_key_values.update(key, value, layer_idx)")
        if has_keys and self.attention_calls != 1:
            raise SeamError(f"its layer called the registered attention function {self.attention_calls} times instead of once")

    def __getattr__(self, name: str) -> Any:
        raise UnknownSeamAttribute(f"its layers read {name!r} of their mask or cache, which a chunk of a sequence does not have")

    def __getitem__(self, index: Any) -> Any:
        raise SeamError("its layers index their mask or cache themselves")

    @property
    def inputs(self) -> list[Tensor]:
        """Return the leaves of the chunk's graph beside hidden states and parameters."""
        return []

    def outputs(self) -> list[tuple[Tensor, Tensor]]:
        """Return what the chunk hands on beside hidden states, each with its gradient."""
        # Other ranks wait for what this one sends in attention's backward.
        is_awaited = self.stream.is_owed or self.sharing.ranks > 1
        return [] if self.attended is None or not is_awaited else [(self.attended, self.attended.detach())]

    def settle(self) -> None:
        """Note that backward has gone through the chunk."""

    def release(self) -> None:
        """Drop the tensors that tie a finished chunk to its graph."""
        self.own = self.cached = self.attended = None


class SeamError(ValueError):
    """A layer that cannot be streamed exactly; the message completes the sentence "X cannot be streamed: ..."."""


class UnknownSeamAttribute(SeamError, AttributeError):
    """Also an AttributeError, so that `hasattr` and `getattr` with a default work on a chunk."""
