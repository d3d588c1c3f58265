"""Attention masks for one chunk of queries at a time: never (T x T), and (chunk x keys) only where nothing shorter describes it.

Shapes: B batch, H heads, T sequence, L queries of a chunk, S keys that the chunk can see.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from streamgrad.attention.blocks import Blocks
from streamgrad.attention.varlen import Segment, VarlenMask

# An additive mask of -1e4 or less is zero after softmax in every floating dtype, beside a key that has more than half of that.
HIDDEN_BIAS = -1e4


@dataclass(frozen=True, eq=False)
class Part:
    """The mask of one chunk: its queries see keys in `[first, last)` only.

    Args:
        causal, window, varlen: which query sees which key, as in `backends.Block`.
        masked: only the mask's `visible(start, stop, first, device)` describes it, and `last` is `stop`.
        queries: which of the chunk's queries these are, counted from its first; None if it is all of them.
        band: query i of these sees the keys from `first + i + band` on (a sliding window over the keys of other segments).
        pieces: what attention has made of the part, once for all layers that share the mask.
    """

    first: int
    last: int
    causal: bool = False
    window: int | None = None
    varlen: VarlenMask | None = None
    masked: bool = False
    queries: tuple[int, int] | None = None
    band: int | None = None
    pieces: dict[Any, Any] = field(default_factory=dict, repr=False)


class CausalMask:
    """A causal mask: `visible(b, q, k) = k <= q and rule(b, 0, q, k) and padding_BT[b, k]`.

    With `blocks` it is `rule(b, 0, q, k) and padding_BT[b, k]`, and tokens see later ones of their own block.

    Not a dataclass: FSDP2's mixed precision copies dataclass arguments of a layer, so each layer would recompute the parts.

    Args:
        rule: boolean function of broadcast index tensors, or None for no rule beyond causality.
        padding_BT: True for real tokens, or None if all are real.
        window: the rule hides every key with `k <= q - window`.
        documents_BT: the rule hides keys of other documents; ids must not decrease along T.
        has_other_rule: the rule hides more than `window` and `documents_BT` describe.
        batch: rows of the batch that the rule is called with; it may treat them differently.
        blocks: whose tokens see each other both ways. The other arguments describe what tokens in no block see.
        length: the sequence's, for models that read the shape of a mask which they made themselves.
    """

    ndim = 4  # as a mask that is ready for a model's layers

    def __init__(
        self,
        rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
        padding_BT: Tensor | None = None,
        window: int | None = None,
        documents_BT: Tensor | None = None,
        has_other_rule: bool = False,
        batch: int = 1,
        blocks: Blocks | None = None,
        length: int = 0,
    ) -> None:
        self.rule, self.padding_BT, self.window, self.documents_BT = rule, padding_BT, window, documents_BT
        self.has_other_rule, self.batch, self.blocks = has_other_rule, batch, blocks
        self.shape = batch, 1, length, length
        self._parts: dict[tuple[int, int, int], Part] = {}

    def part(self, start: int, stop: int, batch: int) -> Part:
        """Return what the queries `[start, stop)` of `batch` rows see, computed once for all layers that share the mask."""
        key = start, stop, batch
        if key not in self._parts:
            self._parts[key] = self._part(start, stop, batch)
        return self._parts[key]

    @property
    def uncut(self) -> Sequence[tuple[int, int]]:
        """Return the spans that no chunk may cut: inside of them, tokens see later ones."""
        return () if self.blocks is None else self.blocks.uncut

    def visible(self, start: int, stop: int, first_key: int, device: torch.device) -> Tensor:
        """Return a boolean mask (B or 1, 1, L, S), True where the query sees the key."""
        query_L1 = torch.arange(start, stop, device=device)[None, None, :, None]
        key_1S = torch.arange(first_key, stop, device=device)[None, None, None, :]
        seen = key_1S <= query_L1 if self.blocks is None else torch.ones((), dtype=torch.bool, device=device)
        if self.rule is not None:
            batch_B = torch.arange(self.batch, device=device)[:, None, None, None]
            head = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
            seen = seen & self.rule(batch_B, head, query_L1, key_1S)
        if self.padding_BT is not None:
            seen = seen & self.padding_BT[:, None, None, first_key:stop].to(device)
        return seen

    def _part(self, start: int, stop: int, batch: int) -> Part:
        first = 0 if self.window is None else max(0, start - self.window + 1)
        in_block = None if self.blocks is None else self.blocks.first_key(start, stop)
        if in_block is not None:
            return Part(min(first, in_block), stop, masked=True)
        if self.padding_BT is None and self.documents_BT is None:
            if self.has_other_rule:
                return Part(first, stop, masked=True)
            return Part(first, stop, causal=True, window=narrower(self.window, stop - first))
        first = max(first, min(row.document_start(start) for row in self._rows))
        segments = None if self.has_other_rule else self._segments(start, stop)
        if segments is None:
            return Part(first, stop, masked=True)
        by_row = segments * batch if len(self._rows) == 1 else segments
        numbered = [segment._replace(row=row) for row, of_row in enumerate(by_row) for segment in of_row]
        return as_part(numbered, start, stop, batch, self.window)

    def _segments(self, start: int, stop: int) -> list[list[Segment]] | None:
        """Return the segments of each row, in positions of the sequence; None if a row's mask is not made of segments."""
        segments = []
        for row in self._rows:
            of_row = row.segments(start, stop, self.window)
            if of_row is None:
                return None
            segments.append(of_row)
        return segments

    @cached_property
    def _rows(self) -> list[_Row]:
        """Return padding and documents of each row (one entry if all rows are alike), read in one copy from the device."""
        given = [tensor for tensor in (self.documents_BT, self.padding_BT) if tensor is not None]
        shape, device = torch.broadcast_shapes(*(tensor.shape for tensor in given)), given[0].device
        begins_BT, is_real_BT = torch.zeros(2, *shape, dtype=torch.bool, device=device).unbind(0)
        if self.documents_BT is not None:
            begins_BT[:, 1:] = self.documents_BT[:, 1:] != self.documents_BT[:, :-1]
        is_real_BT[:] = True if self.padding_BT is None else self.padding_BT
        flags = torch.stack([begins_BT, is_real_BT], dim=1).cpu()
        return [_Row.of(begins_T, is_real_T) for begins_T, is_real_T in flags]


