"""Compiled layers of plain steps: one graph serves all of them, and sequences of any length."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import batches
import streamgrad
from batches import labelled
from gradients import assert_same_step, more, run_step
from lora import with_lora
from streamgrad.attention.backends.cudnn_plans import PlanPrices
from streamgrad.hf import decoder
from streamgrad.hf.seams import attention_replaced_in
from streamgrad.hf.whole import attention as whole_attention
from streamgrad.hf.whole import compiled_layers
from tiny import BY_SDPA, tiny_model

# torch.compile reads .grad of tensors that are no leaves.
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are compiled, by a backend that runs them as they are."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph.forward

    monkeypatch.setattr(compiled_layers, "_BACKEND", backend)
    torch._dynamo.reset()
    caches = compiled_layers._compiled, compiled_layers._compiled_in_turn
    for each in caches:
        each.cache_clear()
    yield found
    for each in caches:
        each.cache_clear()


@compiling
@pytest.mark.parametrize("whose", ["ours", "the user's"])
def test_one_graph_serves_all_layers_and_lengths(whose, graphs, monkeypatch):
    monkeypatch.setattr(decoder, "run_layer", None)  # no layer is run by the engine
    model = tiny_model("qwen3", num_hidden_layers=4)
    lengths = (16, 23, 40)
    expected = [run_step(model, labelled(length)) for length in lengths]
    if whose == "the user's":
        for layer in model.model.layers:
            layer.compile(backend=compiled_layers._BACKEND, dynamic=True)
    streamgrad.enable(model, keep="all", compile_layers=whose == "ours")
    for length, step in zip(lengths, expected, strict=True):
        assert_same_step(run_step(model, labelled(length)), step, 1e-6)  # stock losses are made in float32
    assert len(graphs) == 1
    assert (streamgrad.status(model).compile_seconds is not None) == (whose == "ours")


@compiling
def test_compiled_layers_have_a_graph_for_either_kernel(graphs, monkeypatch):
    """Flash at first, whatever the length, and cuDNN from the third long step in a row of one length on."""

    fastest_attention = whole_attention.fastest_attention

    def on_a_gpu(step, *parts):
        return fastest_attention(replace(step, device=torch.device("cuda", 0)), *parts)

    monkeypatch.setattr(whole_attention, "fastest_attention", on_a_gpu)
    monkeypatch.setattr(whole_attention, "PRICES", PlanPrices())
    a_pair = whole_attention.FLASH_LOSS * 14 * 4 * 8 / 2  # seconds that a pair of a query and a key loses, in 4 heads of 8
    monkeypatch.setattr(whole_attention, "GRAPH_SECONDS", a_pair * 30**2)
    model = tiny_model("qwen3")
    lengths = (16, 16, 16, 16, 40, 40, 50, 40, 40, 40, 23, 40)
    expected = {length: run_step(model, labelled(length)) for length in set(lengths)}
    streamgrad.enable(model, keep="all", compile_layers=True)
    made = []
    for length in lengths:
        assert_same_step(run_step(model, labelled(length)), expected[length], 1e-6)
        made.append(len(graphs))
    assert made == [1] * 9 + [2] * 3
    texts = [graph.print_readable(print_output=False) for graph in graphs]
    assert [text.index("FLASH_ATTENTION") < text.index("CUDNN_ATTENTION") for text in texts] == [True, False]
    assert model.config._attn_implementation == "sdpa"


@compiling
@pytest.mark.parametrize("kind", ["plain", "right_padded"])  # the latter has a mask
@pytest.mark.parametrize("name", ["streamgrad-cudnn", "streamgrad-fa"])
def test_attention_of_compiled_layers(name, kind, graphs, monkeypatch):
    def by_name(step, decoder, layers, kernels):
        return attention_replaced_in([decoder.config], name)

    monkeypatch.setattr(whole_attention, "fastest_attention", by_name)
    model = tiny_model("qwen3")
    batch = batches.KINDS[kind](model)
    expected = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert len(graphs) == 1 and "CUDNN_ATTENTION" in graphs[0].print_readable(print_output=False)


@compiling
def test_a_model_without_a_working_compiler_runs_as_it_is(monkeypatch, graphs):
    def fails(graph, inputs):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(compiled_layers, "_BACKEND", fails)
    model = tiny_model("qwen3")
    batch = batches.plain(model)
    expected = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    with pytest.warns(RuntimeWarning, match="not compiled from now on.*no C compiler"):
        assert_same_step(run_step(model, batch), expected, 1e-6)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert "forward" not in model.model.layers[0].__dict__


@compiling
@pytest.mark.parametrize("family", [pytest.param(family, marks=() if family == "gemma3_text" else more) for family in BY_SDPA])
@pytest.mark.parametrize("kind", ["plain", "right_padded"])
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=more)])
def test_compiled_families(family, kind, method, graphs):
    model = tiny_model(family) if method == "full" else with_lora(tiny_model(family))
    batch = batches.KINDS[kind](model)
    expected = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    for _ in range(2):
        assert_same_step(run_step(model, batch), expected, 1e-6)


def doubling(module, args, output):
    return 2 * output


@compiling
@pytest.mark.parametrize("path", ["", "mlp", "self_attn.q_proj"])
def test_a_hook_of_a_later_step_is_seen(path, graphs):
    """In the layer that has it, and in no other: graphs are made anew for it, and the first serves again when it is gone."""
    model = tiny_model("qwen3", num_hidden_layers=3)
    part, batch = model.model.layers[1].get_submodule(path), labelled(12)
    plain = run_step(model, batch)
    handle = part.register_forward_hook(doubling)
    hooked = run_step(model, batch)
    handle.remove()
    streamgrad.enable(model, keep="all", compile_layers=True)
    assert_same_step(run_step(model, batch), plain, 1e-6)
    handle = part.register_forward_hook(doubling)
    assert_same_step(run_step(model, batch), hooked, 1e-6)
    handle.remove()
    assert_same_step(run_step(model, batch), plain, 1e-6)
    assert len(graphs) <= 3


@compiling
@pytest.mark.parametrize("path", ["mlp", "self_attn", "input_layernorm"])
@pytest.mark.parametrize("options", [{}, {"chunk_size": 5}, {"chunk_size": 64, "keep": "input"}], ids=str)
def test_modules_inside_of_layers_that_the_user_has_compiled(path, options):
    """Their graphs give memory away in backward, so one runs backward once; and dynamo may not look into what streams."""

    def model():
        found = tiny_model("llama")
        for layer in found.model.layers:
            layer.get_submodule(path).compile(backend="aot_eager")
        return found

    torch._dynamo.reset()
    stock, streamed = model(), streamgrad.enable(model(), **options)
    for length in (24, 17):
        batch = labelled(length)
        assert_same_step(run_step(streamed, batch), run_step(stock, batch), 1e-6)  # stock losses are made in float32
