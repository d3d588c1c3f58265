"""The helpers that other tests trust: a comparison that could not fail would prove nothing."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradients import Step, assert_as_exact_as_plain, assert_same_step, no_float32, total_gradient_error, worst_gradient_error
from streamgrad.memory.live_bytes import LiveBytes, peak_bytes_of

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


# --- Tolerances that come from the machine ------------------------------------------------------------------------------------

TRUTH = {"a": torch.linspace(1, 2, 1000).double(), "b": torch.linspace(-3, 5, 500).double(), "frozen": None}


def rounded(error: float, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """`TRUTH` with relative errors of this size."""
    noise = torch.Generator().manual_seed(seed)
    return {
        name: None if value is None else value * (1 + error * torch.randn(value.shape, generator=noise, dtype=torch.float64))
        for name, value in TRUTH.items()
    }


@pytest.mark.parametrize("error", [1e-7, 1e-5])
def test_another_draw_of_the_same_noise_is_as_exact(error):
    assert_as_exact_as_plain(rounded(error, seed=1), rounded(error, seed=2), TRUTH)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a": 1.001 * TRUTH["a"]}, "over all tensors"),
        ({"b": TRUTH["b"] * float("nan")}, "b: the gradient is not finite"),
        ({"b": None}, "b has no gradient"),
        ({"frozen": torch.zeros(1)}, "frozen has a gradient"),
        ({"c": torch.zeros(1)}, r"different parameters: \['c'\]"),
    ],
)
def test_what_is_wrong_is_not_as_exact(change, words):
    with pytest.raises(AssertionError, match=words):
        assert_as_exact_as_plain(rounded(1e-6) | change, rounded(1e-6, seed=1), TRUTH)


def test_a_yardstick_of_something_else_is_refused():
    with pytest.raises(AssertionError, match="not the computation"):
        assert_as_exact_as_plain(rounded(1e-6), rounded(1e-2), TRUTH)


def test_one_wrong_tensor_among_many_is_seen():
    """Where the error over all is within bounds."""
    many = {f"{index}": TRUTH["a"] for index in range(99)}
    plain = {name: value + 1e-6 for name, value in many.items()}
    with pytest.raises(AssertionError, match="^7: error"):
        assert_as_exact_as_plain(plain | {"7": many["7"] + 2e-5}, plain, many)


def test_a_product_that_falls_back_is_no_failure():
    """torch says so once a process, on a processor without bf16 instructions; any other warning fails a test."""
    warnings.warn(FALLBACK, UserWarning, stacklevel=1)
    with pytest.raises(UserWarning, match="something else"):
        warnings.warn("something else", UserWarning, stacklevel=1)


FALLBACK = """mkldnn_matmul failed, switching to BLAS gemm: mkldnn_matmul: bf16 path needs a cpu with bf16 support
Exception raised from mkldnn_matmul at aten/src/ATen/native/mkldnn/Matmul.cpp:1 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0xc8"""
