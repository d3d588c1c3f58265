"""Masks as rectangles of queries and keys, the form that varlen kernels take.

With packed documents and padding at the ends of rows, consecutive queries see the same keys, up to causality. A `Segment` is such
a rectangle; a sliding window applies within it. The segments of a chunk replace its (chunk x keys) mask, and a query in no
segment sees no key.

Shapes: B batch, H heads, L queries of a chunk, S keys, T queries or keys, N tokens of a varlen batch (the queries or keys of its
segments, concatenated), C segments + 1, x any further axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from streamgrad.engine.kv_chunk import KeyGradient


class Segment(NamedTuple):
    """Queries `[first_query, last_query)` of a row that see keys `[first_key, last_key)`.

    If `causal`, the last query sees all keys, the one before it all but the last key, and so on; else each query sees every key.
    `ancestors` are intervals of keys that come before those, in order, and may be other segments' keys too (`attention.trees`).
    """

    row: int
    first_query: int
    last_query: int
    first_key: int
    last_key: int
    causal: bool
    ancestors: tuple[tuple[int, int], ...] = ()

    @property
    def key_intervals(self) -> tuple[tuple[int, int], ...]:
        return *self.ancestors, (self.first_key, self.last_key)

    @property
    def keys(self) -> int:
        return sum(last - first for first, last in self.key_intervals)

    def of_queries(self, tensor_BHLx: Tensor) -> Tensor:
        return tensor_BHLx[self.row : self.row + 1, :, self.first_query : self.last_query]

    def of_keys(self, tensor_BHSx: Tensor) -> Tensor:
        """Return the segment's keys: a view if they are one interval."""
        views = [tensor_BHSx[self.row : self.row + 1, :, first:last] for first, last in self.key_intervals]
        return views[0] if len(views) == 1 else torch.cat(views, dim=2)

    def add_to_keys(self, total_BHSx: Tensor, term_BHSx: Tensor) -> None:
        """Add what belongs to the segment's keys to what belongs to all keys."""
        done = 0
        for first, last in self.key_intervals:
            total_BHSx[self.row : self.row + 1, :, first:last] += term_BHSx[:, :, done : done + last - first]
            done += last - first

    def moved(self, queries: int, keys: int) -> Segment:
        """Return the segment with queries counted from `queries` and keys from `keys`."""
        return self._replace(
            first_query=self.first_query - queries,
            last_query=self.last_query - queries,
            first_key=self.first_key - keys,
            last_key=self.last_key - keys,
            ancestors=tuple((first - keys, last - keys) for first, last in self.ancestors),
        )


@dataclass(frozen=True, eq=False)
class VarlenMask:
    """The segments of one chunk of a batch; the tensors that kernels need are made once per device.

    No query is in two segments. Segments of one kind (causal or not) are sorted by row, query and key.
    """

    segments: tuple[Segment, ...]
    batch: int
    queries: int
    _batches: dict[torch.device, list[VarlenBatch]] = field(default_factory=dict, init=False, repr=False)
    _intervals: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def has_ancestors(self) -> bool:
        return any(segment.ancestors for segment in self.segments)

    def batches(self, device: torch.device) -> list[VarlenBatch]:
        """Return the causal segments as one varlen batch and the others as a second, leaving out an empty one."""
        if device not in self._batches:
            kinds = ([segment for segment in self.segments if segment.causal is causal] for causal in (True, False))
            self._batches[device] = [VarlenBatch.of(segments, device) for segments in kinds if segments]
        return self._batches[device]

    def visible(self, keys: int, window: int | None, device: torch.device) -> Tensor:
        """Return the mask that the segments replace, (B, 1, L, S), for kernels that take nothing else.

        `window`, if given, hides all but the last `window` keys from each query of a causal segment.
        """
        assert not self.has_ancestors, "which are no interval with a segment's own keys"
        if device not in self._intervals:
            self._intervals[device] = self._interval_of_each_query().to(device)
        first_BL, last_BL, causal_BL = self._intervals[device].unbind(0)
        if window is not None:
            first_BL = torch.where(causal_BL.bool(), torch.maximum(first_BL, last_BL - window), first_BL)
        key_S = torch.arange(keys, device=device)
        return ((key_S >= first_BL[..., None]) & (key_S < last_BL[..., None])).unsqueeze(1)

    def _interval_of_each_query(self) -> Tensor:
        """Return (3, B, L): each query's first key, the end of its keys, and whether its segment is causal."""
        intervals = torch.zeros(3, self.batch, self.queries, dtype=torch.long, device="cpu")
        for segment in self.segments:
            of_segment = intervals[:, segment.row, segment.first_query : segment.last_query]
            rows = segment.last_query - segment.first_query
            of_segment[0] = segment.first_key
            of_segment[1] = segment.last_key
            if segment.causal:
                of_segment[1] -= torch.arange(rows - 1, -1, -1, device="cpu")
            of_segment[2] = segment.causal
        return intervals


