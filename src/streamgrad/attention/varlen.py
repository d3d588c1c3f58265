"""A mask as rectangles: which keys the queries of a chunk see, in the form that kernels for varlen batches take.

With padding at the ends of a row, with packed documents and with a sliding window, a query sees consecutive keys, and queries
that follow one another see the same keys but for the last ones. A `Segment` is such a rectangle. The segments of a chunk replace its
(chunk x keys) mask; a query outside of every segment sees no key.

Shapes: B batch, H heads, L queries of a chunk, S keys, T either, N tokens of a varlen batch (queries or keys of its segments in a
row), C segments and one, x whatever follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Queries `[first_query, last_query)` of a row that see keys `[first_key, last_key)`.

    Causal: the last query sees the last key, the one before it all but that one, and so on; else each query sees every key.
    """

    row: int
    first_query: int
    last_query: int
    first_key: int
    last_key: int
    causal: bool

    def of_queries(self, tensor_BHLx: Tensor) -> Tensor:
        return tensor_BHLx[self.row : self.row + 1, :, self.first_query : self.last_query]

    def of_keys(self, tensor_BHSx: Tensor) -> Tensor:
        return tensor_BHSx[self.row : self.row + 1, :, self.first_key : self.last_key]

    def moved(self, queries: int, keys: int) -> Segment:
        """The same segment, counted from other origins."""
        return self._replace(
            first_query=self.first_query - queries,
            last_query=self.last_query - queries,
            first_key=self.first_key - keys,
            last_key=self.last_key - keys,
        )


@dataclass(frozen=True, eq=False)
class VarlenMask:
    """The segments of one chunk of a batch; what kernels need of them on a device is made once and kept.

    No query is in two segments. Those of one kind (causal or not) lie in the order of their rows, queries and keys.
    """

    segments: tuple[Segment, ...]
    batch: int
    queries: int
    _batches: dict[torch.device, list[VarlenBatch]] = field(default_factory=dict, init=False, repr=False)
    _intervals: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def batches(self, device: torch.device) -> list[VarlenBatch]:
        """The causal segments as one varlen batch and the others as a second; without those that would be empty."""
        if device not in self._batches:
            kinds = ([segment for segment in self.segments if segment.causal is causal] for causal in (True, False))
            self._batches[device] = [VarlenBatch.of(segments, device) for segments in kinds if segments]
        return self._batches[device]

    def visible(self, keys: int, window: int | None, device: torch.device) -> Tensor:
        """The mask that the segments replace, (B, 1, L, S), for kernels that take nothing else.

        `window`, if given, hides all but the last `window` keys from each query of a causal segment.
        """
        if device not in self._intervals:
            self._intervals[device] = self._interval_of_each_query().to(device)
        first_BL, last_BL, causal_BL = self._intervals[device].unbind(0)
        if window is not None:
            first_BL = torch.where(causal_BL.bool(), torch.maximum(first_BL, last_BL - window), first_BL)
        key_S = torch.arange(keys, device=device)
        return ((key_S >= first_BL[..., None]) & (key_S < last_BL[..., None])).unsqueeze(1)

    def _interval_of_each_query(self) -> Tensor:
        """(3, B, L): the first key, the end of the keys, and whether the query's segment is causal."""
        intervals = torch.zeros(3, self.batch, self.queries, dtype=torch.long)
        for segment in self.segments:
            of_segment = intervals[:, segment.row, segment.first_query : segment.last_query]
            rows = segment.last_query - segment.first_query
            of_segment[0] = segment.first_key
            of_segment[1] = (
                torch.arange(segment.last_key - rows + 1, segment.last_key + 1) if segment.causal else segment.last_key
            )
            of_segment[2] = segment.causal
        return intervals


@dataclass(frozen=True, eq=False)
class VarlenBatch:
    """Segments of one kind, as a varlen batch: segment after segment along one axis of tokens."""

    causal: bool
    queries: PackedTokens
    keys: PackedTokens

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> VarlenBatch:
        return VarlenBatch(
            causal=segments[0].causal,
            queries=PackedTokens.of([(segment.row, segment.first_query, segment.last_query) for segment in segments], device),
            keys=PackedTokens.of([(segment.row, segment.first_key, segment.last_key) for segment in segments], device),
        )


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """The tokens of a varlen batch: slices `(row, first, last)` of a padded one, as few as possible.

    `cu_seqlens_C` is `[0, end of the first segment, ...]` along the packed axis, in int32.
    """

    slices: tuple[tuple[int, int, int], ...]
    cu_seqlens_C: Tensor
    max_seqlen: int

    @staticmethod
    def of(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> PackedTokens:
        lengths = [last - first for _, first, last in pieces]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return PackedTokens(tuple(_joined(pieces)), ends.to(device), max(lengths))

    def gather(self, tensor_BHTx: Tensor) -> Tensor:
        """(N, H, ...): a view where one slice is all there is."""
        parts = [tensor_BHTx[row, :, first:last].transpose(0, 1) for row, first, last in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def scatter(self, tensor_NHx: Tensor, batch: int, length: int, *, fill: float = 0.0, into: Tensor | None = None) -> Tensor:
        """(B, H, T, ...): the inverse of `gather`, `fill` or what `into` holds elsewhere; a view where there is no elsewhere."""
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


def _joined(pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Pieces that follow each other in a row, as one."""
    joined: list[tuple[int, int, int]] = []
    for row, first, last in pieces:
        if joined and joined[-1][0] == row and joined[-1][2] == first:
            joined[-1] = (row, joined[-1][1], last)
        else:
            joined.append((row, first, last))
    return joined
