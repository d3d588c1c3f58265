"""`linear_topk` and `linear_topk_divergence` against TRL's sparse divergence on full logits, what they hold and refuse."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from trl.experimental.server_distillation import server_distillation_trainer as server

import streamgrad
from gradients import errors_by_name
from head_cases import N, V, gradients_of, operands, reference_logits
from streamgrad.memory.live_bytes import LiveBytes

KINDS = [("forward_kl", None, 0), ("reverse_kl", None, 1), ("jsd", None, 0.5), ("jsd", 0.2, 0.2)]
K = 5


def teacher(k=K, *, missing: bool = False):
    """Log-probabilities and tokens of another head, some of them missing."""
    hidden, weight, bias, _ = operands(seed=1, e=23)
    logprobs, indices = reference_logits(hidden, weight, bias).log_softmax(-1).detach().topk(k)
    if missing:
        logprobs[::3, k // 2 :] = -torch.inf
        logprobs[1] = -torch.inf
    return logprobs, indices


def divergence(student, logprobs, indices, **options):
    hidden, weight, bias = student
    return streamgrad.linear_topk_divergence(hidden, weight, logprobs, indices, student_bias=bias, **options)


def of_trl(student, logprobs, indices, beta, *, add_tail=True, temperature=1.0):
    """As `ServerDistillationTrainer` computes it, with any number of tokens for each `beta`."""
    there = logprobs > -torch.inf
    logp = reference_logits(*student, temperature=temperature).log_softmax(-1).gather(-1, indices)
    logp = torch.where(there, logp, -torch.inf)
    if add_tail:
        logp, support = server._add_tail_bucket(logp, there)
        logq, _ = server._add_tail_bucket(logprobs, there)
    else:
        support = there
        logp, logq = (side - side.logsumexp(-1, keepdim=True) for side in (logp, logprobs))
    return server._jsd_divergence(logp, logq, beta, support).sum(-1)


def assert_same(actual, expected, student, tolerance=1e-12):
    """Both values and the gradients of a weighted sum of them."""
    upstream = torch.linspace(-1, 1, N, dtype=actual.dtype)
    ours, theirs = (
        {"value": side.detach()}
        | dict(zip(("hidden", "weight", "bias"), gradients_of((side * upstream).sum(), student), strict=True))
        for side in (actual, expected)
    )
    assert max(errors_by_name(ours, theirs).values()) < tolerance


@pytest.mark.parametrize(("kind", "beta", "trl_beta"), KINDS)
@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 7, "auto"])
def test_values_and_gradients(kind, beta, trl_beta, add_tail, chunk_size):
    student, given = operands()[:3], teacher()
    options = {"add_tail": add_tail, "temperature": 0.7}
    actual = divergence(student, *given, kind=kind, beta=beta, chunk_size=chunk_size, **options)
    assert_same(actual, of_trl(student, *given, trl_beta, **options), student)


@pytest.mark.parametrize(("kind", "beta", "trl_beta"), KINDS)
def test_missing_tokens_are_in_the_tail(kind, beta, trl_beta):
    """A token of which nothing is known has no divergence, and no gradient."""
    student, (logprobs, indices) = operands()[:3], teacher(missing=True)
    actual = divergence(student, logprobs, indices, kind=kind, beta=beta, chunk_size=7)
    # In TRL such a token gives NaN gradients.
    logprobs, some = logprobs.clone(), torch.arange(N) != 1
    logprobs[1] = -1.0
    assert actual[1] == 0
    assert_same(actual, torch.where(some, of_trl(student, logprobs, indices, trl_beta), 0.0), student)


def test_all_tokens_of_the_vocabulary_are_the_whole_divergence():
    student, (hidden, weight, bias) = operands()[:3], (tensor.detach() for tensor in operands(seed=1, e=23)[:3])
    logprobs, indices = streamgrad.linear_topk(hidden, weight, V, bias=bias, chunk_size=7)
    for kind, beta, _ in KINDS:
        expected = streamgrad.linear_divergence(
            *student[:2], hidden, weight, kind=kind, beta=beta, student_bias=student[2], teacher_bias=bias
        )
        assert_same(divergence(student, logprobs, indices, kind=kind, beta=beta, add_tail=False), expected, student)


def test_a_mask_leaves_tokens_out():
    """Whatever the teacher's numbers are there."""
    student, (logprobs, indices) = operands()[:3], teacher()
    mask = torch.arange(N) % 3 != 0
    actual = divergence(student, logprobs.masked_fill(~mask[:, None], torch.nan), indices, mask=mask, kind="jsd", chunk_size=7)
    assert not actual[~mask].any()
    assert_same(actual, torch.where(mask, of_trl(student, logprobs, indices, 0.5), 0.0), student)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_teachers_likeliest(temperature):
    hidden, weight, bias, _ = operands()
    mask = torch.arange(N) % 3 != 0
    expected = reference_logits(hidden, weight, bias, temperature=temperature).log_softmax(-1).topk(K)
    shaped = hidden.view(1, N, -1)
    logprobs, indices = streamgrad.linear_topk(
        shaped, weight, K, bias=bias, temperature=temperature, mask=mask[None], chunk_size=7
    )
    assert logprobs.shape == (1, N, K) and not logprobs.requires_grad
    torch.testing.assert_close(logprobs[0], expected.values * mask[:, None], rtol=1e-12, atol=1e-14)
    assert torch.equal(indices[0], expected.indices * mask[:, None])


