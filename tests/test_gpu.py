"""On a CUDA device: every kernel, policy and kind of batch against plain backpropagation on the same device."""

from __future__ import annotations

import math

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step, total_gradient_error
from streamgrad.attention.backends import Block, backends_named
from streamgrad.core.chunk import Attended
from tiny import tiny_model, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KERNELS = ("cudnn", "flash", "sdpa", "eager")
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def on_gpu(batch: dict) -> dict:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.mark.parametrize("kind", ["dense", "causal", "chunk", "mask"])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", KERNELS)
def test_a_block_and_its_part_of_a_larger_softmax(name, size, kind):
    """Forward, backward, and backward with the output and log-sum-exp of a row twice as long."""
    torch.manual_seed(0)
    rows = 96
    keys = {"causal": rows, "chunk": 161, "dense": 161, "mask": 161}[kind]
    query, key, value, dout = (
        torch.randn(2, heads, length, size, device="cuda", dtype=torch.bfloat16)
        for heads, length in ((4, rows), (2, keys), (2, keys), (4, rows))
    )
    mask = torch.rand(2, 1, rows, keys, device="cuda") < 0.5 if kind == "mask" else None
    block = Block(scale=size**-0.5, causal=kind in ("causal", "chunk"), mask=mask)
    (backend,), (reference,) = backends_named(name), backends_named("eager")
    refusal = backend.refusal(query, key, value, block)
    if refusal:
        pytest.skip(refusal)
    exact = [tensor.double() for tensor in (query, key, value)]
    done, truth = backend.forward(query, key, value, block), reference.forward(*exact, block)
    assert relative_error(done.out_BHLD, truth.out_BHLD) < 5e-3
    torch.testing.assert_close(done.lse_BHL.double(), truth.lse_BHL, rtol=0.0, atol=1e-2)
    larger = Attended(truth.out_BHLD * 0.5, truth.lse_BHL + 0.7)
    expected = reference.backward(dout.double(), *exact, larger, block)
    rounded = Attended(larger.out_BHLD.bfloat16(), larger.lse_BHL.float())
    actual = backend.backward(dout, query, key, value, rounded, block)
    for ours, theirs in zip(*(added_up(result, key) for result in (actual, expected)), strict=True):
        assert ours.isfinite().all()
        assert relative_error(ours, theirs) < 1e-2


