"""Backward leaves out the products that nothing reads, and gradients and refusals are as with them.

All of this is about a layer's second step and later ones: its first re-run finds out which products these are.
"""

from __future__ import annotations

import functools
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import batches
import streamgrad
from faults import Hook
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from products import later_step
from streamgrad.engine import unread
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops import fused
from tiny import FAMILIES, tiny_model, tokens

DOWN = (40, 24)  # the shape of `down_proj` as torch multiplies by it


def steps_without_and_with(monkeypatch, family, **options):
    """The products of a later step in which none is deferred, and of one in which some are."""
    steps = []
    for fewest in (10**9, 0):
        monkeypatch.setitem(unread._FEWEST_TOKENS, "cpu", fewest)
        steps.append(later_step(streamgrad.enable(tiny_model(family), head_chunk_size=5, **options)))
    return steps


@pytest.mark.parametrize("chunk_size", [7, 21])
@pytest.mark.parametrize("keep", ["input", "attention"])
def test_the_last_product_of_a_layer_is_not_run_again(keep, chunk_size, monkeypatch):
    without, deferred = steps_without_and_with(monkeypatch, "llama", chunk_size=chunk_size, keep=keep)
    assert deferred[0] == without[0]  # forward
    assert without[1] - deferred[1] == {DOWN: 2 * 21 // chunk_size}  # one a chunk, of two layers
    assert not deferred[1] - without[1]


@pytest.mark.parametrize(("family", "left_out"), [("qwen3", 1), ("phi3", 1), ("gemma2", 0), ("olmo2", 0), ("granite", 0)])
def test_a_product_that_is_read_is_computed(family, left_out, monkeypatch):
    """Gemma and Olmo normalise it, Granite scales it."""
    without, deferred = steps_without_and_with(monkeypatch, family, chunk_size=21)
    assert sum((without[1] - deferred[1]).values()) == 2 * left_out
    assert not deferred[1] - without[1]


@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_later_steps(family, keep, adapted):
    def model():
        return with_lora(tiny_model(family)) if adapted else tiny_model(family)

    batch = batches.plain(None)
    streamed = streamgrad.enable(model(), chunk_size=7, head_chunk_size=5, keep=keep)
    with no_float32():
        expected = run_step(model(), batch)
        for _ in range(3):
            assert_same_step(run_step(streamed, batch), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_later_steps_under_autocast_are_those_of_the_first(dtype):
    """But for a rounding in 16 bits, of products that a processor may sum in another order where memory lies otherwise."""
    model = streamgrad.enable(tiny_model("llama", dtype=torch.float32), chunk_size=7, head_chunk_size=5)
    steps = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=dtype):
            steps.append(run_step(model, batches.plain(None)))
    for step in steps[1:]:
        assert_same_step(step, steps[0], 2**-8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("chunk_size", [512, 4096])
def test_gradients_of_later_steps_on_a_gpu_are_those_of_the_first(chunk_size, keep):
    """But for the order in which kernels add. Chunks of fewer than 2,048 tokens make every product."""
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "head_dim": 64}
    model = tiny_model("llama", dtype=torch.bfloat16, **shape).cuda()
    streamgrad.enable(model, chunk_size=chunk_size, keep=keep)
    ids = tokens(1, 4096).cuda()
    steps = [run_step(model, {"input_ids": ids, "labels": ids}) for _ in range(3)]
    for step in steps[1:]:
        assert_same_step(step, steps[0], 2e-2)


# --- who watches, and what changes in between --------------------------------------------------------------------------------


def warm_model():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=7, head_chunk_size=5)
    # Of each chunk of two layers the gradients of two maps in the other direction, and none of the re-run.
    assert later_step(model)[1][DOWN] == 2 * 2 * 3
    return model


