"""Fused norms, gated activations and rotary embeddings: their gradients, what they recognise, and whole models with them."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step, total_gradient_error
from streamgrad.hf.fusion import Fusion
from streamgrad.ops.fused import ACTIVATIONS, Norm, gated, rms_norm, rotary
from tiny import tiny_model, tokens

STOCK = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(offset):
    torch.manual_seed(0)
    x, weight = leaf(2, 3, 47), leaf(47)

    def stock(x, weight):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * (offset + weight)

    def fused(x, weight):
        return rms_norm(x, weight, Norm(1e-5, offset))

    torch.testing.assert_close(fused(x, weight), stock(x, weight), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(fused, (x, weight))
    assert torch.autograd.gradcheck(fused, (x.detach(), weight))
    assert torch.autograd.gradcheck(fused, (x.transpose(0, 2), leaf(2)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(activation):
    torch.manual_seed(0)
    gate, up = leaf(2, 3, 31), leaf(2, 3, 31)
    torch.testing.assert_close(gated(gate, up, activation), STOCK[activation](gate) * up, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda gate, up: gated(gate, up, activation), (gate, up))
    joint = leaf(3, 62)
    assert torch.autograd.gradcheck(lambda joint: gated(*joint.chunk(2, dim=-1), activation), (joint,))


@pytest.mark.parametrize("joint", [True, False])
def test_gradients_written_over_what_was_consumed(joint):
    """They are the same; a graph that is to run again keeps what it was given, and one that shares it with another is refused."""
    torch.manual_seed(0)
    source = leaf(5, 14)

    def halves() -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = (source * 1.0).chunk(2, dim=-1)
        return (gate, up) if joint else (gate.clone(), up.clone())

    expected = torch.autograd.grad(gated(*halves(), "silu").sum(), source)[0]
    gate, up = halves()
    before = gate.detach().clone(), up.detach().clone()
    out = gated(gate, up, "silu", consumed=True).sum()
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(out, source, retain_graph=True)[0], expected)
        assert torch.equal(gate, before[0]) and torch.equal(up, before[1])
    assert torch.equal(torch.autograd.grad(out, source)[0], expected)
    assert not torch.equal(gate, before[0]) and not torch.equal(up, before[1])

    gate, up = halves()
    other = gate.square().sum()  # saves the gate, and is run backward after the other
    out = gated(gate, up, "silu", consumed=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation|has been modified inplace"):
        (other + out).backward()


@pytest.mark.parametrize("keep", ["input", "all"])
@pytest.mark.parametrize("way", ["hook", "global hook", "nn.Linear.forward"])
def test_what_a_program_has_seen_is_not_written_over(way, keep, monkeypatch):
    """It may keep activations and look at them after backward."""
    model = tiny_model("llama")
    ids = torch.arange(24).reshape(1, 24)
    mlp = model.model.layers[0].mlp
    seen: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def watch(module, args, output):
        if module is mlp.gate_proj:
            seen.append(output if keep == "all" else output.detach())  # what is kept with its graph is refused else
            copies.append(output.detach().clone())
        return output

    if way == "hook":
        mlp.gate_proj.register_forward_hook(watch)
    elif way == "global hook":
        handle = nn.modules.module.register_module_forward_hook(watch)
    else:
        stock = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda module, x: watch(module, (x,), stock(module, x)))
    streamgrad.enable(model, chunk_size=8, keep=keep, fused_kernels="on")
    model(input_ids=ids, labels=ids).loss.backward()
    if way == "global hook":
        handle.remove()
    assert seen and all(torch.equal(output, copy) for output, copy in zip(seen, copies, strict=True))


@pytest.mark.parametrize("angle_rows", [1, 2])
def test_rotary(angle_rows):
    """With angles that differ in both halves, so that a swapped half shows."""
    torch.manual_seed(0)
    query, key, cos, sin = leaf(2, 3, 5, 8), leaf(2, 1, 5, 8), *torch.randn(2, angle_rows, 5, 8, dtype=torch.float64)

    def stock(x):
        turned = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
        return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)

    for ours, x in zip(rotary(query, key, cos, sin), (query, key), strict=True):
        torch.testing.assert_close(ours, stock(x), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda query, key: rotary(query, key, cos, sin), (query, key))


@pytest.mark.parametrize("frozen", [0, 1])
def test_rotary_of_a_frozen_projection_needs_no_gradient(frozen):
    torch.manual_seed(0)
    inputs, angles = [leaf(2, 3, 5, 8), leaf(2, 1, 5, 8)], torch.randn(2, 1, 5, 8, dtype=torch.float64)
    inputs[frozen].requires_grad_(False)
    outs = rotary(*inputs, *angles)
    assert [out.requires_grad for out in outs] == [bool(frozen), not frozen]
    alone = inputs[1 - frozen]
    (gradient,) = torch.autograd.grad(outs[1 - frozen].sum(), alone)
    (expected,) = torch.autograd.grad(rotary(alone, alone, *angles)[0].sum(), alone)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("frozen", [("q_proj",), ("k_proj",), ("q_proj", "k_proj"), ("k_proj", "v_proj")])
def test_frozen_projections_before_fused_rotary(frozen, keep):
    """Queries and keys share a node of the graph: the gradient of one does not depend on whether the other has one."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen) and "norm" not in name and "embed" not in name)
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7, keep=keep, fused_kernels="on")
        assert_same_step(run_step(model, batch), expected, 1e-10)


