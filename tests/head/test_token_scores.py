"""`token_scores`, the head under TRL's trainers, against torch on full logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gradients import relative_error
from head_cases import MAPS, N, gradients_of, operands, reference_logits
from streamgrad.head.linear_head import LogitMap
from streamgrad.head.token_scores import FIELDS, token_scores
from streamgrad.memory.live_bytes import LiveBytes


def reference_scores(logits, targets, *, label_smoothing=0.0):
    """The docstring of `token_scores`, on full logits."""
    kept = targets != -100
    logp = logits.log_softmax(-1)
    picked = logp.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    scores = {
        "log_probs": (1 - label_smoothing) * picked + label_smoothing * logp.mean(-1),
        "entropy": -(logp.exp() * logp).sum(-1),
        "log_sum_sq_probs": (2 * logp).logsumexp(-1),
        "mean_logits": logits.mean(-1),
        "is_top1": logits.argmax(-1) == targets,
    }
    return {name: torch.where(kept, score, torch.zeros_like(score)) for name, score in scores.items()}


LOSSES = {
    "log_probs": lambda scores, up: (scores["log_probs"] * up).sum(),
    "entropy": lambda scores, up: (scores["entropy"] * up).sum(),
    "both": lambda scores, up: (scores["log_probs"] * up + scores["entropy"] * up.cos()).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("options", MAPS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, N])
def test_values_and_gradients(chunk_size, options, label_smoothing, loss):
    hidden, weight, bias, targets = operands()
    targets[::4] = -100
    logits = reference_logits(hidden, weight, bias, **options)
    targets[1] = logits[1].argmax()
    expected = reference_scores(logits, targets, label_smoothing=label_smoothing)
    actual = token_scores(
        hidden, weight, targets, bias=bias, fields=FIELDS, logit_map=LogitMap.build(**options),
        label_smoothing=label_smoothing, chunk_size=chunk_size,
    )  # fmt: skip
    assert actual.keys() == expected.keys()
    assert actual["is_top1"].any() and not actual["is_top1"].all()
    for name, score in expected.items():
        torch.testing.assert_close(actual[name], score, rtol=1e-12, atol=1e-12)
    upstream = torch.linspace(-1, 1, N, dtype=torch.float64)
    ours, theirs = (gradients_of(LOSSES[loss](side, upstream), (hidden, weight, bias)) for side in (actual, expected))
    assert max(map(relative_error, ours, theirs)) < 1e-12


def test_smoothing_is_that_of_cross_entropy():
    hidden, weight, bias, targets = operands()
    expected = F.cross_entropy(F.linear(hidden, weight, bias), targets, label_smoothing=0.3, reduction="none")
    actual = token_scores(hidden, weight, targets, bias=bias, label_smoothing=0.3)["log_probs"]
    torch.testing.assert_close(-actual, expected)


def test_what_is_not_asked_for_is_not_there():
    hidden, weight, _, targets = operands()
    scores = token_scores(hidden, weight.detach(), targets, fields=("is_top1", "mean_logits"))
    assert scores.keys() == {"log_probs", "mean_logits", "is_top1"}
    assert scores["log_probs"].requires_grad
    assert not scores["mean_logits"].requires_grad and not scores["is_top1"].requires_grad
    scores["log_probs"].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_of_equal_logits_the_first_is_the_top_one():
    """As argmax has it, and TRL: bf16 logits are often equal."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[1.0], [2.0], [2.0]])
    assert token_scores(hidden, weight, torch.tensor([1, 2]), fields=("is_top1",))["is_top1"].tolist() == [True, False]


def test_no_target_at_all():
    hidden, weight, bias, targets = operands()
    scores = token_scores(hidden, weight, targets.fill_(-100), bias=bias, fields=FIELDS)
    assert all(not score.any() for score in scores.values())
    for gradient in gradients_of(scores["log_probs"].sum(), (hidden, weight, bias)):
        assert not gradient.any()


def test_targets_that_are_written_over_before_backward():
    hidden, weight, targets = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3), torch.arange(5)
    scores = token_scores(hidden, weight, targets)["log_probs"]
    targets.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        scores.sum().backward()


def test_under_autocast_the_weight_gradient_keeps_its_precision():
    """fp32 weights under bf16 autocast: the product is bf16, the sum over tokens is not rounded to it."""
    hidden, weight, bias, targets = operands(torch.float32, n=999)
    targets[::4] = -100
    upstream = torch.linspace(-1, 1, 999)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = token_scores(hidden, weight, targets, bias=bias, fields=FIELDS, chunk_size=10)
    assert all(score.dtype == torch.float32 for name, score in scores.items() if name != "is_top1")
    gradients = gradients_of((scores["log_probs"] * upstream).sum(), (hidden, weight, bias))
    logits = F.linear(*(tensor.bfloat16() for tensor in (hidden, weight, bias))).float()
    leaf = logits.detach().requires_grad_()
    torch.testing.assert_close(scores["log_probs"], reference_scores(leaf, targets)["log_probs"])
    (dlogits,) = torch.autograd.grad((reference_scores(leaf, targets)["log_probs"] * upstream).sum(), leaf)
    exact = dlogits.bfloat16().double().T @ hidden.bfloat16().double()
    # Ten times and more from either side: float32 sums were seen at 1e-7, and one rounding to bf16 gives 1e-3.
    assert relative_error(gradients[1], exact) < 1e-5
    assert relative_error(exact.bfloat16(), exact) > 1e-4, "the bound above would not see a rounding"


def test_no_tensor_of_tokens_times_vocabulary():
    n, v, chunk = 512, 1024, 8
    hidden, weight, _, targets = operands(torch.float32, n=n, v=v)
    with LiveBytes() as live:
        scores = token_scores(hidden, weight, targets, fields=FIELDS, chunk_size=chunk)
        (scores["log_probs"].sum() + scores["entropy"].sum()).backward()
    assert 4 * chunk * v <= live.largest[0] < 4 * n * v / 8
    # The weight's gradient, and a few tensors of one chunk.
    assert live.peak_bytes < 4 * (2 * weight.numel() + 6 * chunk * v + 3 * hidden.numel())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("options", MAPS, ids=str)
def test_on_a_gpu(options, label_smoothing):
    """The kernels, in float32, against float64 on the CPU."""
    results = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        hidden, weight, bias, targets = operands()
        targets[::4] = -100
        leaves = [tensor.detach().to(device, dtype).requires_grad_() for tensor in (hidden, weight, bias)]
        scores = token_scores(
            leaves[0], leaves[1], targets.to(device), bias=leaves[2], fields=FIELDS, logit_map=LogitMap.build(**options),
            label_smoothing=label_smoothing, chunk_size=7,
        )  # fmt: skip
        loss = LOSSES["both"](scores, torch.linspace(-1, 1, N, dtype=dtype, device=device))
        results.append((scores, gradients_of(loss, leaves)))
    (scores, gradients), (expected, expected_gradients) = results
    for name, score in expected.items():
        assert relative_error(scores[name].cpu(), score) < 1e-5, name
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        assert relative_error(gradient.cpu(), reference) < 1e-5


@pytest.mark.parametrize(
    ("options", "words"),
    [({"fields": ("logits",)}, ["mean_logits", "'logits'"]), ({"label_smoothing": 1.0}, ["label_smoothing=1.0", "below 1"])],
    ids=str,
)
def test_bad_input(options, words):
    hidden, weight, _, targets = operands()
    with pytest.raises(ValueError, match=".*".join(words)):
        token_scores(hidden, weight, targets, **options)