def test_the_first_backward_writes_over_the_widest_tensors_too(monkeypatch):
    """As later ones do: to note which products are read must not double what a chunk of an MLP holds."""
    written, backward = [], fused.gated_backward

    def watched(*args, in_place, **kwargs):
        written.append(in_place)
        return backward(*args, in_place=in_place, **kwargs)

    monkeypatch.setattr(fused, "gated_backward", watched)
    model = streamgrad.enable(tiny_model("llama"), chunk_size=16, keep="input", fused_kernels="on")
    ids = tokens(1, 32)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss  # which tries the layers before its first step
        written.clear()
        loss.backward()
        assert written == 2 * model.config.num_hidden_layers * [True]


@pytest.mark.parametrize("place", ["mlp", "mlp.down_proj"])
def test_a_hook_is_given_an_ordinary_tensor(place):
    model, seen = warm_model(), []
    for layer in model.model.layers:
        layer.get_submodule(place).register_forward_hook(lambda module, args, out: seen.append(type(out)))
    expected = tiny_model("llama")
    with no_float32():
        assert_same_step(run_step(model, batches.plain(None)), run_step(expected, batches.plain(None)), 1e-10)
    assert set(seen) == {Tensor}


def some_tokens_doubled(module, args, out):
    return torch.where(out[..., :1] > 0.0, 2.0 * out, out)


@pytest.mark.parametrize("place", ["mlp", "mlp.down_proj", "mlp.up_proj"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_hook_that_acts_in_one_pass_only_is_refused(when, place):
    model = warm_model()
    hook = Hook(model.model.layers[1].get_submodule(place), some_tokens_doubled, on=when == "forward")
    loss = model(**batches.plain(None)).loss
    hook.on = not hook.on
    with pytest.raises(RuntimeError, match="computed something else"):
        loss.backward()


def test_weights_of_the_last_product_that_are_written_to_unseen_are_refused():
    model = warm_model()
    loss = model(**batches.plain(None)).loss
    model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5)
    with pytest.raises(RuntimeError, match="computed something else|modified in place"):
        loss.backward()


def test_an_activation_that_changes_for_one_token_is_refused(monkeypatch):
    """Not the last one, so that it is seen by the sum of all. What a class has is not put back for the run again."""
    model = warm_model()
    kind = type(model.model.layers[0].mlp.act_fn)
    loss, own = model(**batches.plain(None)).loss, kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: torch.cat([own(self, x[:, :1]) + 0.5, own(self, x[:, 1:])], dim=1))
    with pytest.raises(RuntimeError, match="computed something else"):
        loss.backward()


def test_a_product_in_float32_is_computed(monkeypatch):
    """Where TF32 is allowed, sums of tokens would differ by what is taken for a change."""
    steps = []
    for fewest in (10**9, 0):
        monkeypatch.setitem(unread._FEWEST_TOKENS, "cpu", fewest)
        steps.append(later_step(streamgrad.enable(tiny_model("llama", dtype=torch.float32), chunk_size=7, head_chunk_size=5)))
    assert steps[0] == steps[1]


def test_two_forwards_before_their_backward_passes():
    """The first forward ran before anything was known of the layers, and its re-run after."""
    model, batch = streamgrad.enable(tiny_model("llama"), chunk_size=7, head_chunk_size=5), batches.plain(None)
    with no_float32():
        expected = run_step(tiny_model("llama"), batch)
        first, second = model(**batch).loss, model(**batch).loss
        model.zero_grad()
        second.backward()
        model.zero_grad()
        first.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_step(type(expected)(first.detach(), gradients), expected, 1e-10)


def test_the_input_of_the_product_is_not_held_through_backward(monkeypatch):
    def peak() -> int:
        model = tiny_model("llama", hidden_size=32, intermediate_size=512)
        streamgrad.enable(model, chunk_size=64, head_chunk_size=16)
        ids = tokens(1, 256)
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        loss = model(input_ids=ids, labels=ids).loss
        with LiveBytes() as live:
            loss.backward()
        return live.peak_bytes

    deferred = peak()
    monkeypatch.setitem(unread._FEWEST_TOKENS, "cpu", 10**9)
    assert deferred < peak() + 2 * 64 * 512  # a quarter of that input; what is compared takes some bytes more


