"""Decides when cuDNN's plan for a shape is worth its cost.

cuDNN prepares an execution plan for every new shape, which takes as long as dozens of calls. FlashAttention needs none, and runs
at about half the speed. If every sequence has a new length, plans would be made for a single use. So a shape runs on flash until
it has lost there the time that a plan costs, and on cuDNN from then on. That takes at most twice the time of the best choice in
hindsight. A shape gets its plan at once if it would lose that time within its first step, or if it comes in three steps in a
row, as where sequences are packed to one length.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Measured on an H200 with cuDNN 9.19: the first forward and backward of 6,100 to 15,467 tokens, minus the second.
PLAN_SECONDS = 0.09
# Extra seconds per FLOP on flash, over forward and backward: 1 / 310 TFLOP/s - 1 / 560 TFLOP/s.
FLASH_LOSS = 1.0 / 310e12 - 1.0 / 560e12
# A shape's calls in a step: forward and backward of 24 layers, which most models have; kept inputs make a third call.
CALLS_OF_A_STEP = 48
STEPS_IN_A_ROW = 3
SHAPES = 10_000  # remembered; without a limit, ever new lengths would slowly fill the memory


class PlanPrices:
    """Time that each shape has lost so far on flash."""

    def __init__(self) -> None:
        self._lost_seconds: dict[tuple[Any, ...], float] = {}  # in order of last use
        self._latest_step: tuple[Any, ...] = ()
        self._in_a_row = 0

    def is_worth_a_plan(self, query_BHLD: Tensor, key_BGSD: Tensor, causal: bool) -> bool:
        """Return whether to run the block on cuDNN; if not, count a call on flash. Call it before each forward and backward."""
        shape = (*query_BHLD.shape, *key_BGSD.shape[1:3], query_BHLD.dtype, query_BHLD.device.index, causal)
        return self.is_worth(shape, _flops(query_BHLD, key_BGSD, causal), calls=CALLS_OF_A_STEP)

    def is_worth_in_step(self, shape: tuple[Any, ...], flops: float) -> bool:
        """Return whether to run a step, all calls of which have one shape, on cuDNN; if not, count it."""
        self._in_a_row = self._in_a_row + 1 if shape == self._latest_step else 1
        self._latest_step = shape
        if self._in_a_row >= STEPS_IN_A_ROW:
            self._lost_seconds[shape] = PLAN_SECONDS  # from now on there is a plan
        return self.is_worth(shape, flops)

    def is_worth(self, shape: tuple[Any, ...], flops: float, *, calls: int = 1) -> bool:
        """Return whether a shape has lost on flash what a plan costs, or would in so many calls; if not, count a call there."""
        lost, loss = self._lost_seconds.pop(shape, 0.0), FLASH_LOSS * flops
        is_worth = max(lost, calls * loss) >= PLAN_SECONDS
        self._lost_seconds[shape] = lost if is_worth else lost + loss
        if len(self._lost_seconds) > SHAPES:
            del self._lost_seconds[next(iter(self._lost_seconds))]
        return is_worth


def _flops(query_BHLD: Tensor, key_BGSD: Tensor, causal: bool) -> float:
    """Return half the FLOPs of forward (4 per pair and head dimension) and backward (10) together."""
    rows, keys = query_BHLD.shape[2], key_BGSD.shape[2]
    pairs = rows * keys - (rows * rows / 2 if causal else 0)
    return attention_flops(query_BHLD.shape[0], query_BHLD.shape[1], query_BHLD.shape[3], pairs)


def attention_flops(batch: int, heads: int, size: int, pairs: float) -> float:
    """Return half the FLOPs of forward and backward over so many pairs of a query and a key."""
    return 7.0 * batch * heads * size * pairs


PRICES = PlanPrices()
