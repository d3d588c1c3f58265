"""The attention of steps whose layers run whole: which kernel a step or a call takes, and that it is the stock one's."""

from __future__ import annotations

import copy
import functools
import math
import threading
import types
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import batches
import streamgrad
from batches import labelled
from gradients import assert_same_step, more, no_float32, run_step, total_gradient_error
from lora import with_lora
from streamgrad.attention import backends
from streamgrad.attention.backends import backends_named
from streamgrad.hf.whole import attention as whole_attention
from streamgrad.hf.whole_step import WholeStep
from tiny import BY_SDPA, tiny_model
from two_kernels import two_kernels


def kernels_of(step: WholeStep):
    model = tiny_model("qwen3")
    return whole_attention.fastest_attention(step, model.model, model.model.layers, backends_named("auto"))


def a_step(**facts) -> WholeStep:
    return replace(WholeStep("manner", 2, 100, torch.device("cuda", 0), masked=False, compiled=False), **facts)


# --- One kernel for a step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("is_worth", "masked"), [(True, False), (False, False), (True, True)])
def test_cudnn_comes_first_where_it_is_worth_its_plan(is_worth, masked, monkeypatch):
    """Whatever takes part in the choice is told here, as there is no GPU; kernels are chosen by torch."""
    asked = []
    monkeypatch.setattr(
        whole_attention.PRICES, "is_worth_in_step", lambda shape, flops: not asked.append((shape, flops)) and is_worth
    )
    with kernels_of(a_step(masked=masked)):
        first = torch._C._get_sdp_priority_order()[0]
    assert first == int(SDPBackend.CUDNN_ATTENTION if is_worth else SDPBackend.FLASH_ATTENTION)
    ((_, flops),) = asked
    assert flops == 2 * 14 * 2 * 4 * 8 * 100**2 / 2  # layers, FLOPs a pair, rows, heads, their size, pairs


@pytest.mark.parametrize("sequence", [100, 100_000])
def test_flash_comes_first_where_it_is_flash_attention_4(sequence, monkeypatch):
    """Which is faster than cuDNN: nothing is counted for a plan."""
    monkeypatch.setattr(whole_attention, "flash_implementation", lambda: "FA4")
    monkeypatch.setattr(whole_attention.PRICES, "is_worth_in_step", None)
    with kernels_of(a_step(sequence=sequence)):
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)


def test_long_steps_leave_no_plan_to_calls_of_the_stock_function():
    with kernels_of(a_step(sequence=100_000)):
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)


# --- A kernel for each call, in long steps -----------------------------------------------------------------------------------


@pytest.fixture
def long_steps(monkeypatch):
    """Every step is taken for a long one on a GPU with cuDNN; the list has a call of `sdpa_attention_forward` each."""
    fastest, calls = whole_attention.fastest_attention, []
    two_kernels(monkeypatch, lambda backward: True)

    def stock(*args, **kwargs):
        calls.append(kwargs)
        return sdpa_attention_forward(*args, **kwargs)

    def on_a_gpu(step, *parts):
        return fastest(replace(step, device=torch.device("cuda", 0), masked=False), *parts)

    monkeypatch.setattr(whole_attention, "fastest_attention", on_a_gpu)
    monkeypatch.setattr(whole_attention, "is_planned_by_call", lambda flops: True)
    monkeypatch.setattr(whole_attention, "sdpa_attention_forward", stock)
    return calls


FEW = [
    ("qwen3", "plain"),
    ("qwen3", "left_padded"),
    ("mistral", "right_padded"),
    ("gemma3_text", "plain"),
    ("qwen3_moe", "plain"),
]
REST = [(family, kind) for family in BY_SDPA for kind in ("plain", "right_padded", "packed") if (family, kind) not in FEW]


@pytest.mark.parametrize(("family", "kind"), [*FEW, *(pytest.param(*case, marks=more) for case in REST)])
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=more)])
def test_long_steps_are_the_stock_models(family, kind, method, long_steps):
    model = tiny_model(family) if method == "full" else with_lora(tiny_model(family))
    batch = batches.KINDS[kind](model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, keep="all")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    # By the stock function with a mask, also a window's, and with values of another head size than keys.
    assert bool(long_steps) == (kind != "plain" or family in ("gemma3_text", "mistral", "deepseek_v3"))
    assert model.config._attn_implementation == "sdpa"


def test_forward_and_backward_of_a_long_step_may_run_on_different_kernels(long_steps, monkeypatch):
    """As where the plan for forward is not made before the device has work."""
    forward_calls = []
    log = two_kernels(monkeypatch, lambda backward: backward or (not forward_calls.append(1) and len(forward_calls) > 1))
    model = tiny_model("qwen3")
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, keep="all")
        assert_same_step(run_step(model, batch), expected, 1e-10)
        assert [call[:2] for call in log] == [("flash", False), ("cudnn", False), ("cudnn", True), ("cudnn", True)]
        assert streamgrad.status(model).kernels == ("cudnn", "flash")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert not long_steps


def twice(model, batch):
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    return loss


def frozen_but_for_the_last(model):
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)


CHANGES = {
    "dropout": lambda model: setattr(model.model.layers[1].self_attn, "attention_dropout", 0.4),
    "a layer that is not causal": lambda model: setattr(model.model.layers[1].self_attn, "is_causal", False),
    "a scale": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.7),
    "frozen layers": frozen_but_for_the_last,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("run", [None, twice])