def added_up(result, key):
    """A kernel's `(dquery, pieces)` as `(dquery, dkey, dvalue)`."""
    dquery, pieces = result
    dkey, dvalue = torch.zeros_like(key, dtype=torch.float64), torch.zeros_like(key, dtype=torch.float64)
    for first, last, dkey_piece, dvalue_piece in pieces:
        dkey[:, :, first:last] += dkey_piece
        dvalue[:, :, first:last] += dvalue_piece
    return dquery, dkey, dvalue


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("kind", [kind for kind in batches.KINDS if kind != "unlabelled"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_fp32_gradients_on_the_device(family, kind, keep):
    if (family, kind) == ("gpt_oss", "packed_flat"):
        pytest.skip("stock gpt-oss with eager attention ignores the boundaries")
    model = tiny_model(family, dtype=torch.float32).cuda()
    batch = on_gpu(batches.KINDS[kind](model))
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=7, head_chunk_size=5, keep=keep)
    assert_same_step(run_step(model, batch), expected, 2e-5)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_fp64_gradients_on_the_device(family):
    model = tiny_model(family).cuda()
    batch = on_gpu(batches.right_padded(model))
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("kind", ["plain", "padded"])
@pytest.mark.parametrize("name", ["auto", *KERNELS])
def test_bf16_error_is_that_of_plain_bf16(name, kind):
    """At most 1.02 times plain bf16's error against fp32, pooled over parameters and random models."""
    if kind == "padded" and name in ("cudnn", "flash"):
        pytest.skip("takes no mask")
    length, squares = 1024, dict.fromkeys((0, 8, 64), 0.0)
    for seed in range(4):
        model = tiny_model("llama", dtype=torch.bfloat16, seed=seed, **SHAPE).cuda()
        truth_model = tiny_model("llama", dtype=torch.float32, seed=seed, **SHAPE).cuda()
        truth_model.load_state_dict(model.state_dict())
        ids = tokens(2, length, seed=seed).cuda()
        batch = {"input_ids": ids, "labels": ids.clone()}
        if kind == "padded":
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1, 700:] = 0
            batch["labels"][1, 700:] = -100
        truth = run_step(truth_model, batch).gradients
        for chunks in squares:
            if chunks:
                streamgrad.enable(model, chunk_size=length // chunks, head_chunk_size=length // chunks, attention=name)
            squares[chunks] += total_gradient_error(run_step(model, batch).gradients, truth) ** 2
            streamgrad.disable(model)
    for chunks in (8, 64):
        ratio = math.sqrt(squares[chunks] / squares[0])
        assert ratio <= 1.02, f"{chunks} chunks: {ratio:.4f} times plain bf16"


def test_dropout_on_the_device_uses_one_mask():
    """The CUDA generator is replayed too: with one chunk, stock and streamed draw the same numbers."""
    model = tiny_model("gpt_neox", dtype=torch.float32, hidden_dropout=0.3).cuda()
    batch = on_gpu(batches.plain(model))

    def seeded(model, batch):
        torch.manual_seed(5)
        return model(**batch).loss

    expected = run_step(model, batch, forward=seeded)
    streamgrad.enable(model, chunk_size=batches.LENGTH)
    assert_same_step(run_step(model, batch, forward=seeded), expected, 2e-5)


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_host_offload_is_bitwise_equal_and_reuses_its_buffers(keep):
    """Several lengths, two backward passes in flight and a retained graph, against the same with tensors on the device."""
    outcomes, pools = [], []
    for offload in ("none", "host"):
        model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=4, **SHAPE).cuda()
        streamgrad.enable(model, chunk_size=64, keep=keep, offload=offload)
        batch = {length: tokens(2, length, seed=length).cuda() for length in (200, 333, 120)}

        def step(*lengths, model=model, batch=batch):
            losses = [model(input_ids=batch[length], labels=batch[length]).loss for length in lengths]
            losses[0].backward(retain_graph=True)
            for loss in losses:
                loss.backward()

        for lengths in ((200,), (333, 120), (120, 333), (333,)):
            step(*lengths)
        torch.cuda.synchronize()
        outcomes.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        pools.append(model.model._streamgrad.stream.host_store)
    for name, gradient in outcomes[0].items():
        assert torch.equal(gradient, outcomes[1][name]), name
    pool = pools[1].pool
    grown_bytes = pool.total_bytes
    step(333)
    assert pool.total_bytes == grown_bytes > 0
    assert sum(buffer.numel() for buffer in pool._free) == grown_bytes, "a buffer was not returned"


def test_host_offload_frees_the_device():
    """Device memory of a step no longer holds the kept inputs of the layers."""
    peaks = {}
    for offload in ("none", "host"):
        model = tiny_model("llama", dtype=torch.bfloat16, num_hidden_layers=16, **SHAPE).cuda()
        streamgrad.enable(model, chunk_size=256, head_chunk_size=256, offload=offload)
        ids = tokens(1, 8192).cuda()
        for _ in range(2):
            model.zero_grad(set_to_none=False)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda.synchronize()
            peaks[offload] = torch.cuda.max_memory_allocated() - before
    kept_bytes = 16 * 8192 * SHAPE["hidden_size"] * 2
    assert peaks["none"] - peaks["host"] > 0.7 * kept_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_on_the_device(dtype):
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=dtype, requires_grad=True)
    weight = (0.3 * torch.randn(1001, 64, device="cuda")).to(dtype).requires_grad_()
    targets = torch.randint(0, 1001, (300,), device="cuda")
    truth = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    torch.nn.functional.cross_entropy(truth[0] @ truth[1].mT, targets).backward()
    streamgrad.linear_cross_entropy(hidden, weight, targets, chunk_size=37).backward()
    for ours, theirs in zip((hidden, weight), truth, strict=True):
        assert relative_error(ours.grad, theirs.grad) < (1e-5 if dtype == torch.float32 else 5e-3)
