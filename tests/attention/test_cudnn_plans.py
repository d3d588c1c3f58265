"""When a shape is worth a plan of cuDNN's: on meta tensors, with kernels that only say what they can do."""

from __future__ import annotations

import pytest
import torch

from streamgrad.attention import backends
from streamgrad.attention.backends import Block, backends_named, choose, cudnn
from streamgrad.attention.backends.cudnn_plans import FLASH_LOSS, PLAN_SECONDS, PlanPrices
from streamgrad.engine.kv_chunk import KeyValueStream
from streamgrad.memory.costs import KEYS_AT_ONCE


def operands(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(1, 32, rows, 128, device="meta"), torch.empty(1, 8, keys, 128, device="meta")


def calls_until_a_plan(rows: int, keys: int, *, causal: bool = False) -> int:
    prices, calls = PlanPrices(), 0
    while not prices.is_worth_a_plan(*operands(rows, keys), causal):
        calls += 1
    return calls


def test_a_shape_that_has_lost_the_price_of_a_plan_gets_one():
    """Forward and backward are 14 FLOPs a pair, head and head size; flash is left after as much loss as a plan costs."""
    for rows, keys in ((4096, 4096), (512, 4096)):
        loss_a_call = FLASH_LOSS * 7 * 32 * 128 * rows * keys
        assert calls_until_a_plan(rows, keys) == -(-PLAN_SECONDS // loss_a_call)
    assert calls_until_a_plan(6000, 6000, causal=True) == pytest.approx(2 * calls_until_a_plan(6000, 6000), rel=0.01)


def test_a_shape_that_would_lose_it_within_one_step_gets_it_at_once():
    """A step calls a shape 48 times: in 24 layers, forward and backward. 10,000 queries over as many keys lose 4 ms each time."""
    loss_a_call = FLASH_LOSS * 7 * 32 * 128 * 10_000**2
    assert 48 * loss_a_call > PLAN_SECONDS and calls_until_a_plan(10_000, 10_000) == 0
    assert calls_until_a_plan(8192, 32_768) == 0 < calls_until_a_plan(9_000, 9_000, causal=True)


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