def test_only_what_is_trained_gets_a_gradient():
    hidden, weight, bias, _ = operands()
    divergence((hidden, weight.detach(), bias.detach()), *teacher()).sum().backward()
    assert hidden.grad is not None and weight.grad is None and bias.grad is None


def test_costs():
    """Four products of the student and one of the teacher, and a few chunks of logits at a time: never those of all tokens."""
    n, v, chunk = 512, 1024, 8
    student = operands(torch.float32, n=n, v=v)[:3]
    hidden, weight, bias = (tensor.detach() for tensor in operands(torch.float32, n=n, v=v, e=23, seed=1)[:3])
    with LiveBytes() as live, FlopCounterMode(display=False) as flops:
        given = streamgrad.linear_topk(hidden, weight, K, bias=bias, chunk_size=chunk)
        divergence(student, *given, kind="jsd", chunk_size=chunk).sum().backward()
    assert 4 * chunk * v <= live.largest[0] < 4 * n * v / 8
    # The counter does not see the weight's products that are added in place, all but the first.
    assert flops.get_total_flops() == 2 * v * (n * (3 * student[0].shape[1] + 23) + chunk * student[0].shape[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "kl"}, "kind must be one of forward_kl, reverse_kl, jsd, got 'kl'"),
        ({"temperature": 0.0}, "temperature=0.0 must be positive"),
        ({"mask": torch.ones(3)}, r"mask has shape \(3,\).* of shape \(31,\)"),
        ({"indices": torch.full((N, K), V)}, "the token 47, outside the student's vocabulary of 47"),
        ({"indices": torch.zeros(N, K - 1, dtype=torch.long)}, r"shape \(31, 5\) and teacher_indices \(31, 4\).* \(31, K\)"),
        ({"logprobs": torch.zeros(N, K, requires_grad=True)}, r"Pass teacher_logprobs.detach\(\)"),
    ],
    ids=str,
)
def test_bad_arguments(options, message):
    given = dict(zip(("logprobs", "indices"), teacher(), strict=True)) | options
    with pytest.raises(ValueError, match=message):
        divergence(operands()[:3], **given)


@pytest.mark.parametrize("k", [0, V + 1])
def test_a_bad_k(k):
    with pytest.raises(ValueError, match=f"k must be from 1 to the 47 tokens of the vocabulary, got {k}"):
        streamgrad.linear_topk(*operands()[:2], k)
