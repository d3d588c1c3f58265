"""Compiled layers of plain steps: a graph for a few neighbours, which serves all of them and sequences of any length."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

import batches
import streamgrad
from batches import labelled
from gradients import assert_same_step, more, run_step
from lora import with_lora
from streamgrad.attention.backends.cudnn_plans import PlanPrices
from streamgrad.engine.layer import StreamedCall
from streamgrad.hf import compiled_layers, plain_pass, whole_attention
from streamgrad.hf.seams import attention_replaced_in
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
    compiled_layers._compiled.cache_clear()
    yield found
    compiled_layers._compiled.cache_clear()


@compiling
@pytest.mark.parametrize("whose", ["ours", "the user's"])
def test_one_graph_serves_all_layers_and_lengths(whose, graphs, monkeypatch):
    monkeypatch.setattr(StreamedCall, "__call__", None)  # no layer is run by the engine
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

    def on_a_gpu(step, *parts):
        return whole_attention.fastest_attention(replace(step, device=torch.device("cuda", 0)), *parts)

    monkeypatch.setattr(plain_pass, "fastest_attention", on_a_gpu)
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
    def by_name(step, decoder, layers):
        return attention_replaced_in([decoder.config], name)

    monkeypatch.setattr(plain_pass, "fastest_attention", by_name)
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


# --- Groups -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def group_sizes(monkeypatch):
    """How many layers each call of a graph has run, in order."""
    sizes, compiled = [], compiled_layers._compiled

    def counting(forward, count):
        sizes.append(count)
        return compiled(forward, count)

    counting.cache_clear = compiled.cache_clear
    monkeypatch.setattr(compiled_layers, "_compiled", counting)
    return sizes


@compiling
@pytest.mark.parametrize(("layers", "sizes"), [(1, [1]), (2, [2]), (5, [5]), (7, [4, 3]), (8, [4, 4]), (9, [3, 3, 3])])
def test_neighbours_run_as_one_graph(layers, sizes, graphs, group_sizes):
    model = tiny_model("qwen3", num_hidden_layers=layers)
    expected = run_step(model, labelled(12))
    streamgrad.enable(model, keep="all", compile_layers=True)
    assert_same_step(run_step(model, labelled(12)), expected, 1e-6)
    assert group_sizes == sizes and len(graphs) == len(set(sizes))


@compiling
@pytest.mark.parametrize("family", [pytest.param(family, marks=() if family == "gemma3_text" else more) for family in BY_SDPA])
@pytest.mark.parametrize("kind", ["plain", "right_padded"])
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=more)])
def test_families_in_groups(family, kind, method, graphs):
    model = tiny_model(family) if method == "full" else with_lora(tiny_model(family))
    batch = batches.KINDS[kind](model)
    expected = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    for _ in range(2):
        assert_same_step(run_step(model, batch), expected, 1e-6)


@compiling
def test_layers_of_several_kinds_are_in_groups_of_one_kind(graphs, group_sizes):
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 3 + ["full_attention"]
    model = tiny_model("gemma3_text", num_hidden_layers=8, layer_types=kinds)
    batch = labelled(12)
    expected = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == [3, 1, 3, 1] and len(graphs) == 2


@compiling
def test_every_layers_output_is_its_own(graphs, group_sizes):
    """Whoever reads hidden states between layers gets what the stock model has there, and its gradient counts."""
    model = tiny_model("qwen3", num_hidden_layers=4)
    batch = labelled(12)

    def with_all_states(model, batch):
        states = model.model(input_ids=batch["input_ids"], output_hidden_states=True, use_cache=False).hidden_states
        return sum((weight * state.square().mean() for weight, state in enumerate(states, 1)), torch.zeros(()))

    expected = run_step(model, batch, forward=with_all_states)
    streamgrad.enable(model, keep="all", compile_layers=True)
    for _ in range(2):
        assert_same_step(run_step(model, batch, forward=with_all_states), expected, 1e-6)


def between_layers(model, change):
    """Let the decoder do `change(index, hidden, layer, arguments)` in the place of each layer."""

    class Changed(type(model.model)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
            hidden = self.embed_tokens(input_ids)
            places = torch.arange(hidden.shape[1])[None]
            arguments = {"attention_mask": None, "position_ids": places, "position_embeddings": self.rotary_emb(hidden, places)}
            for index, layer in enumerate(self.layers):
                hidden = change(index, hidden, layer, arguments)
            return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))

    model.model.__class__ = Changed
    return model


def added_to(index, hidden, layer, arguments):
    return layer(hidden, **arguments) + 0.1


def changed_in_place(index, hidden, layer, arguments):
    return layer(hidden, **arguments).mul_(1.5)


def with_arguments_of_its_own(index, hidden, layer, arguments):
    cos, sin = arguments["position_embeddings"]
    return layer(hidden, **arguments | {"position_embeddings": (cos * (1 + index), sin)})


def given_by_name(index, hidden, layer, arguments):
    return layer(hidden_states=hidden, **arguments)


def left_out(index, hidden, layer, arguments):
    return hidden if index == 2 else layer(hidden, **arguments)


def run_twice(index, hidden, layer, arguments):
    return layer(layer(hidden, **arguments), **arguments)


@compiling
@pytest.mark.parametrize("change", [added_to, changed_in_place, with_arguments_of_its_own, given_by_name, left_out, run_twice])
def test_layers_that_are_called_in_another_way_run_one_by_one(change, graphs, group_sizes, caplog):
    """With the gradients of the stock model: none at all for a layer that is left out."""
    model = between_layers(tiny_model("qwen3", num_hidden_layers=4), change)
    batch = labelled(12)
    expected = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    with caplog.at_level(logging.INFO, "streamgrad"):
        assert_same_step(run_step(model, batch), expected, 1e-6)
    assert "compiled one by one from now on" in caplog.text
    group_sizes.clear()
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert set(group_sizes) == {1}


@compiling
def test_a_layer_with_a_hook_is_alone(graphs, group_sizes):
    model = tiny_model("qwen3", num_hidden_layers=4)
    batch = labelled(12)
    plain = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    assert_same_step(run_step(model, batch), plain, 1e-6)
    streamgrad.disable(model)
    handle = model.model.layers[1].register_forward_pre_hook(lambda layer, args: (2 * args[0], *args[1:]))
    hooked = run_step(model, batch)
    streamgrad.enable(model, keep="all", compile_layers=True)
    group_sizes.clear()
    assert_same_step(run_step(model, batch), hooked, 1e-6)
    assert set(group_sizes) == {1}
    handle.remove()
    group_sizes.clear()
    assert_same_step(run_step(model, batch), plain, 1e-6)
    assert group_sizes == [4]
