"""The head alone: `linear_cross_entropy` and `token_logprobs` against torch on full logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import streamgrad
from gradients import relative_error
from head_cases import MAPS, E, N, V, gradients_of, operands, reference_logits
from streamgrad.head.cross_entropy import summed_cross_entropy
from streamgrad.head.linear_head import LogitMap
from streamgrad.head.targets import TargetRows, choose_head_chunk
from streamgrad.memory.head_chunk import head_chunk_within
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops import triton_support as triton_kernels
from streamgrad.ops.accumulate import accumulator_dtype, scaled


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("options", MAPS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, N, 100])
def test_cross_entropy(chunk_size, options, reduction, bias):
    hidden, weight, offset, targets = operands(bias=bias)
    targets[::4] = -100
    logits = reference_logits(hidden, weight, offset, **options)
    expected = F.cross_entropy(logits, targets, reduction=reduction)
    actual = streamgrad.linear_cross_entropy(
        hidden, weight, targets, bias=offset, reduction=reduction, chunk_size=chunk_size, **options
    )
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    leaves = (hidden, weight, offset)
    for ours, theirs in zip(gradients_of(3.0 * actual, leaves), gradients_of(3.0 * expected, leaves), strict=True):
        assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("options", MAPS, ids=str)
@pytest.mark.parametrize("chunk_size", [1, 7, N, 100])
def test_token_logprobs_and_entropy(chunk_size, options, bias):
    """A nonlinear function of both, so that each token has its own upstream gradient."""
    hidden, weight, offset, targets = operands(bias=bias)
    logp = reference_logits(hidden, weight, offset, **options).log_softmax(-1)
    expected = logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    actual = streamgrad.token_logprobs(
        hidden, weight, targets, bias=offset, chunk_size=chunk_size, return_entropy=True, **options
    )
    leaves = (hidden, weight, offset)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    losses = [torch.sigmoid(lp).pow(2).sum() + (entropy * lp).sum() for lp, entropy in (actual, expected)]
    for ours, theirs in zip(gradients_of(losses[0], leaves), gradients_of(losses[1], leaves), strict=True):
        assert relative_error(ours, theirs) < 1e-12


def test_shapes_follow_the_targets():
    hidden, weight, _, _ = operands(n=12)
    targets = torch.randint(0, V, (3, 4))
    logprobs, entropy = streamgrad.token_logprobs(hidden.view(3, 4, E), weight, targets, return_entropy=True)
    assert logprobs.shape == entropy.shape == (3, 4)


def test_ignored_tokens_have_no_value_and_no_gradient():
    hidden, weight, _, targets = operands(bias=False)
    targets[5:9] = -100
    logprobs, entropy = streamgrad.token_logprobs(hidden, weight, targets, chunk_size=4, return_entropy=True)
    assert (logprobs[5:9] == 0).all() and (entropy[5:9] == 0).all()
    (dhidden,) = torch.autograd.grad((logprobs * 2 + entropy).sum(), hidden)
    assert (dhidden[5:9] == 0).all() and (dhidden[:5] != 0).all()


def test_only_logprobs_or_only_entropy_in_the_loss():
    hidden, weight, _, targets = operands(bias=False)
    for index in (0, 1):
        logp = F.linear(hidden, weight).log_softmax(-1)
        expected = (logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1))[index]
        actual = streamgrad.token_logprobs(hidden, weight, targets, chunk_size=5, return_entropy=True)[index]
        ours, theirs = gradients_of(actual.sin().sum(), (hidden, weight)), gradients_of(expected.sin().sum(), (hidden, weight))
        assert max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-12


def test_no_target_at_all_is_nan_with_zero_gradient_as_in_torch():
    hidden, weight, _, targets = operands(bias=False)
    targets[:] = -100
    loss = streamgrad.linear_cross_entropy(hidden, weight, targets)
    assert math.isnan(loss.item()) and math.isnan(F.cross_entropy(F.linear(hidden, weight), targets).item())
    for upstream in (1.0, math.nan):
        for gradient in torch.autograd.grad(loss * upstream, (hidden, weight), retain_graph=True):
            assert (gradient == 0).all()
    assert streamgrad.linear_cross_entropy(hidden, weight, targets, reduction="sum").item() == 0.0


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_frozen_operands_get_no_gradient_buffer(function, frozen):
    hidden, weight, _, targets = operands(torch.float32, bias=False, e=64, v=3001)
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    with LiveBytes() as live:
        function(hidden, weight, targets, chunk_size=2).sum().backward()
    assert (hidden.grad is None) is (frozen == "hidden")
    assert (weight.grad is None) is (frozen == "weight")
    if frozen == "weight":
        assert live.largest[0] < weight.nbytes


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_never_more_than_a_chunk_of_logits(function):
    hidden, weight, _, targets = operands(torch.float32, bias=False, n=256, e=8, v=997)
    with LiveBytes() as live:
        function(hidden, weight, targets, chunk_size=8).sum().backward()
    assert live.largest[0] <= max(8 * 997 * 4, weight.nbytes)
    assert live.peak_bytes < 256 * 997 * 4 / 4


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_one_chunk_of_logits_lives_at_a_time(function):
    """In fp64 the reference path works in place, so the peak is a chunk and the exponentials of its log-sum-exp, not two."""
    hidden, weight, _, targets = operands(bias=False, n=64, e=2, v=2003)
    chunk_bytes = 8 * 2003 * 8
    with LiveBytes() as live:
        torch.autograd.grad(function(hidden, weight, targets, chunk_size=8).sum(), (hidden, weight))
    assert live.peak_bytes < 1.5 * chunk_bytes + 3 * weight.nbytes


class CountedGemms(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.gemms = self.zero_fills = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.gemms += name in ("mm", "addmm", "addmm_")
        result = function(*args, **(kwargs or {}))
        self.zero_fills += (
            name in ("zeros_like", "zeros", "new_zeros", "zero_", "fill_") and result.ndim == 2 and result.shape[0] == V
        )
        return result


@pytest.mark.parametrize(("function", "gemms"), [(streamgrad.linear_cross_entropy, 3), (streamgrad.token_logprobs, 4)])
@pytest.mark.parametrize("chunks", [1, 4])
def test_gemms_a_chunk(function, gemms, chunks):
    """Three where the upstream gradient is known in forward, four where it is not, and no weight's sum starts from zeros."""
    hidden, weight, _, targets = operands(bias=False)
    with CountedGemms() as counted:
        function(hidden, weight, targets, chunk_size=math.ceil(N / chunks)).sum().backward()
    assert counted.gemms == gemms * chunks
    assert counted.zero_fills == 0