@dataclass(frozen=True, eq=False)
class VarlenBatch:
    """Segments of one kind (causal or not) as a varlen batch, concatenated along one axis of tokens."""

    causal: bool
    queries: PackedTokens
    keys: PackedTokens | RepeatedKeys

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> VarlenBatch:
        keys: PackedTokens | RepeatedKeys
        if any(segment.ancestors for segment in segments):
            keys = RepeatedKeys.of(segments, device)
        else:
            keys = PackedTokens.of([(segment.row, segment.first_key, segment.last_key) for segment in segments], device)
        queries = PackedTokens.of([(segment.row, segment.first_query, segment.last_query) for segment in segments], device)
        return VarlenBatch(segments[0].causal, queries, keys)


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The tokens of a varlen batch: slices `(row, first, last)` of a padded batch, adjacent ones joined.

    `cu_seqlens_C` is `[0, end of the first segment, ...]` along the packed axis, in int32; `max_seqlen` is the longest segment.
    """

    slices: tuple[tuple[int, int, int], ...]
    cu_seqlens_C: Tensor
    max_seqlen: int

    @staticmethod
    def of(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> PackedTokens:
        lengths = [last - first for _, first, last in pieces]
        cu_seqlens_C = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")
        return PackedTokens(tuple(_joined(pieces)), cu_seqlens_C.to(device), max(lengths))

    def gather(self, tensor_BHTx: Tensor) -> Tensor:
        """Return the packed tokens, (N, H, ...): a view if they are one slice."""
        parts = [tensor_BHTx[row, :, first:last].transpose(0, 1) for row, first, last in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gradients(self, dkey_NHD: Tensor, dvalue_NHD: Tensor, batch: int, length: int) -> list[KeyGradient]:
        """Return the gradients of all `length` keys and values, 0 for those in no segment."""
        return [(0, length, self.scatter(dkey_NHD, batch, length), self.scatter(dvalue_NHD, batch, length))]

    def scatter(self, tensor_NHx: Tensor, batch: int, length: int, *, fill: float = 0.0, into: Tensor | None = None) -> Tensor:
        """Return (B, H, T, ...), the inverse of `gather`; other tokens are `fill`, or kept from `into`. May be a view."""
        if self.slices == ((0, 0, length),) and batch == 1:
            return tensor_NHx.transpose(0, 1).unsqueeze(0)
        if into is None:
            # Laid out in memory as (B, T, H, ...), which is how projections consume heads.
            into = tensor_NHx.new_full((batch, length, *tensor_NHx.shape[1:]), fill).transpose(1, 2)
        done = 0
        for row, first, last in self.slices:
            into[row, :, first:last] = tensor_NHx[done : done + last - first].transpose(0, 1)
            done += last - first
        return into


@dataclass(frozen=True, eq=False)
class RepeatedKeys:
    """The keys of segments of one row that have ancestors in common, which the varlen batch then has several times.

    Args:
        places_N: where each is in the row.
        intervals: which keys of the row occur, apart and in order; M of them.
        copies_N, first_copies_M: the places in the varlen batch of all copies of these M keys, one key after another, and where
            those of each key begin.
        cu_seqlens_C, max_seqlen: as in `PackedTokens`.
    """

    places_N: Tensor
    intervals: tuple[tuple[int, int], ...]
    copies_N: Tensor
    first_copies_M: Tensor
    cu_seqlens_C: Tensor
    max_seqlen: int

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> RepeatedKeys:
        assert not any(segment.row for segment in segments), "a tree is a row of its own"
        lengths = [segment.keys for segment in segments]
        places_N = torch.cat(
            [torch.arange(*interval, device="cpu") for segment in segments for interval in segment.key_intervals]
        )
        keys_M, counts_M = places_N.unique(return_counts=True)
        ends = [0, *((keys_M.diff() > 1).nonzero().flatten() + 1).tolist(), len(keys_M)]
        return RepeatedKeys(
            places_N.to(device),
            tuple((int(keys_M[first]), int(keys_M[last - 1]) + 1) for first, last in pairwise(ends)),
            places_N.argsort(stable=True).to(device),
            (counts_M.cumsum(0) - counts_M).to(device),
            torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            max(lengths),
        )

    def gather(self, tensor_BHSx: Tensor) -> Tensor:
        """Return the keys of the varlen batch, (N, H, ...)."""
        return tensor_BHSx[0].transpose(0, 1).index_select(0, self.places_N)

    def gradients(self, dkey_NHD: Tensor, dvalue_NHD: Tensor, batch: int, length: int) -> list[KeyGradient]:
        """Return the gradients of the row's keys and values: the sums over their copies, each rounded once."""
        lengths = [last - first for first, last in self.intervals]
        sums = (self._sums(dkey_NHD).split(lengths, dim=2), self._sums(dvalue_NHD).split(lengths, dim=2))
        return [(*interval, dkey, dvalue) for interval, dkey, dvalue in zip(self.intervals, *sums, strict=True)]

    def _sums(self, term_NHD: Tensor) -> Tensor:
        """Return (1, H, M, D), the sum over the copies of each key."""
        flat_ND = term_NHD.flatten(1)
        sums_MD = torch.nn.functional.embedding_bag(self.copies_N, flat_ND, self.first_copies_M, mode="sum")
        return sums_MD.view(-1, *term_NHD.shape[1:]).transpose(0, 1).unsqueeze(0)


def _joined(pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join pieces that follow one another in a row."""
    joined: list[tuple[int, int, int]] = []
    for row, first, last in pieces:
        if joined and joined[-1][0] == row and joined[-1][2] == first:
            joined[-1] = (row, joined[-1][1], last)
        else:
            joined.append((row, first, last))
    return joined
