"""The head's Triton kernels against the torch code they stand for: on a GPU, else in Triton's interpreter (see conftest)."""

from __future__ import annotations

import importlib
import math
import warnings

import pytest
import torch
from torch.nn import functional as F

import streamgrad
from gradients import relative_error
from streamgrad.head import softmax
from streamgrad.head.linear_head import LogitMap
from streamgrad.ops.accumulate import scaled

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytest.importorskip("triton", reason="triton (0.6 GB) comes with torch's CUDA builds and is not installed with the CPU build")
kernels = importlib.import_module("streamgrad.head.softmax_kernels")
layer_kernels = importlib.import_module("streamgrad.ops.fused_kernels")

gpu = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 31), (47, 1000), (2, 2 * kernels.BLOCK), (47 if HAS_GPU else 1, 151_936)]
MAPS = {
    "plain": LogitMap(),
    "scale": LogitMap.build(logit_scale=0.3, temperature=1.7),
    "softcap": LogitMap.build(logit_scale=1.2, softcap=5.0, temperature=0.7),
}


@pytest.fixture(autouse=True)
def _quiet_interpreter():
    with warnings.catch_warnings():
        if not HAS_GPU:  # numpy's, for NaN and infinities that a test puts in
            warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
        yield


def reference(name, product, *arguments, **options):
    """The torch code, in fp64 from the same product."""
    function = getattr(softmax, name)
    assert softmax._kernels_for(product.double()) is None
    return function(product.double(), *(value.double() if is_float(value) else value for value in arguments), **options)


def is_float(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def chunk(n: int, v: int, dtype: torch.dtype):
    product = (4.0 * torch.randn(n, v, device=DEVICE)).to(dtype)
    return product, torch.randint(0, v, (n,), device=DEVICE), torch.randn(2, n, device=DEVICE)


@pytest.mark.parametrize("count", [1, 4095, 3 * 4096 + 1])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scaled_sums(dtype, target, count):
    """Bit for bit the product in fp32, rounded once; a factor of another precision would show in the last bit."""
    total = torch.randn(count, device=DEVICE).to(dtype)
    factor = torch.tensor(1.0 / 3.0, device=DEVICE)
    expected = (total.double() * factor.double()).float().to(target)
    assert torch.equal(layer_kernels.scaled(total, factor, target), expected)
    assert torch.equal(scaled(total, factor, target), expected)
    assert scaled(total[:0], factor, target).shape == (0,)


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("n", "v"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics(dtype, n, v, name):
    product, targets, _ = chunk(n, v, dtype)
    before = product.clone()
    actual = kernels.token_statistics(product, targets, MAPS[name], with_entropy=True)
    expected = reference("token_statistics", product, targets, MAPS[name], with_entropy=True)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=1e-5)
    assert torch.equal(product, before)
    without = kernels.token_statistics(product, targets, MAPS[name], with_entropy=False)
    assert without[2] is None and torch.equal(without[0], actual[0]) and torch.equal(without[1], actual[1])


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("n", "v"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_takes_the_place_of_the_product(dtype, n, v, name, with_entropy):
    """Rounded once: each entry is as close to the fp64 gradient as its dtype allows, but for fp32 noise."""
    product, targets, (dlogprobs, dentropy) = chunk(n, v, dtype)
    lse, _, entropy = kernels.token_statistics(product, targets, MAPS[name], with_entropy=True)
    upstream = (dlogprobs, entropy, dentropy) if with_entropy else (dlogprobs,)
    expected = reference("product_gradient", product.clone(), targets, MAPS[name], lse, *upstream)
    actual = kernels.product_gradient(product, targets, MAPS[name], lse, *upstream)
    assert actual.data_ptr() == product.data_ptr() and actual.dtype == dtype
    info = torch.finfo(dtype)
    # The interpreter cuts a bf16 off where the hardware rounds it to the nearest.
    roundings = 1.0 if dtype == torch.bfloat16 and not HAS_GPU else 0.5
    noise = 1e-5 * expected.abs().amax(dim=1, keepdim=True) + 1e-6 * torch.stack(upstream).abs().max()
    allowed = roundings * info.eps * expected.abs() + noise + info.smallest_normal * info.eps
    assert ((actual.double() - expected).abs() <= allowed).all()


def test_values_that_are_not_numbers_are_passed_on():
    product, targets, (dlogprobs, _) = chunk(3, 50, torch.float32)
    product[1, 20] = float("nan")
    product[2, :49], targets[2] = float("-inf"), 49
    lse, picked, entropy = kernels.token_statistics(product, targets, LogitMap(), with_entropy=True)
    assert lse.isfinite().tolist() == [True, False, True] and lse[1].isnan() and entropy[1].isnan()
    assert lse[2] == picked[2] and entropy[2] == 0.0
    gradient = kernels.product_gradient(product, targets, LogitMap(), lse, dlogprobs)
    assert gradient[1].isnan().all() and gradient[[0, 2]].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"softcap": 4.0, "logit_scale": 1.3, "temperature": 0.8}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_head_through_the_kernels(monkeypatch, dtype, options):
    """Losses and gradients of both functions, with ignored rows and a ragged last chunk, against the reference path."""

    def outcome():
        hidden, weight, bias = (tensor.clone().requires_grad_() for tensor in leaves)
        loss = streamgrad.linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_size=8, **options)
        logprobs, entropy = streamgrad.token_logprobs(
            hidden, weight, targets, bias=bias, chunk_size=8, return_entropy=True, **options
        )
        values = [loss, logprobs, entropy]
        gradients = [
            *torch.autograd.grad(loss, (hidden, weight, bias)),
            *torch.autograd.grad((logprobs.sin() + entropy * logprobs).sum(), (hidden, weight, bias)),
        ]
        return values + gradients

    generator = torch.Generator().manual_seed(0)
    leaves = [(0.5 * torch.randn(*shape, generator=generator)).to(DEVICE, dtype) for shape in ((29, 16), (301, 16), (301,))]
    targets = torch.randint(0, 301, (29,), generator=generator).to(DEVICE)
    targets[::5] = -100
    calls = []

    def counted(product):
        calls.append(tuple(product.shape))
        return kernels

    monkeypatch.setattr(softmax, "_kernels_for", lambda product: None)
    expected = outcome()
    monkeypatch.setattr(softmax, "_kernels_for", counted)
    actual = outcome()
    # 23 targets: three chunks; statistics and gradient for either function.
    assert calls == 2 * [(8, 301)] * 2 + [(7, 301)] * 2 + [(8, 301)] * 2 + [(7, 301)] + [(8, 301)] * 2 + [(7, 301)]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours, theirs) < (1e-5 if dtype == torch.float32 else 1e-2 if dtype == torch.bfloat16 else 1e-3)


