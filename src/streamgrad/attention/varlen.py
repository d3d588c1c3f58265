"""A mask as rectangles: which keys the queries of a chunk see, in the form that kernels for ragged batches take.

With padding at the ends of a row, with packed documents and with a sliding window, a query sees consecutive keys, and queries
that follow one another see the same keys but for the last ones. A `Cell` is such a rectangle. The cells of a chunk replace its
(chunk x keys) mask; a query outside of every cell sees no key.

Shapes: B batch, H heads, L queries of a chunk, S keys, T either, N tokens of a ragged batch (queries or keys of its cells in a
row), C cells and one, x whatever follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Cell(NamedTuple):
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

    def moved(self, queries: int, keys: int) -> Cell:
        """The same cell, counted from other origins."""
        return self._replace(
            first_query=self.first_query - queries,
            last_query=self.last_query - queries,
            first_key=self.first_key - keys,
            last_key=self.last_key - keys,
        )


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of one chunk of a batch; what kernels need of them on a device is made once and kept.

    No query is in two cells. Those of one kind (causal or not) lie in the order of their rows, queries and keys.
    """

    cells: tuple[Cell, ...]
    batch: int
    queries: int
    _ragged: dict[torch.device, list[Ragged]] = field(default_factory=dict, init=False, repr=False)
    _intervals: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def ragged(self, device: torch.device) -> list[Ragged]:
        """The causal cells as one ragged batch and the others as a second; without those that would be empty."""
        if device not in self._ragged:
            kinds = ([cell for cell in self.cells if cell.causal is causal] for causal in (True, False))
            self._ragged[device] = [Ragged.of(cells, device) for cells in kinds if cells]
        return self._ragged[device]

    def visible(self, keys: int, window: int | None, device: torch.device) -> Tensor:
        """The mask that the cells replace, (B, 1, L, S), for kernels that take nothing else.

        `window`, if given, hides all but the last `window` keys from each query of a causal cell.
        """
        if device not in self._intervals:
            self._intervals[device] = self._interval_of_each_query().to(device)
        first_BL, last_BL, causal_BL = self._intervals[device].unbind(0)
        if window is not None:
            first_BL = torch.where(causal_BL.bool(), torch.maximum(first_BL, last_BL - window), first_BL)
        key_S = torch.arange(keys, device=device)
        return ((key_S >= first_BL[..., None]) & (key_S < last_BL[..., None])).unsqueeze(1)

    def _interval_of_each_query(self) -> Tensor:
        """(3, B, L): the first key, the end of the keys, and whether the query's cell is causal."""
        intervals = torch.zeros(3, self.batch, self.queries, dtype=torch.long)
        for cell in self.cells:
            of_cell = intervals[:, cell.row, cell.first_query : cell.last_query]
            rows = cell.last_query - cell.first_query
            of_cell[0] = cell.first_key
            of_cell[1] = torch.arange(cell.last_key - rows + 1, cell.last_key + 1) if cell.causal else cell.last_key
            of_cell[2] = cell.causal
        return intervals


@dataclass(frozen=True, eq=False)
class Ragged:
    """Cells of one kind, as a ragged batch: cell after cell along one axis of tokens."""

    causal: bool
    queries: Runs
    keys: Runs

    @staticmethod
    def of(cells: Sequence[Cell], device: torch.device) -> Ragged:
        return Ragged(
            causal=cells[0].causal,
            queries=Runs.of([(cell.row, cell.first_query, cell.last_query) for cell in cells], device),
            keys=Runs.of([(cell.row, cell.first_key, cell.last_key) for cell in cells], device),
        )


@dataclass(frozen=True, eq=False)
class Runs:
    """The tokens of a ragged batch: slices `(row, first, last)` of a padded one, as few as possible.

    `ends_C` is `[0, end of the first cell, ...]` along the ragged axis, in int32; `longest` is the length of the longest cell.
    """

    slices: tuple[tuple[int, int, int], ...]
    ends_C: Tensor
    longest: int

    @staticmethod
    def of(pieces: Sequence[tuple[int, int, int]], device: torch.device) -> Runs:
        lengths = [last - first for _, first, last in pieces]
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return Runs(tuple(_joined(pieces)), ends.to(device), max(lengths))

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
