"""Rows of tokens that are trees: sequences that begin alike share their beginning, which is computed once.

A tree is a list of segments, each after its parent. A token sees all tokens of its segment's ancestors and, in its own segment,
the tokens up to itself: what it would see in a row of its own. The layout

    P | A | B        with A and B children of P

has the queries of B see the keys of P, a dense rectangle, and those of B, a causal one. `TreeMask.parts` returns such rectangles,
whose softmaxes are merged by their log-sum-exps; nothing of size (chunk x keys) is built unless a sliding window cuts through a
rectangle of ancestors, and then it is no wider than the window. For a kernel of varlen batches, a small B is one segment with the
keys of P and B, and all small ones are one part: calling kernels for each would take longer than what they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from streamgrad.attention.masks import Part, as_part, narrower
from streamgrad.attention.varlen import Segment
from streamgrad.memory.costs import KEYS_AT_ONCE

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
            raise ValueError(f"ends={self.ends} are not in order. Segments follow one another: pass where each ends, in order.")
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
        pieces = [torch.arange(stop - start, device="cpu") + depth for depth, (start, stop) in self._spans_with_depths()]
        return torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long, device="cpu")

    def _spans_with_depths(self) -> Iterator[tuple[int, Interval]]:
        for segment, depth in enumerate(self.depths):
            yield depth, self.span(segment)


# Queries x keys up to which a rectangle is computed beside others in one varlen call: for 32 heads of 128, kernels that take no
# varlen batches would gain 0.3 ms there at most, forward and backward, and a call of its own costs 0.4 ms with its merge.
PAIRS = 2048 * 2048


class _Item(NamedTuple):
    """Queries `[first, last)` of a chunk that see the keys of `path`, intervals in order, and those of `[key, last)` causally.

    `shift` is a query's position minus its place in the row.
    """

    first: int
    last: int
    path: tuple[Interval, ...]
    key: int
    shift: int

    @property
    def queries(self) -> int:
        return self.last - self.first


class TreeMask:
    """The mask of a row that is a tree, with a sliding window over what each token would see in a row of its own."""

    uncut = ()  # as it is causal

    def __init__(self, tree: Tree, window: int | None = None) -> None:
        self.tree, self.window = tree, window
        self._parts: dict[tuple[int, int, bool], list[Part]] = {}

    def parts(self, start: int, stop: int, batch: int, *, joined: bool = False) -> list[Part]:
        """Return the rectangles of the queries `[start, stop)`; those that contain the queries' own keys come first.

        If `joined`, small ones are segments of one varlen part, the first, so that the number of parts does not grow with that of
        branches.
        """
        assert batch == 1, "a tree is a row of its own"
        if (start, stop, joined) not in self._parts:
            self._parts[start, stop, joined] = self._found(start, stop, joined)
        return self._parts[start, stop, joined]

    def _found(self, start: int, stop: int, joined: bool) -> list[Part]:
        items = list(self._items(start, stop))
        small = {item for item in items if joined and self._is_small(item, stop - start)}
        repeated = self._repeated(items, small, stop - start)
        if len(small) == 1 and not repeated:
            small = set()
        segments, causal, dense = list[Segment](), list[Part](), list[Part]()
        for item in items:
            queries = item.first - start, item.last - start
            key = self._first_own_key(item)
            if item in small:
                ancestors = self._seen_path(item) if item.path in repeated else ()
                segments.append(Segment(0, item.first, item.last, key, item.last, causal=True, ancestors=ancestors))
            else:
                causal.append(Part(key, item.last, causal=True, window=narrower(self.window, item.last - key), queries=queries))
            if item.path not in repeated:
                for part in self._rectangles(item, start):
                    _join(dense, part)
        joint = [as_part(segments, start, stop, 1, self.window)] if segments else []
        return [*joint, *causal, *dense]

    def _items(self, start: int, stop: int) -> Iterator[_Item]:
        """Yield the items of a chunk. A segment that lies right behind its parent goes on with the parent's."""
        found: _Item | None = None
        for segment, (*path, (key, _)) in enumerate(self.tree.intervals):
            begin, end = self.tree.span(segment)
            first, last = max(start, begin), min(stop, end)
            if first >= last:
                continue
            if found is not None and (list(found.path), found.key) == (path, key):
                found = found._replace(last=last)
                continue
            if found is not None:
                yield found
            found = _Item(first, last, tuple(path), key, self.tree.depths[segment] - begin)
        if found is not None:
            yield found

    def _is_small(self, item: _Item, chunk_size: int) -> bool:
        """Return whether no other kernel is worth a call of its own, and an item begun in earlier chunks has few keys there."""
        keys = item.last - item.key
        return self.window is not None or (item.queries * keys <= PAIRS and keys <= chunk_size)

    def _repeated(self, items: Sequence[_Item], small: set[_Item], chunk_size: int) -> set[tuple[Interval, ...]]:
        """Return the paths whose keys every item has before its own, so that it is one segment and nothing is merged.

        They are short ones: a kernel is given at most twice as many keys as the chunk has queries. With a window it may be more,
        as a rectangle which that cuts through would need a mask.
        """
        found = set()
        left = 2 * chunk_size - sum(item.last - item.key for item in small) if self.window is None else KEYS_AT_ONCE
        for path in dict.fromkeys(item.path for item in items if item.path):
            group = [item for item in items if item.path == path]
            lengths = [sum(last - first for first, last in self._seen_path(item)) for item in group]
            pairs = sum(item.queries * length for item, length in zip(group, lengths, strict=True))
            if small.issuperset(group) and sum(lengths) <= left and (self.window is not None or pairs <= PAIRS):
                left -= sum(lengths)
                found.add(path)
        return found

    def _first_own_key(self, item: _Item) -> int:
        return item.key if self.window is None else max(item.key, item.first - self.window + 1)

    def _seen_path(self, item: _Item) -> tuple[Interval, ...]:
        """Return the intervals of the path without what a window hides from all of the item's queries."""
        if self.window is None:
            return item.path
        hidden = max(0, item.first + item.shift - self.window + 1)  # so many tokens of a row of its own
        seen: list[Interval] = []
        for first, last in item.path:
            length = last - first
            if hidden < length:
                seen.append((first + hidden, last))
            hidden = max(0, hidden - length)
        return tuple(seen)

    def _rectangles(self, item: _Item, start: int) -> Iterator[Part]:
        """Yield the rectangles of the path's keys, as far as a window reaches."""
        tokens_before = 0
        for low, high in item.path:
            of_keys, tokens_before = tokens_before - low, tokens_before + high - low
            end, band = item.last, None
            if self.window is not None:
                shift = item.shift - of_keys - self.window + 1  # a query q sees the keys from q + shift on
                end = min(end, high - shift)
                if item.first >= end:
                    continue
                low = max(low, item.first + shift)
                band = item.first + shift - low if end - 1 + shift > low else None
            yield Part(low, high, queries=(item.first - start, end - start), band=band)


def _join(parts: list[Part], part: Part) -> None:
    """Append a rectangle, or widen the one over the same keys whose queries end where its own begin."""
    for index, other in enumerate(parts):
        assert other.queries is not None and part.queries is not None, "a rectangle names its queries"
        is_one = (other.first, other.last, other.queries[1]) == (part.first, part.last, part.queries[0])
        if is_one and other.band is None and part.band is None:
            parts[index] = replace(part, queries=(other.queries[0], part.queries[1]))
            return
    parts.append(part)


def band_mask(part: Part, device: torch.device) -> Tensor:
    """Return (1, 1, L, S): query i of the rectangle sees the keys from i + band on."""
    assert part.band is not None and part.queries is not None
    first, last = part.queries
    query_L1 = torch.arange(last - first, device=device)[:, None]
    return (torch.arange(part.last - part.first, device=device) >= query_L1 + part.band)[None, None]