def test_what_stock_attention_acts_on(change, run, long_steps):
    """Whatever no kernel is chosen for is left to the stock function, layer by layer."""
    model = tiny_model("llama").train()
    CHANGES[change](model)
    batch = batches.plain(model)
    with no_float32():
        torch.manual_seed(3)
        expected = run_step(model, batch, forward=run)
        streamgrad.enable(model, keep="all")
        torch.manual_seed(3)
        assert_same_step(run_step(model, batch, forward=run), expected, 1e-10)
    assert len(long_steps) == (1 if change in ("dropout", "a layer that is not causal") else 0)


def test_a_long_step_under_autocast(long_steps, monkeypatch):
    """Its kernels get 16 bits, and its error against float32 is that of the stock model."""
    log, squares = two_kernels(monkeypatch, lambda backward: True), {}
    for seed in range(4):
        model = tiny_model("qwen3", dtype=torch.float32, seed=seed)
        batch = labelled(40)
        truth = run_step(model, batch).gradients
        for side in ("stock", "ours"):
            if side == "ours":
                streamgrad.enable(model, keep="all", fused_kernels="off")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                error = total_gradient_error(run_step(model, batch).gradients, truth)
            squares[side] = squares.get(side, 0.0) + error**2
    assert math.sqrt(squares["ours"] / squares["stock"]) <= 1.02, squares
    assert {name for name, *_ in log} == {"cudnn"} and not long_steps


def test_attention_that_a_user_has_put_in_the_place_of_sdpa_is_called(long_steps, monkeypatch):
    """It was put there after steps through the engine, which refuses it."""
    calls = []

    def own(module, query, key, value, mask, **options):
        calls.append(1)
        return sdpa_attention_forward(module, query * 1.5, key, value, mask, **options)

    model = tiny_model("qwen3")
    batch = batches.plain(model)
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    streamgrad.enable(model, keep="all")
    run_step(model, batch)
    try:
        AttentionInterface.register("sdpa", own)
        ours = run_step(model, batch)
        streamgrad.disable(model)
        assert_same_step(ours, run_step(model, batch), 1e-6)
    finally:
        AttentionInterface.register("sdpa", before)
    assert calls


def test_transforms_get_the_stock_function(long_steps):
    model = tiny_model("qwen3")
    query, key = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    attention = model.model.layers[0].self_attn
    with whole_attention.fastest_attention(a_step(), model.model, model.model.layers, backends_named("auto")):
        torch.func.grad(lambda q: whole_attention._attend_by_call(attention, q, key, key, None)[0].sum())(query)
        assert len(long_steps) == 1
        whole_attention._attend_by_call(attention, query, key, key, None)
    assert len(long_steps) == 1


def names_its_mask(model):
    """As afmoe's attention does."""

    def by_name(module, query, key, value, mask, **options):
        return ALL_ATTENTION_FUNCTIONS[module.config._attn_implementation](
            module, query, key, value, attention_mask=mask, **options
        )

    for layer in model.model.layers:
        code = type(layer.self_attn).forward
        interface = types.SimpleNamespace(get_interface=lambda *_: by_name)
        around = types.FunctionType(
            code.__code__, code.__globals__ | {"ALL_ATTENTION_FUNCTIONS": interface}, closure=code.__closure__
        )
        around.__kwdefaults__, around.__defaults__ = code.__kwdefaults__, code.__defaults__
        layer.self_attn.forward = types.MethodType(around, layer.self_attn)


def checkpoints_within(model):
    model.config.use_cache = False
    for layer in model.model.layers:
        inner = layer.self_attn.forward
        layer.self_attn.forward = functools.partial(checkpoint, inner, use_reentrant=False)


def compiles_a_module(model):
    model.model.layers[1].self_attn.compile(fullgraph=True, backend="aot_eager")


def has_a_layer_of_its_own_configuration(model):
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"
    model.model.layers[0].self_attn.config = config


def has_heads_that_cudnn_does_not_take(model):
    for kernel in backends._ALL:
        if kernel.name == "cudnn":
            kernel.refusal = lambda *_: "of 192"


# torch.compile reads .grad of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("change", "calls", "kernels"),
    [
        (names_its_mask, 0, ("cudnn",)),
        (checkpoints_within, 2, ("sdpa",)),
        (compiles_a_module, 1, ("cudnn",)),  # which is traced, and not seen to run
        (has_a_layer_of_its_own_configuration, 0, ("cudnn",)),
        (has_heads_that_cudnn_does_not_take, 2, ("sdpa",)),
    ],
)
def test_layers_that_their_user_has_changed(change, calls, kernels, long_steps):
    model = tiny_model("llama")
    change(model)
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, keep="all", fused_kernels="off")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert (len(long_steps), streamgrad.status(model).kernels) == (calls, kernels)


def test_two_models_of_one_configuration_in_two_threads(long_steps):
    """One of which takes its steps in chunks, while the other is between two layers of a long one."""
    first = tiny_model("llama")
    second = copy.deepcopy(first, {id(first.config): first.config})
    batch = batches.plain(first)
    with no_float32():
        expected = [run_step(model, batch) for model in (first, second)]
        streamgrad.enable(first, keep="all")
        streamgrad.enable(second, keep="input", chunk_size=3)
        found = []

        def meanwhile(*_):
            thread = threading.Thread(target=lambda: found.append(run_step(second, batch)))
            thread.start()
            thread.join()

        handle = first.model.layers[0].register_forward_hook(meanwhile)
        assert_same_step(run_step(first, batch), expected[0], 1e-10)
        handle.remove()
        assert_same_step(found[0], expected[1], 1e-10)
    assert first.config._attn_implementation == "sdpa" and not long_steps
