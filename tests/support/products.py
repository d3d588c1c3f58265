"""The matrix products of a step, counted."""

from __future__ import annotations

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tiny import tokens


class Products(TorchDispatchMode):
    """Counts the products of several tokens with a weight, by its shape. A guard's of two tokens are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and args[-2].shape[0] > 2:
            self.counts[tuple(args[-1].shape)] += 1
        return function(*args, **(kwargs or {}))


def later_step(model, *, warm_ups: int = 2) -> tuple[Counter, Counter]:
    """The products of a forward and of a backward pass after some steps."""
    ids = tokens(1, 21)
    for _ in range(warm_ups):
        model(input_ids=ids, labels=ids).loss.backward()
    with Products() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with Products() as backward:
        loss.backward()
    return forward.counts, backward.counts