# How many norms and MLPs of a layer are fused, and whether its rotary embedding is.
RECOGNISED = {
    "llama": (3, True),
    "qwen2": (3, True),
    "qwen3": (5, True),
    "mistral": (3, True),
    "gemma2": (5, True),
    "gemma3_text": (7, True),
    "phi3": (3, False),
    "granite": (3, True),
    "smollm3": (3, True),
    "olmo2": (5, False),
    "gpt_oss": (2, False),
    "gpt_neox": (0, False),
    "cohere": (1, False),
}


@pytest.mark.parametrize("family", RECOGNISED)
def test_what_is_recognised_and_that_nothing_else_changes(family):
    """A layer whose parts are fused gives plain backpropagation's gradients, through chunks and through the ordinary graph."""
    model = tiny_model(family)
    fusion = Fusion(model.get_decoder().layers[0].modules(), mode="on")
    assert (len(fusion._forwards), bool(fusion._rotary_globals)) == RECOGNISED[family]
    batch = batches.right_padded(model)
    with no_float32():
        expected = run_step(model, batch)
        for keep, chunk_size in (("input", 7), ("attention", 7), ("all", 7)):
            streamgrad.enable(model, keep=keep, chunk_size=chunk_size, fused_kernels="on")
            assert_same_step(run_step(model, batch), expected, 1e-10)
            streamgrad.disable(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_patched_or_watched_part_is_left_alone():
    model = tiny_model("llama")
    layer = model.get_decoder().layers[0]
    layer.mlp.act_fn.register_forward_hook(lambda *_: None)
    layer.input_layernorm.forward = layer.input_layernorm.forward
    assert [module for module, _ in Fusion(layer.modules(), mode="on")._forwards] == [layer.post_attention_layernorm]
    assert not Fusion(layer.modules(), mode="off")._forwards
    assert not Fusion([nn.Linear(2, 2)], mode="on")._forwards


def test_rotary_is_put_back_when_a_layer_fails():
    layer = tiny_model("llama").get_decoder().layers[0]
    names = type(layer.self_attn).forward.__globals__
    stock = names["apply_rotary_pos_emb"]

    def fails():
        with Fusion(layer.modules(), mode="on").installed():
            assert names["apply_rotary_pos_emb"] is not stock
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert names["apply_rotary_pos_emb"] is stock


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast(dtype):
    """16-bit values are fused, as TRL's default has them, and no less exact than stock; 32-bit ones are left to transformers.

    At most 1.02 times stock's error against fp32, pooled over batches: of a single one it may be 1.06.
    """

    def forward(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**batch).loss

    squares, fused = [0.0, 0.0], []

    def noted(x, *args):  # by a function that keeps no tensor, as a mock would
        fused.append(x.shape)
        return rms_norm(x, *args)

    for seed in range(12):
        ids, model = tokens(2, 23, seed=seed), tiny_model("qwen3", dtype=torch.float32)
        batch = {"input_ids": ids, "labels": ids}
        truth = run_step(model, batch).gradients
        stock = run_step(model.to(dtype), batch, forward=forward).gradients
        streamgrad.enable(model, chunk_size=5, fused_kernels="on")
        with mock.patch("streamgrad.hf.fusion.rms_norm", noted):
            ours = run_step(model, batch, forward=forward).gradients
        assert bool(fused) == (dtype == torch.bfloat16)
        for index, gradients in enumerate((stock, ours)):
            squares[index] += total_gradient_error(gradients, truth) ** 2
    assert 0.0 < squares[1] <= 1.02**2 * squares[0]


def test_what_is_replaced_after_a_step_is_seen(monkeypatch):
    """Recognition is of functions, not of classes: another library may put its own in place at any time."""
    layer = tiny_model("llama").get_decoder().layers[0]
    names = type(layer.self_attn).forward.__globals__
    assert len(Fusion(layer.modules(), mode="on")._forwards) == 3
    monkeypatch.setattr(type(layer.input_layernorm), "forward", lambda self, x: x)
    assert [module for module, _ in Fusion(layer.modules(), mode="on")._forwards] == [layer.mlp]
    monkeypatch.setitem(names, "rotate_half", lambda x: x)
    assert not Fusion(layer.modules(), mode="on")._rotary_globals


def test_an_activation_of_ones_own_and_angles_with_a_gradient_run_as_they_are():
    class Own(nn.GELU):
        def forward(self, x):
            return 2 * x

    layer = tiny_model("llama").get_decoder().layers[0]
    layer.mlp.act_fn = Own()
    assert layer.mlp not in [module for module, _ in Fusion(layer.modules(), mode="on")._forwards]
    names = type(layer.self_attn).forward.__globals__
    x, cos, sin = leaf(1, 2, 5, 8), leaf(1, 5, 8), leaf(1, 5, 8)
    with Fusion(layer.modules(), mode="on").installed():
        names["apply_rotary_pos_emb"](x, x, cos, sin)[0].sum().backward()
    assert cos.grad is not None and sin.grad is not None


def test_two_threads_leave_the_stock_function_behind():
    layer = tiny_model("llama").get_decoder().layers[0]
    names = type(layer.self_attn).forward.__globals__
    stock, fused_seen = names["apply_rotary_pos_emb"], []
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    x, cos, sin = leaf(1, 2, 5, 8), *torch.randn(2, 1, 5, 8, dtype=torch.float64)

    def runs():
        with Fusion(layer.modules(), mode="on").installed():
            second_in.set()
            first_out.wait(10)
            fused_seen.append(type(names["apply_rotary_pos_emb"](x, x, cos, sin)[0].grad_fn).__name__)

    thread = threading.Thread(target=runs)
    with Fusion(layer.modules(), mode="on").installed():
        first_in.set()
        thread.start()
        second_in.wait(10)
    assert "Rotary" not in type(names["apply_rotary_pos_emb"](x, x, cos, sin)[0].grad_fn).__name__  # not fused for this thread
    first_out.set()
    thread.join()
    assert "Rotary" in fused_seen[0] and names["apply_rotary_pos_emb"] is stock


# --- The Triton kernels against the torch code on the same device ----------------------------------------------------------

on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ERROR = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}