# --- what norms would not tell, and what layers may do --------------------------------------------------------------------------


def turned_round(x: Tensor) -> Tensor:
    return -x


def in_other_places(x: Tensor) -> Tensor:
    return x.flip(1)


def by_other_features(x: Tensor) -> Tensor:
    return x.roll(1, dims=-1)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", [turned_round, in_other_places, by_other_features])
def test_a_change_that_keeps_all_norms_is_refused(change, layer):
    """The product's input changes in all tokens but the last, which is compared by itself."""

    def changed(module, args):
        return (torch.cat([change(args[0][:, :-1]), args[0][:, -1:]], dim=1),)

    model = warm_model()
    hook = Hook(model.model.layers[layer].mlp.down_proj, changed, before=True)
    loss = model(**batches.plain(None)).loss
    hook.on = True
    with pytest.raises(RuntimeError, match="computed something else"):
        loss.backward()


def test_autocast_around_backward_alone_is_not_taken_for_a_change():
    model = streamgrad.enable(tiny_model("llama", dtype=torch.float32), chunk_size=7, head_chunk_size=5)
    for _ in range(4):
        loss = model(**batches.plain(None)).loss
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()


class OddMlp(nn.Module):
    """A gated MLP that does something else with one of its products."""

    def __init__(self, mlp: nn.Module, use: str) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.use = mlp.gate_proj, mlp.up_proj, mlp.down_proj, use
        generator = torch.Generator().manual_seed(0)
        weight = 0.1 * torch.randn(40, 40, dtype=torch.complex128, generator=generator)
        self.turn = nn.Linear(40, 40, bias=False, dtype=torch.complex128) if use == "complex" else None
        if self.turn is not None:
            self.turn.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        assert type(gate) is Tensor and gate.data_ptr() != 0  # so that a kernel may be given it
        inner = F.silu(gate) * self.up_proj(x)
        if self.turn is not None:
            turned = self.turn(torch.complex(inner, inner.roll(1, dims=-1)))
            inner = turned.real + 0.3 * turned.imag
        out = self.down_proj(inner)
        if self.use == "gradient inside":
            with torch.enable_grad():
                leaf = inner.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.down_proj(leaf).square().sum(), leaf)
            return out + gradient[..., : x.shape[-1]]
        if self.use == "numpy" and not out.requires_grad:
            assert out.numpy().shape == out.shape
        if self.use == "data":
            total = out + x * 1.0
            out.data.zero_()
            return total
        return out


@pytest.mark.filterwarnings("ignore:Casting complex values")  # by the trial of chunks
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chunk_size", [7, 64])
@pytest.mark.parametrize("use", ["plain", "complex", "gradient inside", "numpy", "data"])
def test_layers_that_do_something_else_with_a_product(use, chunk_size, frozen):
    def model():
        built = tiny_model("llama")
        for layer in built.model.layers:
            layer.mlp = OddMlp(layer.mlp, use).requires_grad_(not frozen)
        return built

    streamed = streamgrad.enable(model(), chunk_size=chunk_size, head_chunk_size=5)
    with no_float32():
        expected = run_step(model(), batches.plain(None))
        for _ in range(4):
            assert_same_step(run_step(streamed, batches.plain(None)), expected, 1e-10)


def test_a_layer_that_its_linear_map_holds_on_to_is_released():
    model = warm_model()
    layers = [weakref.ref(layer) for layer in model.model.layers]
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(functools.partial(lambda layer, module, args: None, layer))
    model(**batches.plain(None)).loss.backward()
    del model, layer
    gc.collect()
    assert [layer() for layer in layers] == [None, None]
