"""Rows of tokens that are trees: sequences that begin alike share their beginning, which is computed once.

A tree is a list of segments, each after its parent. A token sees all tokens of its segment's ancestors and, in its own segment,
the tokens up to itself: what it would see in a row of its own. The layout

    P | A | B        with A and B children of P

has the queries of B see the keys of P, a dense rectangle, and those of B, a causal one. `TreeMask.parts` returns such rectangles,
whose softmaxes are merged by their log-sum-exps; nothing of size (chunk x keys) is built unless a sliding window cuts through a
rectangle of ancestors, and then it is no wider than the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from streamgrad.attention.masks import Part

Interval = tuple[int, int]


@dataclass(frozen=True)
class Tree:
    """Segments of one row: `ends[i]` is where segment i ends, and where the next begins; `parents[i]` is -1 for a root.

    A parent comes before its children. Several roots are several trees in one row.
    """

    ends: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.ends) != len(self.parents):
            raise ValueError(f"a tree has {len(self.ends)} ends and {len(self.parents)} parents. Pass one of each for a segment.")
        if list(self.ends) != sorted(self.ends) or (self.ends and self.ends[0] < 0):
            raise ValueError(f"ends={self.ends} fall. Segments follow one another: pass where each ends.")
        wrong = [index for index, parent in enumerate(self.parents) if not -1 <= parent < index]
        if wrong:
            raise ValueError(
                f"the parent of segment {wrong[0]} is {self.parents[wrong[0]]}. Pass a segment before it, or -1 for a root."
            )

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else 0

    def span(self, segment: int) -> Interval:
        """Return the tokens `[start, stop)` of a segment."""
        return (self.ends[segment - 1] if segment else 0), self.ends[segment]

    @cached_property
    def intervals(self) -> list[list[Interval]]:
        """Return what each segment's last token sees, as intervals of tokens in ascending order; adjacent ones are one."""
        found: list[list[Interval]] = []
        for segment, parent in enumerate(self.parents):
            start, stop = self.span(segment)
            before = found[parent] if parent >= 0 else []
            if before and before[-1][1] == start:
                found.append([*before[:-1], (before[-1][0], stop)])
            else:
                found.append([*before, (start, stop)])
        return found

    @cached_property
    def depths(self) -> list[int]:
        """Return how many tokens the ancestors of each segment have."""
        found: list[int] = []
        for parent in self.parents:
            start, stop = self.span(parent) if parent >= 0 else (0, 0)
            found.append(found[parent] + stop - start if parent >= 0 else 0)
        return found

    def positions(self) -> Tensor:
        """Return how many tokens each token has before it, (T,)."""
        pieces = [torch.arange(stop - start) + depth for depth, (start, stop) in self._spans_with_depths()]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)

    def _spans_with_depths(self) -> Iterator[tuple[int, Interval]]:
        for segment, depth in enumerate(self.depths):
            yield depth, self.span(segment)


class TreeMask:
    """The mask of a row that is a tree, with a sliding window over what each token would see in a row of its own."""

    uncut = ()  # as it is causal

    def __init__(self, tree: Tree, window: int | None = None) -> None:
        self.tree, self.window = tree, window
        self._parts: dict[Interval, list[Part]] = {}

    def parts(self, start: int, stop: int, batch: int) -> list[Part]:
        """Return the rectangles of the queries `[start, stop)`; those that contain the queries' own keys come first."""
        assert batch == 1, "a tree is a row of its own"
        if (start, stop) not in self._parts:
            self._parts[start, stop] = self._found(start, stop)
        return self._parts[start, stop]

    def _found(self, start: int, stop: int) -> list[Part]:
        causal: list[Part] = []
        dense: list[Part] = []
        for segment, intervals in enumerate(self.tree.intervals):
            begin, end = self.tree.span(segment)
            first, last = max(start, begin), min(stop, end)
            if first >= last:
                continue
            key = intervals[-1][0]
            if self.window is not None:
                key = max(key, first - self.window + 1)
                window = self.window if last - key > self.window else None
                causal.append(Part(key, last, causal=True, window=window, queries=(first - start, last - start)))
                dense += self._in_window(intervals, segment, first, last, start)
                continue
            _join(causal, Part(key, last, causal=True, queries=(first - start, last - start)))
            for interval in intervals[:-1]:
                _join(dense, Part(*interval, queries=(first - start, last - start)))
        return causal + dense

    def _in_window(self, intervals: Sequence[Interval], segment: int, first: int, last: int, start: int) -> Iterator[Part]:
        """Yield the rectangles of ancestors that a window reaches from `[first, last)`, a part of one segment."""
        assert self.window is not None
        # The position of a query minus its place in the row, and the same of the keys of each interval.
        of_queries = self.tree.depths[segment] - self.tree.span(segment)[0]
        tokens_before = 0
        for low, high in intervals[:-1]:
            of_keys, tokens_before = tokens_before - low, tokens_before + high - low
            shift = of_queries - of_keys - self.window + 1  # a query q sees the keys from q + shift on
            end = min(last, high - shift)
            if first >= end:
                continue
            low = max(low, first + shift)
            is_cut = end - 1 + shift > low
            band = first + shift - low if is_cut else None
            yield Part(low, high, queries=(first - start, end - start), band=band)


def _join(parts: list[Part], part: Part) -> None:
    """Append a rectangle, or widen the last one if the two are one: the same keys, or causal ones that go on."""
    if parts:
        last = parts[-1]
        assert last.queries is not None and part.queries is not None, "a rectangle names its queries"
        goes_on = last.first == part.first and last.queries[1] == part.queries[0]
        if goes_on and (part.causal or last.last == part.last):
            parts[-1] = replace(part, queries=(last.queries[0], part.queries[1]))
            return
    parts.append(part)


def band_mask(part: Part, device: torch.device) -> Tensor:
    """Return (1, 1, L, S): query i of the rectangle sees the keys from i + band on."""
    assert part.band is not None and part.queries is not None
    first, last = part.queries
    query_L1 = torch.arange(last - first, device=device)[:, None]
    return (torch.arange(part.last - part.first, device=device) >= query_L1 + part.band)[None, None]