def compare_on_cuda(function, operands, dtype):
    """Values and gradients of `function` in `dtype` on CUDA against float64 on CPU."""
    inputs = [operand.detach().to("cuda", dtype).requires_grad_() for operand in operands]
    exact = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    out, truth = function(*inputs), function(*exact)
    dout = torch.randn_like(truth)
    out.backward(dout.to("cuda", dtype))
    truth.backward(dout.to(dtype).double())
    for ours, theirs in [(out, truth), *((a.grad, b.grad) for a, b in zip(inputs, exact, strict=True))]:
        assert ours.isfinite().all()
        error = (ours.detach().cpu().double() - theirs).norm() / theirs.norm()
        assert error < ERROR[dtype], error


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("shape", [(3, 47, 31), (1, 513, 128), (700, 2560), (1, 123, 5, 256), (2, 9, 8192)])
class TestKernels:
    pytestmark = on_cuda

    def test_norm(self, shape, dtype):
        torch.manual_seed(0)
        compare_on_cuda(lambda x, w: rms_norm(x, w, Norm(1e-6, 1.0)), (torch.randn(shape), torch.randn(shape[-1])), dtype)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_gated(self, shape, dtype, activation):
        torch.manual_seed(0)
        compare_on_cuda(lambda g, u: gated(g, u, activation), (torch.randn(shape), torch.randn(shape)), dtype)
        joint = torch.randn(*shape[:-1], 2 * shape[-1])
        compare_on_cuda(lambda joint: gated(*joint.chunk(2, dim=-1), activation), (joint,), dtype)


@pytest.mark.parametrize("dtype", list(ERROR))
@pytest.mark.parametrize("shape", [(1, 37, 32, 128), (2, 9, 6, 64), (3, 5, 1, 80)])
class TestRotaryKernel:
    pytestmark = on_cuda

    @pytest.mark.parametrize("shared_angles", [False, True])
    @pytest.mark.parametrize("key_heads", [1, 3])
    def test_rotary(self, shape, dtype, shared_angles, key_heads):
        torch.manual_seed(0)
        batch, length, _, size = shape
        cos, sin = torch.randn(2, 1 if shared_angles else batch, length, size)

        def turned(query_BLHD, key_BLGD):
            angles = [angle.to(query_BLHD.device, query_BLHD.dtype) for angle in (cos.to(dtype), sin.to(dtype))]
            return rotary(query_BLHD.transpose(1, 2), key_BLGD.transpose(1, 2), *angles)

        operands = torch.randn(shape), torch.randn(batch, length, key_heads, size)
        compare_on_cuda(lambda query, key: torch.cat(turned(query, key), dim=1), operands, dtype)
        # The gradient of one alone.
        compare_on_cuda(lambda query: turned(query, operands[1].to(query))[0], operands[:1], dtype)
        compare_on_cuda(lambda key: turned(operands[0].to(key), key)[1], operands[1:], dtype)