def test_a_single_chunk_of_logprobs_makes_no_fp32_weight():
    """Nothing scales its gradient later, so that the GEMM may round it; several chunks are summed in fp32."""
    hidden, weight, _, targets = operands(torch.bfloat16, bias=False, n=8, e=64, v=3001)
    largest = []
    for chunk_size in (8, 4):
        with LiveBytes() as live:
            streamgrad.token_logprobs(hidden, weight, targets, chunk_size=chunk_size).sum().backward()
        largest.append(live.largest[0])
    assert largest == [weight.nbytes, 2 * weight.nbytes]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
@pytest.mark.parametrize("chunk_size", [7, N])
def test_a_second_backward_with_another_scale(chunk_size, function, dtype):
    hidden, weight, offset, targets = operands(dtype)
    value = function(hidden, weight, targets, bias=offset, chunk_size=chunk_size).sum()
    leaves = (hidden, weight, offset)
    first = torch.autograd.grad(value, leaves, retain_graph=True)
    scaled = torch.autograd.grad(4.0 * value, leaves, retain_graph=True)
    again = torch.autograd.grad(value, leaves)
    for a, b, c in zip(first, scaled, again, strict=True):
        assert a.dtype == b.dtype == dtype
        assert torch.equal(a, c) and torch.equal(4.0 * a, b)


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_no_target_means_zero_gradients(function):
    hidden, weight, offset, targets = operands()
    value = function(hidden, weight, torch.full_like(targets, -100), bias=offset)
    for gradient, leaf in zip(gradients_of(value.sum(), (hidden, weight, offset)), (hidden, weight, offset), strict=True):
        assert gradient.shape == leaf.shape and (gradient == 0).all()


