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
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Queries `[first_query, last_query)` of a row that see keys `[first_key, last_key)`.

    If `causal`, the last query sees all keys, the one before it all but the last key, and so on; else each query sees every key.
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
        """Return the segment with queries counted from `queries` and keys from `keys`."""
        return self._replace(
            first_query=self.first_query - queries,
            last_query=self.last_query - queries,
            first_key=self.first_key - keys,
            last_key=self.last_key - keys,
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
        if device not in self._intervals:
            self._intervals[device] = self._interval_of_each_query().to(device)
        first_BL, last_BL, causal_BL = self._intervals[device].unbind(0)
        if window is not None:
            first_BL = torch.where(causal_BL.bool(), torch.maximum(first_BL, last_BL - window), first_BL)
        key_S = torch.arange(keys, device=device)
        return ((key_S >= first_BL[..., None]) & (key_S < last_BL[..., None])).unsqueeze(1)

    def _interval_of_each_query(self) -> Tensor:
        """Return (3, B, L): each query's first key, the end of its keys, and whether its segment is causal."""
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
    """Segments of one kind (causal or not) as a varlen batch, concatenated along one axis of tokens."""

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
    """The tokens of a varlen batch: slices `(row, first, last)` of a padded batch, adjacent ones joined.

    `cu_seqlens_C` is `[0, end of the first segment, ...]` along the packed axis, in int32; `max_seqlen` is the longest segment.
    """

    slices: tuple[tuple[int, int, int], ...]
    cu_seqlens_C: Tensor
    max_seqlen: int

    @staticmethod
    def of(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> PackedTokens:
        lengths = [last - first for _, first, last in pieces]
        cu_seqlens_C = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return PackedTokens(tuple(_joined(pieces)), cu_seqlens_C.to(device), max(lengths))

    def gather(self, tensor_BHTx: Tensor) -> Tensor:
        """Return the packed tokens, (N, H, ...): a view if they are one slice."""
        parts = [tensor_BHTx[row, :, first:last].transpose(0, 1) for row, first, last in self.slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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


def _joined(pieces: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Join pieces that follow one another in a row."""
    joined: list[tuple[int, int, int]] = []
    for row, first, last in pieces:
        if joined and joined[-1][0] == row and joined[-1][2] == first:
            joined[-1] = (row, joined[-1][1], last)
        else:
            joined.append((row, first, last))
    return joined