def on_gpu(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


class TestOnTheDevice:
    pytestmark = gpu

    def test_the_head_uses_them(self):
        for dtype in DTYPES:
            assert softmax._kernels_for(on_gpu(2, 3, dtype=dtype)) is kernels
        assert softmax._kernels_for(on_gpu(2, 3, dtype=torch.float64)) is None

    def test_rows_past_two_to_the_31(self):
        n, v = 2**31 // 151_936 + 3, 151_936
        product = torch.zeros(n, v, device="cuda", dtype=torch.bfloat16)
        product[-2:] = on_gpu(2, v, dtype=torch.bfloat16, scale=3.0)
        targets, dlogprobs = torch.arange(n, device="cuda"), torch.ones(n, device="cuda")
        lse, picked, _ = kernels.token_statistics(product, targets, LogitMap(), with_entropy=False)
        expected = reference("token_statistics", product[-2:], targets[-2:], LogitMap())
        torch.testing.assert_close(torch.stack([lse, picked])[:, -2:].double(), torch.stack(expected[:2]), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(lse[:-2], torch.full_like(lse[:-2], math.log(v)))
        dproduct = reference("product_gradient", product[-2:].clone(), targets[-2:], LogitMap(), lse[-2:], dlogprobs[-2:])
        kernels.product_gradient(product, targets, LogitMap(), lse, dlogprobs)
        assert relative_error(product[-2:], dproduct) < 4e-3

    @pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
    @pytest.mark.parametrize("chunk_size", [256, 2048])
    def test_bf16_error_is_that_of_plain_bf16(self, function, chunk_size):
        """At most 1.02 times the plain head's error against fp64, pooled over seeds."""
        squares = [0.0, 0.0]
        for seed in range(4):
            torch.manual_seed(seed)
            leaves = [on_gpu(2000, 256, dtype=torch.bfloat16), on_gpu(5003, 256, dtype=torch.bfloat16, scale=0.1)]
            targets = torch.randint(0, 5003, (2000,), device="cuda")
            hidden, weight = (leaf.requires_grad_() for leaf in leaves)
            exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
            truth = torch.autograd.grad(F.cross_entropy(F.linear(*exact), targets), exact)
            plain = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight).float(), targets), leaves)
            value = function(hidden, weight, targets, chunk_size=chunk_size)
            ours = torch.autograd.grad(value if value.ndim == 0 else -value.mean(), leaves)
            for index, side in enumerate((plain, ours)):
                squares[index] += sum(relative_error(a, b) ** 2 for a, b in zip(side, truth, strict=True))
        assert math.sqrt(squares[1] / squares[0]) <= 1.02

    @pytest.mark.parametrize("chunk_size", [1024, 4096])
    @pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
    def test_peak_is_one_chunk_of_logits_and_one_sum(self, function, chunk_size):
        """Above inputs and gradients: 16-bit logits of a chunk and, with several chunks or a scale to come, an fp32 weight
        where the gradient will be; never a second chunk, an fp32 copy of the logits or a scaled fp32 copy of the weight.
        """
        n, e, v = 4096, 512, 32_000
        hidden, weight = on_gpu(n, e, dtype=torch.bfloat16).requires_grad_(), on_gpu(v, e, dtype=torch.bfloat16).requires_grad_()
        targets = torch.randint(0, v, (n,), device="cuda")

        def step():
            value = function(hidden, weight, targets, chunk_size=chunk_size)
            return torch.autograd.grad(value.sum(), (hidden, weight))

        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = step()
        above = torch.cuda.max_memory_allocated() - before - sum(gradient.nbytes for gradient in gradients)
        assert above <= chunk_size * v * 2 + weight.nbytes + 2 * hidden.nbytes + 2**20

    def test_auto_chunk_follows_free_memory(self):
        from streamgrad.head.targets import choose_head_chunk

        device = torch.device("cuda")
        free = torch.cuda.mem_get_info(device)[0]
        wide = choose_head_chunk(100_000, 1000, 2, device)
        narrow = choose_head_chunk(100_000, max(1, free // 8 // 2 // 1000), 2, device)
        assert wide > 3500 and 256 <= narrow <= 1152
