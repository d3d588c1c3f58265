"""Blocks of tokens that see each other both ways, such as those of an image: where a sequence may be cut, and what a chunk sees.

Shapes: B batch, T sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Blocks:
    """Tokens with the same id of 0 or more are a block, whose queries see all of its keys but for padding.

    Args:
        ids_BT: the block of each token, negative for tokens in none. A block may lie apart in its row.
        padding_BT: True for real tokens, or None if all are real.
    """

    def __init__(self, ids_BT: Tensor, padding_BT: Tensor | None) -> None:
        length = ids_BT.shape[1]
        flags = [ids_BT, torch.ones_like(ids_BT) if padding_BT is None else padding_BT.expand_as(ids_BT).to(ids_BT)]
        first_T = torch.full((length,), length, device="cpu")
        stop_T = torch.zeros_like(first_T)
        for ids_T, is_real_T in torch.stack(flags, dim=1).cpu():
            found = (ids_T >= 0).nonzero().flatten()
            if len(found):
                _, block = ids_T[found].unique(return_inverse=True)
                stops = torch.where(is_real_T[found] != 0, found + 1, 0)
                first = torch.full_like(found, length).scatter_reduce(0, block, found, "amin")
                stop = torch.zeros_like(found).scatter_reduce(0, block, stops, "amax")
                first_T[found] = torch.minimum(first_T[found], first[block])
                stop_T[found] = torch.maximum(stop_T[found], stop[block])
        self._first_T = first_T  # the first token of the blocks that a token is in, in any row; the length if in none
        self.uncut = _runs(stop_T)

    def first_key(self, start: int, stop: int) -> int | None:
        """Return the first token of the blocks that the queries `[start, stop)` are in, or None if they are in none."""
        first = int(self._first_T[start:stop].min())
        return None if first == len(self._first_T) else first


def _runs(stop_T: Tensor) -> list[tuple[int, int]]:
    """Return the spans, in order, inside which a cut would part a query `t` from a key before `stop_T[t]`."""
    places = torch.arange(1, len(stop_T), device=stop_T.device)
    cuts = places[stop_T.cummax(dim=0).values[:-1] > places].tolist()
    runs: list[tuple[int, int]] = []
    for cut in cuts:
        if runs and runs[-1][1] == cut:
            runs[-1] = runs[-1][0], cut + 1
        else:
            runs.append((cut - 1, cut + 1))
    return runs
