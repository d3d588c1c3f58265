"""The helpers that other tests trust: a comparison that could not fail would prove nothing."""

from __future__ import annotations

import pytest
import torch

from gradients import Step, assert_same_step, no_float32, total_gradient_error, worst_gradient_error
from streamgrad.core.live import LiveBytes, peak_bytes_of

GOOD = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0]), "frozen": None}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": torch.tensor([3.0, float("nan")])}, "a: the gradient is not finite"),
        ({"a": torch.tensor([3.0, float("inf")])}, "a: the gradient is not finite"),
        ({"b": None}, "b has no gradient"),
        ({"frozen": torch.zeros(1)}, "frozen has a gradient"),
        ({"c": torch.zeros(1)}, "different parameters: \\['c'\\]"),
        ({"a": torch.zeros(3)}, "shape"),
        ({"a": torch.tensor([3.0, 4.0], dtype=torch.float64)}, "float64 instead of torch.float32"),
        ({"a": torch.tensor([3.0, 4.1])}, "worst gradient error 2.00e-02 > 1e-03, at a"),
    ],
)
def test_comparison_fails(change, words):
    loss = torch.tensor(1.0)
    with pytest.raises(AssertionError, match=words):
        assert_same_step(Step(loss, GOOD | change), Step(loss, GOOD), 1e-3)


def test_comparison_fails_on_a_bad_reference_an_empty_one_and_another_loss():
    one, bad = torch.tensor(1.0), GOOD | {"a": torch.tensor([float("nan"), 1.0])}
    with pytest.raises(AssertionError, match="reference gradient is not finite"):
        assert_same_step(Step(one, GOOD), Step(one, bad), 1.0)
    with pytest.raises(AssertionError, match="no gradient at all"):
        assert_same_step(Step(one, {"a": None}), Step(one, {"a": None}), 1.0)
    with pytest.raises(AssertionError, match="not close"):
        assert_same_step(Step(2 * one, GOOD), Step(one, GOOD), 1e-3)
    with pytest.raises(AssertionError, match="not finite"):
        total_gradient_error(bad, GOOD)


def test_errors_are_relative_to_each_parameter():
    worst, name = worst_gradient_error(GOOD | {"b": torch.tensor([1.5])}, GOOD)
    assert (worst, name) == (0.5, "b")
    assert worst_gradient_error(GOOD, GOOD)[0] == 0.0


def test_no_float32_keeps_float64_and_restores():
    x = torch.randn(3, dtype=torch.float64)
    with no_float32():
        assert x.float().dtype == x.to(torch.float32).dtype == x.softmax(0).dtype == torch.float64
        assert torch.nn.functional.softmax(x, 0, dtype=torch.float32).dtype == torch.float64
        assert x.half().float().dtype == torch.float32
    assert x.float().dtype == x.to(torch.float32).dtype == torch.float32


def test_live_bytes_counts_what_lives_and_what_it_peaked_at():
    before = torch.zeros(100)
    with LiveBytes() as live:
        first = before + 1.0
        second = first * 2.0
        del first
        third = second.view(10, 10)
        assert live.live_bytes == 400
        del second, third
        assert live.live_bytes == 0
    assert live.peak_bytes == 800
    assert live.largest == (400, (100,))
    assert peak_bytes_of(lambda: before + 1.0, torch.device("cpu"))[1] == 400