def test_auto_chunks():
    """Within the budget, in whole multiples of 128 and of equal length; between 256 and 4096 tokens."""
    cpu, gib = torch.device("cpu"), 2**30
    assert choose_head_chunk(10**6, 151_936, 2, cpu) == 2048
    assert head_chunk_within(16 * gib, 8192, 151_936, 2) == 4096
    assert head_chunk_within(16 * gib, 9000, 151_936, 2) == 3072
    assert head_chunk_within(gib, 10**6, 151_936, 2) == 3456
    assert head_chunk_within(gib, 10**6, 151_936, 4) == 1664
    assert head_chunk_within(0, 10**6, 151_936, 2) == 256
    assert head_chunk_within(gib, 0, 151_936, 2) == head_chunk_within(gib, 7, 1, 2) == 256
    for tokens in (1, 300, 4097, 123_457):
        chunk = head_chunk_within(gib // 8, tokens, 32_000, 2)
        assert chunk % 128 == 0 and chunk >= 256 and chunk * 32_000 * 2 <= gib // 8


def test_auto_asks_a_gpu_what_is_free(monkeypatch):
    """An eighth of: free on the device and cached by torch, within the fraction that the process may use."""
    gib, device = 2**30, torch.device("cuda", 0)
    counts = {"allocated_bytes": {"all": {"current": 60 * gib}}, "reserved_bytes": {"all": {"current": 62 * gib}}}
    sizes = {"mem_get_info": (6 * gib, 80 * gib), "memory_stats_as_nested_dict": counts, "get_per_process_memory_fraction": 1.0}
    for name in sizes:
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: sizes[name])
    assert choose_head_chunk(10**6, 2**18, 2, device) == 2048  # (6 + 2) / 8 GiB
    sizes["get_per_process_memory_fraction"] = 0.8
    assert choose_head_chunk(10**6, 2**18, 2, device) == 1024  # (64 - 60) / 8 GiB
    sizes["get_per_process_memory_fraction"] = 0.1
    assert choose_head_chunk(10**6, 2**18, 2, device) == 256


def test_without_working_kernels_torch_takes_over_with_a_warning(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(triton_kernels.importlib, "import_module", missing)
    with pytest.warns(UserWarning, match="Triton kernels do not run here.*No module named"):
        assert not triton_kernels._run_on.__wrapped__(torch.device("cpu"))


def test_no_grad_computes_no_gradients():
    hidden, weight, _, targets = operands(torch.float32, bias=False, e=64, v=3001)
    with torch.no_grad(), LiveBytes() as live:
        streamgrad.linear_cross_entropy(hidden, weight, targets, chunk_size=2)
    assert live.largest[0] < weight.nbytes


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_bf16_is_as_accurate_as_torch_on_bf16_logits(function):
    """fp32 sums over 100 chunks: at most 1.02 times the error of the plain head, pooled over seeds."""
    squares = [0.0, 0.0]
    for seed in range(5):
        hidden, weight, _, targets = operands(torch.bfloat16, bias=False, seed=seed, n=400, e=32, v=101)
        truth_leaves = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
        truth = gradients_of(F.cross_entropy(F.linear(*truth_leaves), targets), truth_leaves)
        plain = gradients_of(F.cross_entropy(F.linear(hidden, weight).float(), targets), (hidden, weight))
        value = function(hidden, weight, targets, chunk_size=4)
        ours = gradients_of(value if value.ndim == 0 else -value.mean(), (hidden, weight))
        for index, side in enumerate((plain, ours)):
            squares[index] += sum(relative_error(a, b) ** 2 for a, b in zip(side, truth, strict=True))
    assert math.sqrt(squares[1] / squares[0]) <= 1.02


@pytest.mark.parametrize("items", [None, 1000], ids=["mean", "items"])
@pytest.mark.parametrize("spread", [0.02, 1.0])
def test_16_bit_gradients_are_rounded_once(spread, items):
    """Hidden states' and weight's each: as far from the truth as plain bf16's, for divisors that are no powers of two."""
    squares = [[0.0, 0.0], [0.0, 0.0]]
    for seed, n in enumerate((300, 387, 400)):
        hidden, weight, _, targets = operands(torch.bfloat16, bias=False, seed=seed, n=n, e=32, v=101)
        with torch.no_grad():
            weight.mul_(spread)
        exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
        divisor = items or n
        truth, plain = (
            gradients_of(F.cross_entropy(logits, targets, reduction="sum") / divisor, leaves)
            for logits, leaves in ((F.linear(*exact), exact), (F.linear(hidden, weight).float(), (hidden, weight)))
        )
        rows = TargetRows(targets, vocabulary=101, ignore_index=-100, chunk_size=64)
        total, _ = summed_cross_entropy(
            hidden, weight, None, rows, LogitMap(), divisor=None if items is None else torch.tensor(items)
        )
        ours = gradients_of(total / divisor, (hidden, weight))
        for side, gradients in enumerate((plain, ours)):
            for index in range(2):
                squares[index][side] += relative_error(gradients[index], truth[index]) ** 2
    for plain_square, our_square in squares:
        assert math.sqrt(our_square / plain_square) <= 1.02


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"targets": torch.zeros(5, dtype=torch.long)}, ValueError, "one target per token"),
        ({"targets": torch.zeros(N)}, TypeError, "int64"),
        ({"weight": torch.zeros(V, E + 1, dtype=torch.float64)}, ValueError, "width"),
        ({"weight": torch.zeros(V, E, dtype=torch.float32)}, ValueError, "float64 and the weight is torch.float32"),
        ({"weight": torch.nn.Linear(E, V)}, TypeError, "weight is a module, Linear.*Pass lm_head.weight as the weight"),
        ({"weight": torch.zeros(E, dtype=torch.float64)}, ValueError, r"weight has shape \(\d+,\)"),
        ({"bias": torch.zeros(1, dtype=torch.float64)}, ValueError, r"bias has shape \(1,\), and the weight .* needs"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0"),
        ({"chunk_size": "large"}, ValueError, "\"auto\", got 'large'"),
        ({"temperature": 0.0}, ValueError, "temperature=0.0 must be positive"),
        ({"softcap": -1.0}, ValueError, "softcap=-1.0"),
    ],
)
@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_bad_input(function, change, error, words):
    hidden, weight, _, targets = operands(bias=False)
    arguments = {"hidden": hidden, "weight": weight, "targets": targets} | change
    with pytest.raises(error, match=words):
        function(**arguments)


