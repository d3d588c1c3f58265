"""Decides when cuDNN's plans for a shape, one for forward and one for backward, are worth their cost.

cuDNN prepares an execution plan for every new shape, which takes as long as dozens of calls. FlashAttention needs none, and runs
at about half the speed. If every sequence has a new length, plans would be made for a single use. So a shape runs on flash until
it has lost there the time that a plan costs, and on cuDNN from then on. That takes at most twice the time of the best choice in
hindsight. A shape that would lose that time within its first step gets its plan in that step:

- In backward at once. A plan is made on the host, and the device meanwhile works on what forward has queued.
- In forward after the first layers. The device has nothing to do before the first, and a call on flash gives it work for about
  five times what the call loses there.

Where one kernel is chosen for all calls of a step (`is_worth_in_step`), a shape also gets its plans when it comes in three steps
in a row, as where sequences are packed to one length.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Measured on an H200 with cuDNN 9.19, for 10,000 to 15,000 tokens: a plan takes the host 39 to 48 ms. Where the device has work
# for as long, 3 to 13 ms are lost, and in forward about 10 on flash before.
PLAN_SECONDS = 0.04
QUEUED_PLAN_SECONDS = 0.02
FLASH_RATE, CUDNN_RATE = 310e12, 560e12  # FLOP/s, of forward and backward together
FLASH_LOSS = 1.0 / FLASH_RATE - 1.0 / CUDNN_RATE
# What a call on flash loses, over the work that it and the rest of its layer give the device: the rest takes about as long as it.
LOST_PER_QUEUED = FLASH_LOSS / (2 / FLASH_RATE)
# A shape's calls in a step, forward or backward: most models have as many layers.
CALLS_OF_A_STEP = 24
STEPS_IN_A_ROW = 3
SHAPES = 10_000  # remembered; without a limit, ever new lengths would slowly fill the memory
FORWARD_FLOPS, BACKWARD_FLOPS = 4.0, 10.0  # a pair of a query and a key, head and head dimension


class PlanPrices:
    """Time that each shape has lost so far on flash."""

    def __init__(self) -> None:
        self._lost_seconds: dict[tuple[Any, ...], float] = {}  # in order of last use
        self._latest_step: tuple[Any, ...] = ()
        self._in_a_row = 0

    def is_worth_a_plan(self, query_BHLD: Tensor, key_BGSD: Tensor, causal: bool, *, backward: bool = False) -> bool:
        """Return whether to run the block on cuDNN; if not, count a call on flash. Call it before each forward and backward."""
        batch, heads, rows, size = query_BHLD.shape
        keys = key_BGSD.shape[2]
        shape = (*query_BHLD.shape, *key_BGSD.shape[1:3], query_BHLD.dtype, query_BHLD.device.index, causal, backward)
        pairs = rows * keys - (rows * rows / 2 if causal else 0)
        loss = FLASH_LOSS * attention_flops(batch, heads, size, pairs, backward=backward)
        lost = self._lost_seconds.get(shape, 0.0)
        within_step = CALLS_OF_A_STEP * loss >= QUEUED_PLAN_SECONDS
        has_work = backward or PLAN_SECONDS - lost / LOST_PER_QUEUED <= loss
        is_lost = lost >= (QUEUED_PLAN_SECONDS if backward else PLAN_SECONDS)
        is_worth = is_lost or (within_step and has_work)
        self._note(shape, lost if is_worth else lost + loss)
        return is_worth

    def is_worth_in_step(self, shape: tuple[Any, ...], flops: float) -> bool:
        """Return whether to run a step on cuDNN, of so many FLOPs forward and backward and of one shape; if not, count it."""
        self._in_a_row = self._in_a_row + 1 if shape == self._latest_step else 1
        self._latest_step = shape
        lost, loss, price = self._lost_seconds.get(shape, 0.0), FLASH_LOSS * flops, PLAN_SECONDS + QUEUED_PLAN_SECONDS
        if self._in_a_row >= STEPS_IN_A_ROW:
            lost = price  # from now on there is a plan
        is_worth = max(lost, loss) >= price
        self._note(shape, lost if is_worth else lost + loss)
        return is_worth

    def _note(self, shape: tuple[Any, ...], lost: float) -> None:
        """Remember what a shape has lost, as the latest in use, and forget the one that has not been used for longest."""
        self._lost_seconds.pop(shape, None)
        self._lost_seconds[shape] = lost
        if len(self._lost_seconds) > SHAPES:
            del self._lost_seconds[next(iter(self._lost_seconds))]


def attention_flops(batch: int, heads: int, size: int, pairs: float, *, backward: bool) -> float:
    """Return the FLOPs of forward, or of backward, over so many pairs of a query and a key."""
    return (BACKWARD_FLOPS if backward else FORWARD_FLOPS) * batch * heads * size * pairs


def is_planned_by_call(layer_flops: float) -> bool:
    """Return whether steps of such layers, so many FLOPs backward each, are long enough for a plan at their first call."""
    return CALLS_OF_A_STEP * FLASH_LOSS * layer_flops >= QUEUED_PLAN_SECONDS


PRICES = PlanPrices()