@dataclass(frozen=True)
class _Row:
    """One row of a batch: its real tokens `[first_real, last_real)`, and the starts of its documents, the first at 0."""

    length: int
    first_real: int
    last_real: int
    is_contiguous: bool
    starts: list[int]

    @staticmethod
    def of(begins_T: Tensor, is_real_T: Tensor) -> _Row:
        length, count = len(is_real_T), int(is_real_T.sum())
        first, last = 0, 0
        if count:
            first, last = int(is_real_T.int().argmax()), length - int(is_real_T.flip(0).int().argmax())
        return _Row(length, first, last, count == last - first, [0, *begins_T.nonzero().flatten().tolist()])

    def document_start(self, position: int) -> int:
        return self.starts[bisect_right(self.starts, position) - 1]

    def documents(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield `[first, last)` of each document with a token in `[start, stop)`."""
        for index in range(bisect_right(self.starts, start) - 1, len(self.starts)):
            first = self.starts[index]
            if first >= stop:
                return
            yield first, self.starts[index + 1] if index + 1 < len(self.starts) else self.length

    def segments(self, start: int, stop: int, window: int | None) -> list[Segment] | None:
        """Return the segments of the queries `[start, stop)`, or None if the row's mask is not made of segments."""
        if not self.is_contiguous:
            return None
        segments = []
        for first, last in self.documents(start, stop):
            first_key = max(first, self.first_real)
            query, end = max(start, first_key), min(stop, last, self.last_real)
            if query < end:
                seen = first_key if window is None else max(first_key, query - window + 1)
                segments.append(Segment(0, query, end, seen, end, causal=True))
            # Padding queries after the real tokens see all real keys of the document, unless a window hides some or all of them.
            query, end = max(start, first, self.last_real), min(stop, last)
            if query < end and first_key < self.last_real and (window is None or query - window + 1 < self.last_real):
                if window is not None and end - window > first_key:
                    return None
                segments.append(Segment(0, query, end, first_key, self.last_real, causal=False))
        return segments


def as_part(segments: list[Segment], start: int, stop: int, batch: int, window: int | None) -> Part:
    """Return the segments of a chunk as a `Part`; without a `VarlenMask` if one segment, alike in all rows, spans all queries."""
    if not segments:
        return Part(start, stop, varlen=VarlenMask((), batch, stop - start))
    intervals = [interval for segment in segments for interval in segment.key_intervals]
    first, last = min(first for first, _ in intervals), max(last for _, last in intervals)
    window = narrower(window, max((segment.keys for segment in segments if segment.causal), default=0))
    kinds = {segment[1:] for segment in segments}
    if len(segments) == batch and len(kinds) == 1 and segments[0][1:3] == (start, stop) and not segments[0].ancestors:
        return Part(first, last, causal=segments[0].causal, window=window)
    moved = tuple(segment.moved(queries=start, keys=first) for segment in segments)
    return Part(first, last, window=window, varlen=VarlenMask(moved, batch, stop - start))


def attends_in_blocks(mask: object, batch: int, start: int, stop: int) -> bool:
    """Return whether queries `[start, stop)` can attend without a mask as large as their scores; so can a layer without any."""
    return mask is None or (isinstance(mask, CausalMask) and not mask.part(start, stop, batch).masked)


def narrower(window: int | None, keys: int) -> int | None:
    """Return the window, or None if it hides none of so many keys."""
    return None if window is None or keys <= window else window


@dataclass(frozen=True, eq=False)
class DenseMask:
    """A user's own (B or 1, H or 1, T, T) mask: boolean, True where the query sees the key, or additive."""

    values_BHTT: Tensor
    version: int | None = field(init=False)

    uncut = ()  # as it is causal

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", _version_of(self.values_BHTT))

    def part(self, start: int, stop: int, batch: int) -> Part:
        return Part(0, stop, masked=True)

    def visible(self, start: int, stop: int, first_key: int, device: torch.device) -> Tensor:
        """Return the mask of some queries, with -inf throughout the rows of `blind_BHT`, so that no chunk size matters there."""
        if _version_of(self.values_BHTT) != self.version:
            raise RuntimeError(
                "the 4-D attention mask was modified in place between forward and backward, which reads it again, so gradients "
                "would be wrong. Call backward before it is changed, or pass a clone."
            )
        values_BHLS = self.values_BHTT[:, :, start:stop, first_key:stop]
        if self.blind_BHT is not None:
            values_BHLS = values_BHLS.masked_fill(self.blind_BHT[:, :, start:stop, None], float("-inf"))
        return values_BHLS.to(device)

    def check_shape(self, batch: int, heads: int) -> None:
        """Raise unless the mask is for so many rows and heads, or for one of them, which is then all of them."""
        if self.values_BHTT.shape[0] not in (1, batch) or self.values_BHTT.shape[1] not in (1, heads):
            raise ValueError(
                f"the 4-D attention mask has shape {tuple(self.values_BHTT.shape)} for {batch} rows and {heads} heads. "
                f"Pass ({batch} or 1, {heads} or 1, {self.length}, {self.length})."
            )

    @property
    def length(self) -> int:
        return self.values_BHTT.shape[-2]

    @cached_property
    def blind_BHT(self) -> Tensor | None:
        """Return the queries from which an additive mask hides every key, not all by -inf; None if there are none."""
        if self.values_BHTT.dtype == torch.bool:
            return None
        largest_BHT = self.values_BHTT.amax(dim=-1)
        blind_BHT = (largest_BHT <= HIDDEN_BIAS / 2) & (largest_BHT > float("-inf"))
        return blind_BHT if blind_BHT.any() else None

    def first_look_ahead(self, chunk_size: int) -> tuple[int, int] | None:
        """Return a (query, key) with key > query that the mask leaves visible, or None if the mask is causal."""
        for start, rows_BHLT in self._blocks(chunk_size):
            ahead_LT = is_visible(rows_BHLT).any(dim=(0, 1)).triu(diagonal=start + 1)
            found = ahead_LT.nonzero()
            if len(found):
                return start + int(found[0, 0]), int(found[0, 1])
        return None

    def first_blind_in_use(self, chunk_size: int) -> tuple[int, int] | None:
        """Return (row of the batch, query) of a blind query that a query which sees keys depends on, or None.

        Softmax of a blind query is over all keys, later ones included. It depends on itself if only some of its heads are blind.
        """
        if self.blind_BHT is None:
            return None
        in_use_BT = ~self.blind_BHT.all(dim=1)
        for start, rows_BHLT in self._blocks(chunk_size):
            blind_BHL = self.blind_BHT[:, :, start : start + chunk_size]
            in_use_BT |= (is_visible(rows_BHLT) & ~blind_BHL.unsqueeze(-1)).any(dim=(1, 2))
        found = (self.blind_BHT.any(dim=1) & in_use_BT).nonzero()
        return (int(found[0, 0]), int(found[0, 1])) if len(found) else None

    def _blocks(self, rows: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.length, rows):
            yield start, self.values_BHTT[:, :, start : start + rows]


def _version_of(tensor: Tensor) -> int | None:
    """Return how often the tensor has been written to; None in inference mode, which does not count."""
    return None if tensor.is_inference() else tensor._version


def is_visible(mask: Tensor) -> Tensor:
    """Return a boolean or additive mask as a boolean one; NaN is visible."""
    return mask if mask.dtype == torch.bool else ~(mask <= HIDDEN_BIAS)


def rows_without_keys(attention_mask: Tensor, window: int | None) -> Tensor:
    """Return (B, T), True for a query that sees no key under `attention_mask`: (B, T), nonzero for real tokens, or
    (B, H, T, T), where no head may see one.

    `window` is the narrowest sliding window of the model's layers; it is combined with a (B, T) mask only.
    """
    if attention_mask.ndim == 2:
        seen_BT = attention_mask.bool().long().cumsum(dim=1)
        if window is not None and window < seen_BT.shape[1]:
            seen_BT = seen_BT - torch.nn.functional.pad(seen_BT, (window, 0))[:, :-window]
        return seen_BT == 0
    if attention_mask.dtype == torch.bool:
        return ~attention_mask.any(dim=3).any(dim=1)
    return attention_mask.amax(dim=(1, 3)) <= HIDDEN_BIAS / 2