@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
def test_autocast_says_what_two_dtypes_are_multiplied_in(function):
    hidden, weight, _, targets = operands(bias=False)
    values = []
    for dtype in (torch.float32, torch.bfloat16):
        leaf = weight.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            values.append(function(hidden.float(), leaf, targets, chunk_size=5))
        values[-1].sum().backward()
        assert leaf.grad.dtype == dtype and leaf.grad.isfinite().all() and leaf.grad.any()
    assert torch.equal(*values)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)], ids=str)
def test_sums_are_scaled_in_the_precision_of_the_factor(shape, dtype):
    """And rounded once: in 16 bits, a factor of 1/3 would be another one."""
    total = torch.randn(shape, dtype=torch.float64).to(dtype)
    for sum_of_chunks in (total, total.mT if total.ndim == 2 else total):
        for result in (dtype, torch.bfloat16):
            factor = torch.tensor(1.0, dtype=accumulator_dtype(dtype)) / 3
            expected = (sum_of_chunks.to(factor.dtype) * factor).to(result)
            actual = scaled(sum_of_chunks, factor, result)
            assert actual.dtype == result and actual.shape == sum_of_chunks.shape and torch.equal(actual, expected)


def test_bad_reduction():
    hidden, weight, _, targets = operands(bias=False)
    with pytest.raises(ValueError, match='reduction must be "mean" or "sum", got .none.*token_logprobs'):
        streamgrad.linear_cross_entropy(hidden, weight, targets, reduction="none")


@settings(max_examples=60)
@given(
    n=st.integers(1, 40),
    e=st.integers(1, 12),
    v=st.integers(1, 30),
    chunk_size=st.integers(1, 45),
    ignored=st.floats(0, 1),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    softcap=st.sampled_from([None, 1.5]),
    seed=st.integers(0, 10**6),
)
def test_any_shape(n, e, v, chunk_size, ignored, temperature, softcap, seed):
    hidden, weight, bias, targets = operands(seed=seed, n=n, e=e, v=v)
    targets = targets.masked_fill(torch.rand(n, generator=torch.Generator().manual_seed(seed)) < ignored, -100)
    options = {"temperature": temperature, "softcap": softcap}
    expected = F.cross_entropy(reference_logits(hidden, weight, bias, **options), targets, reduction="sum")
    actual = streamgrad.linear_cross_entropy(
        hidden, weight, targets, bias=bias, reduction="sum", chunk_size=chunk_size, **options
    )
    logprobs = streamgrad.token_logprobs(hidden, weight, targets, bias=bias, chunk_size=chunk_size, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(-logprobs.sum(), expected, rtol=1e-10, atol=1e-12)
    leaves = (hidden, weight, bias)
    theirs = gradients_of(expected, leaves)
    for ours in (gradients_of(actual, leaves), gradients_of(-logprobs.sum(), leaves)):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
