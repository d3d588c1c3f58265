"""When a shape is worth a plan of cuDNN's: on meta tensors, with kernels that only say what they can do."""

from __future__ import annotations

import math

import torch

from streamgrad.attention import backends
from streamgrad.attention.backends import Block, backends_named, choose, cudnn
from streamgrad.attention.backends.cudnn_plans import (
    CALLS_OF_A_STEP,
    FLASH_LOSS,
    FLASH_RATE,
    LOST_PER_QUEUED,
    PLAN_SECONDS,
    QUEUED_PLAN_SECONDS,
    PlanPrices,
    is_planned_by_call,
)
from streamgrad.engine.kv_chunk import KeyValueStream
from streamgrad.memory.costs import KEYS_AT_ONCE


def operands(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(1, 32, rows, 128, device="meta"), torch.empty(1, 8, keys, 128, device="meta")


def lost_a_call(rows: int, keys: int, *, backward: bool = False) -> float:
    """Return the seconds that 32 heads of 128 lose on flash, if every query sees every key."""
    return FLASH_LOSS * (10 if backward else 4) * 32 * 128 * rows * keys


def calls_until_a_plan(rows: int, keys: int, *, causal: bool = False, backward: bool = False) -> int:
    prices, calls = PlanPrices(), 0
    while not prices.is_worth_a_plan(*operands(rows, keys), causal, backward=backward):
        calls += 1
    return calls


def test_a_shape_that_has_lost_the_price_of_a_plan_gets_one():
    """Forward has 4 FLOPs a pair, head and head size, and backward 10; flash is left after as much loss as a plan costs."""
    for rows, keys in ((2048, 4096), (512, 4096)):
        loss, in_backward = (lost_a_call(rows, keys, backward=backward) * (1 - rows / keys / 2) for backward in (False, True))
        assert calls_until_a_plan(rows, keys, causal=True) == math.ceil(PLAN_SECONDS / loss) > CALLS_OF_A_STEP
        calls = math.ceil(QUEUED_PLAN_SECONDS / in_backward)
        assert calls_until_a_plan(rows, keys, causal=True, backward=True) == calls > CALLS_OF_A_STEP


def test_a_shape_that_would_lose_it_within_one_step_gets_it_in_that_step():
    """In backward at once. In forward when calls on flash have given the device work for as long as a plan takes."""
    for tokens in (10_000, 16_000, 30_000, 45_000):
        calls, loss = calls_until_a_plan(tokens, tokens, causal=True), lost_a_call(tokens, tokens) / 2
        assert (
            CALLS_OF_A_STEP * loss > QUEUED_PLAN_SECONDS and calls_until_a_plan(tokens, tokens, causal=True, backward=True) == 0
        )
        assert calls == max(0, math.ceil((PLAN_SECONDS - loss) * LOST_PER_QUEUED / loss)), tokens
        assert calls * loss < 0.3 * PLAN_SECONDS + loss  # what is lost in place of the whole price
        work = 2 * calls * lost_a_call(tokens, tokens) / 2 / FLASH_LOSS / FLASH_RATE  # that half of a layer be attention
        assert work >= PLAN_SECONDS - loss


def test_forward_and_backward_are_counted_apart():
    prices = PlanPrices()
    assert prices.is_worth_a_plan(*operands(7000, 7000), True, backward=True)
    assert not prices.is_worth_a_plan(*operands(7000, 7000), True)
    assert is_planned_by_call(10 * 32 * 128 * 7000**2 / 2) and not is_planned_by_call(10 * 32 * 128 * 3000**2 / 2)


def test_shapes_are_counted_apart():
    prices = PlanPrices()
    while not prices.is_worth_a_plan(*operands(5000, 5000), True):
        pass
    assert prices.is_worth_a_plan(*operands(5000, 5000), True)
    assert not prices.is_worth_a_plan(*operands(5000, 5000), False)
    assert not prices.is_worth_a_plan(*operands(5000, 5001), True)


def test_flash_is_taken_until_then_and_never_against_the_user(monkeypatch):
    monkeypatch.setattr(backends, "PRICES", PlanPrices())
    candidates = backends_named("auto")
    for backend in candidates:
        monkeypatch.setattr(type(backend), "refusal", lambda self, *_: None if self.name in ("cudnn", "flash") else "no")
    query, key = operands(8192, 8192)
    block = Block(scale=1.0, causal=True)
    chosen = [choose(candidates, query, key, key, block).name for _ in range(200)]
    assert chosen[0] == "flash" and chosen[-1] == "cudnn" and chosen == sorted(chosen, reverse=True)
    short = operands(16, 16)
    assert choose(candidates, short[0], short[1], short[1], block).name == "flash"
    only = backends_named("cudnn")
    assert choose(only, short[0], short[1], short[1], block).name == "cudnn"


def test_a_plan_is_worth_it_for_the_third_step_in_a_row():
    """As where sequences are packed to one length; in between come steps of other lengths."""
    prices, flops = PlanPrices(), 1e-3 * PLAN_SECONDS / FLASH_LOSS
    steps = ["a", "a", "b", "a", "a", "a", "b", "a", "b"]
    assert [prices.is_worth_in_step((step,), flops) for step in steps] == [False] * 5 + [True, False, True, False]


def test_chunks_of_equal_shapes_share_their_plans_whatever_the_length_of_the_sequence():
    """torch finds a plan by shapes and strides. A sequence whose length is new has chunks that are not."""
    key_BGLD = torch.randn(1, 128, 8, 16).transpose(1, 2)
    found = []
    for length in (300, 301):
        stream = KeyValueStream(length)
        for start in (0, 128):
            stream.write(start, start + 128, key_BGLD, -key_BGLD)
        parts = [cudnn._keys(tensor, start, start + 128) for tensor in stream.read(0, 256) for start in (0, 128)]
        assert all(torch.equal(part, sign * key_BGLD) for part, sign in zip(parts, (1, 1, -1, -1), strict=True))
        found.append([(part.shape, part.stride()) for part in parts])
    assert found[0] == found[1]


def test_small_chunks_of_a_long_sequence_need_few_plans():
    """A million tokens in chunks of 256, no two of which have the same number of keys before them."""
    rows, block = 256, Block(scale=1.0, causal=True)
    shapes = set()
    for keys in range(rows, 2**20 + 1, rows):
        pieces = cudnn.pieces_of(block, rows, keys)
        assert [first for first, _, _ in pieces] == [0, *(last for _, last, _ in pieces[:-1])] and pieces[-1][1] == keys
        assert [causal for _, _, causal in pieces] == [False] * (len(pieces) - 1) + [True] and len(pieces) <= 3
        assert pieces[-1] == (keys - rows, keys, True)
        shapes |= {(last - first, causal) for first, last, causal in pieces}
    assert len(shapes) <= 1 + 2**20 // KEYS_AT_ONCE + KEYS_AT_ONCE // rows


def test_a_dense_block_of_whole_pieces_is_not_cut_beyond_them():
    assert cudnn.pieces_of(Block(scale=1.0), 8, 2 * KEYS_AT_ONCE) == [(0, 2 * KEYS_AT_ONCE, False)]
    assert cudnn.pieces_of(Block(scale=1.0), 8, KEYS_AT_ONCE - 1) == [(0, KEYS_AT_ONCE - 1, False)]
    assert cudnn.pieces_of(Block(scale=1.0), 8, KEYS_AT_ONCE + 1) == [
        (0, KEYS_AT_ONCE, False),
        (KEYS_AT_ONCE, KEYS_AT_ONCE + 1, False),
    ]
