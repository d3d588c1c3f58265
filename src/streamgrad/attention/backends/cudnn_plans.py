"""Whether cuDNN's plan for a shape is worth its price.

cuDNN prepares a plan for every shape it has not met, which takes as long as dozens of calls; FlashAttention needs none and
computes at about half the speed. Sequences of ever new lengths would pay for plans that are used once. So a shape is left to
flash until it has lost there the time that a plan costs, and goes to cuDNN from then on: whatever the program does, no more than
twice the time that knowing its future would have cost.
"""

from __future__ import annotations

from torch import Tensor

# Measured on an H200: a first call, forward and backward, of 8,192 queries over a new number of keys, less a second one.
PLAN_SECONDS = 0.17
# Seconds a FLOP that flash takes longer, over forward and backward: 1 / 310 TFLOP/s - 1 / 560 TFLOP/s.
FLASH_LOSS = 1.0 / 310e12 - 1.0 / 560e12
SHAPES = 10_000  # that are remembered; programs whose lengths are ever new would else fill the memory, slowly


class PlanPrices:
    """What each shape has lost so far on the kernel without plans."""

    def __init__(self) -> None:
        self._lost_seconds: dict[tuple, float] = {}  # the shape that was asked for last at the end

    def is_worth_a_plan(self, query_BHLD: Tensor, key_BGSD: Tensor, causal: bool) -> bool:
        """Asked once before each forward and each backward of a block; counts the call if the answer is no."""
        shape = (*query_BHLD.shape, *key_BGSD.shape[1:3], query_BHLD.dtype, query_BHLD.device.index, causal)
        lost = self._lost_seconds.pop(shape, 0.0)
        is_worth = lost >= PLAN_SECONDS
        self._lost_seconds[shape] = lost if is_worth else lost + FLASH_LOSS * _flops(query_BHLD, key_BGSD, causal)
        if len(self._lost_seconds) > SHAPES:
            del self._lost_seconds[next(iter(self._lost_seconds))]
        return is_worth


def _flops(query_BHLD: Tensor, key_BGSD: Tensor, causal: bool) -> float:
    """Half of what forward (4 a pair and head size) and backward (10) take together."""
    rows, keys = query_BHLD.shape[2], key_BGSD.shape[2]
    pairs = rows * keys - (rows * rows / 2 if causal else 0)
    return 7.0 * query_BHLD.shape[0] * query_BHLD.shape[1] * query_BHLD.shape[3] * pairs


PRICES = PlanPrices()
