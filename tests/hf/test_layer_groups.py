"""Neighbouring layers compiled as one graph, where nothing can see what goes from one to the next, and one by one elsewhere."""

from __future__ import annotations

import functools
import logging
import sys
import types

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.nn.modules.module import register_module_forward_hook
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3Model, Qwen3RMSNorm

import streamgrad
from batches import labelled
from gradients import assert_same_step, run_step
from streamgrad.hf.whole import compiled_layers, layer_groups
from streamgrad.hf.whole.layer_groups import CalledOtherwise, LayerGroups
from tiny import tiny_model

# torch.compile reads .grad of tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

COMPILE = torch.compile


@pytest.fixture(autouse=True)
def group_sizes(monkeypatch):
    """How many layers each call of what would be a graph has run, in order; nothing is compiled, which takes seconds a graph."""
    sizes, alone, together = [], compiled_layers._compiled_alone, compiled_layers._compiled_together

    def counting_one(layer):
        def run(*args, **kwargs):
            sizes.append(1)
            return alone(layer)(*args, **kwargs)

        return run

    def counting_all(layers):
        sizes.append(len(layers))
        return together(layers)

    monkeypatch.setattr(compiled_layers, "_compiled_alone", counting_one)
    monkeypatch.setattr(compiled_layers, "_compiled_together", counting_all)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    forget_graphs()
    yield sizes
    forget_graphs()


@pytest.fixture
def graphs(group_sizes, monkeypatch):
    """Let layers be compiled all the same, to graphs with the autograd of real compilers, one node each."""
    monkeypatch.setattr(torch, "compile", COMPILE)
    monkeypatch.setattr(compiled_layers, "_BACKEND", "aot_eager")


def forget_graphs():
    torch._dynamo.reset()
    compiled_layers._compiled.cache_clear()
    compiled_layers._compiled_in_turn.cache_clear()


def compiled_model(model):
    return streamgrad.enable(model, keep="all", compile_layers=True)


@pytest.mark.parametrize(("layers", "sizes"), [(1, [1]), (2, [2]), (5, [5]), (7, [4, 3]), (8, [4, 4]), (9, [3, 3, 3])])
def test_neighbours_run_as_one_graph(layers, sizes, group_sizes):
    model, batch = tiny_model("qwen3", num_hidden_layers=layers), labelled(12)
    expected = run_step(model, batch)
    compiled_model(model)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == sizes


@pytest.mark.parametrize("is_compiled", [True, False])
def test_layers_of_several_kinds_are_in_groups_of_one_kind(is_compiled, group_sizes, request):
    if is_compiled:
        request.getfixturevalue("graphs")
    kinds = [*["sliding_attention"] * 2, "full_attention"] * 2
    model, batch = tiny_model("gemma3_text", num_hidden_layers=6, layer_types=kinds), labelled(12)
    expected = run_step(model, batch)
    compiled_model(model)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == [2, 1, 2, 1]


# --- What can be seen between layers ----------------------------------------------------------------------------------------


def norms_of_gradients(model, batch, seen):
    """The norms of the gradients of the tensors that a step puts into `seen`."""
    seen.clear()
    loss = model(**batch).loss
    for tensor in seen:
        tensor.retain_grad()
    loss.backward()
    return [float(tensor.grad.norm()) for tensor in seen]


@pytest.mark.parametrize("when", ["before", "after"])  # the first compiled step
@pytest.mark.parametrize("where", ["part", "layer", "all modules"])
def test_hooks_see_every_layers_tensors_and_their_gradients(where, when, group_sizes, request):
    if (where, when) == ("layer", "after"):
        request.getfixturevalue("graphs")
    seen, handles = [], []

    def look_at_input(module, args):
        seen.append(args[0])

    def look_at_output(module, args, output):
        if isinstance(module, Qwen3DecoderLayer):
            seen.append(output)

    def add_hooks():
        if where == "all modules":
            handles.append(register_module_forward_hook(look_at_output))
        elif where == "layer":
            handles.extend(layer.register_forward_hook(look_at_output) for layer in model.model.layers)
        else:
            handles.extend(layer.input_layernorm.register_forward_pre_hook(look_at_input) for layer in model.model.layers)

    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12)
    add_hooks()
    expected = norms_of_gradients(model, batch, seen)
    try:
        if when == "after":
            while handles:
                handles.pop().remove()
        compiled_model(model)
        if when == "after":
            run_step(model, batch)
            assert group_sizes == [4]
            add_hooks()
        group_sizes.clear()
        torch.testing.assert_close(norms_of_gradients(model, batch, seen), expected, rtol=1e-6, atol=0.0)
        assert len(expected) == 4 and set(group_sizes) == {1}
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.usefixtures("graphs")
def test_layers_above_a_hidden_state_that_is_read_have_no_gradient():
    """As in the stock model, where an optimizer passes over them; with zeros it would not."""
    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12)

    def of_the_middle(model, batch):
        outputs = model.model(input_ids=batch["input_ids"], output_hidden_states=True, use_cache=False)
        return outputs.hidden_states[2].square().mean()

    expected = run_step(model, batch, forward=of_the_middle)
    assert expected.gradients["model.layers.3.mlp.up_proj.weight"] is None
    compiled_model(model)
    for _ in range(2):
        assert_same_step(run_step(model, batch, forward=of_the_middle), expected, 1e-6)


class Doubling(Qwen3DecoderLayer):
    def forward(self, hidden_states, **kwargs):
        return 2 * super().forward(hidden_states, **kwargs)


class Keeping(Qwen3RMSNorm):
    def forward(self, hidden_states):
        self.kept = hidden_states
        return super().forward(hidden_states)


def with_class(layer, monkeypatch):
    layer.__class__ = Doubling


def with_own_forward(layer, monkeypatch):
    layer.forward = functools.partial(Doubling.forward, layer)
    layer.__class__ = Doubling


def with_own_forward_of_a_part(layer, monkeypatch):
    layer.input_layernorm.forward = functools.partial(Keeping.forward, layer.input_layernorm)
    layer.input_layernorm.__class__ = Keeping


def with_class_of_a_part(layer, monkeypatch):
    layer.input_layernorm.__class__ = Keeping


class Scaling(Qwen3RMSNorm):
    def extra_repr(self):  # which forward might call as well
        return ""


def with_another_function_of_a_part(layer, monkeypatch):
    layer.input_layernorm.__class__ = Scaling


def with_another_own_function_of_a_part(layer, monkeypatch):
    layer.input_layernorm.extra_repr = str


def with_another_patched_function(layer, monkeypatch):
    monkeypatch.setattr(Qwen3RMSNorm, "extra_repr", lambda self: "")


def with_patched_class(layer, monkeypatch):
    stock = Qwen3DecoderLayer.forward
    monkeypatch.setattr(Qwen3DecoderLayer, "forward", functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs)))


def with_patched_calls(layer, monkeypatch):
    stock = nn.Module._call_impl
    monkeypatch.setattr(nn.Module, "_call_impl", functools.wraps(stock)(lambda *args, **kwargs: stock(*args, **kwargs)))


def with_own_calls(layer, monkeypatch):
    def steered(self, *args, **kwargs):
        out = nn.Module._call_impl(self, *args, **kwargs)
        out[..., 0] += 1.0
        return out

    layer._call_impl = types.MethodType(steered, layer)


def with_calls_of_its_class(layer, monkeypatch):
    monkeypatch.setattr(
        Qwen3DecoderLayer, "_call_impl", lambda *args, **kwargs: nn.Module._call_impl(*args, **kwargs), raising=False
    )


def with_optimizer_in_backward(layer, monkeypatch):
    layer.mlp.up_proj.weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    "change",
    [
        with_class,
        with_own_forward,
        with_own_forward_of_a_part,
        with_class_of_a_part,
        with_another_function_of_a_part,
        with_another_own_function_of_a_part,
        with_another_patched_function,
        with_patched_class,
        with_patched_calls,
        with_own_calls,
        with_calls_of_its_class,
        with_optimizer_in_backward,
    ],
)
def test_one_layer_that_is_not_plain_lets_all_run_one_by_one(change, group_sizes, monkeypatch):
    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12)
    compiled_model(model)
    run_step(model, batch)
    change(model.model.layers[2], monkeypatch)
    group_sizes.clear()
    found = run_step(model, batch)
    assert group_sizes == [1] * (3 if change is with_own_forward else 4)
    streamgrad.disable(model)
    assert_same_step(found, run_step(model, batch), 1e-6)


def test_layers_may_be_removed_and_leave_their_kind(group_sizes):
    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    assert len(model.config.layer_types) == 4
    expected = run_step(model, batch)
    compiled_model(model)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == [2]


def test_groups_that_are_trained_in_part_run_one_by_one(group_sizes):
    """Else there would be a graph for every pattern, where other layers are trained in every step."""
    model, batch = tiny_model("qwen3", num_hidden_layers=8), labelled(12)
    compiled_model(model)
    for frozen, sizes in (([], [4, 4]), ([0, 1, 2, 3], [4, 4]), ([1, 2], [1, 1, 1, 1, 4]), ([5], [4, 1, 1, 1, 1])):
        for index, layer in enumerate(model.model.layers):
            layer.requires_grad_(index not in frozen)
        streamgrad.disable(model)
        expected = run_step(model, batch)
        compiled_model(model)
        group_sizes.clear()
        assert_same_step(run_step(model, batch), expected, 1e-6)
        assert group_sizes == sizes


def test_packages_that_are_not_there_define_nothing(group_sizes, monkeypatch):
    model, batch = tiny_model("qwen3", num_hidden_layers=2), labelled(12)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # which forbids its import
    monkeypatch.setitem(sys.modules, "peft", types.ModuleType("peft"))
    layer_groups._is_defined_in.cache_clear()
    expected = run_step(model, batch)
    compiled_model(model)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == [2]


@pytest.mark.parametrize(("layers", "forwards"), [(2, 3), (1, 2)])  # in groups, one by one and as they are
def test_a_compiler_that_fails_is_tried_once_for_groups_and_once_for_layers(layers, forwards, monkeypatch):
    def fails(*args, **kwargs):
        raise TorchDynamoException("no compiler")

    model, batch = tiny_model("qwen3", num_hidden_layers=layers), labelled(12)
    expected, seen = run_step(model, batch), []
    monkeypatch.setattr(torch, "compile", lambda function, **_: fails)
    compiled_model(model)
    handle = model.model.embed_tokens.register_forward_hook(lambda *_: seen.append(1))
    with pytest.warns(RuntimeWarning, match="not compiled from now on.*no compiler"):
        assert_same_step(run_step(model, batch), expected, 1e-6)
    handle.remove()
    assert len(seen) == forwards


@pytest.mark.usefixtures("group_sizes")
def test_arguments_may_have_any_name():
    names = {"layers", "layer", "group", "groups", "h", "forward"}
    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12) | dict.fromkeys(names)
    expected = run_step(model, batch)
    compiled_model(model)
    assert_same_step(run_step(model, batch), expected, 1e-6)


# --- Decoders that do something between their layers ------------------------------------------------------------------------


def test_layers_beyond_the_configurations_number_are_not_grouped(group_sizes):
    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12)
    model.config.num_hidden_layers = 3
    expected = run_step(model, batch)
    compiled_model(model)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == [1, 1, 1]


class GivesEachItsOwn(Qwen3Model):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs):
        hidden = self.embed_tokens(input_ids)
        places = torch.arange(hidden.shape[1])[None]
        cos, sin = self.rotary_emb(hidden, places)
        embeddings = [(cos * (1 + index), sin) for index in range(4)]
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, position_ids=places, position_embeddings=embeddings[index])
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


@pytest.mark.parametrize("is_trusted", [True, False])
def test_layers_that_get_arguments_of_their_own_run_one_by_one(is_trusted, group_sizes, caplog, monkeypatch):
    model, batch = tiny_model("qwen3", num_hidden_layers=4), labelled(12)
    model.model.__class__ = GivesEachItsOwn
    if is_trusted:
        monkeypatch.setattr(layer_groups, "passes_on_alone", lambda forward: True)
        monkeypatch.setattr(layer_groups, "_is_of_transformers", lambda kind: True)
    expected = run_step(model, batch)
    compiled_model(model)
    with caplog.at_level(logging.INFO, "streamgrad"):
        for _ in range(2):
            assert_same_step(run_step(model, batch), expected, 1e-6)
    assert group_sizes == [4] * is_trusted + [1] * 8
    assert ("one by one from now on (CalledOtherwise: layers get different arguments)" in caplog.text) == is_trusted


def groups_that_add():
    """Three layers in groups of two and one, whose graphs add one for each, and their forwards."""
    layers = [nn.Identity() for _ in range(3)]
    groups = LayerGroups([layers[:2], layers[2:]], lambda _: lambda x: x + 1, lambda group: lambda x, **_: x + len(group))
    for layer, forward in groups.forwards():
        layer.forward = forward
    return groups, [layer.forward for layer in layers]


def test_groups_return_what_their_layers_return_in_turn():
    groups, (first, second, third) = groups_that_add()
    assert third(second(first(torch.zeros(1)))) == 3
    groups.check_that_all_ran()


def test_groups_notice_what_is_called_otherwise():
    groups, (first, second, third) = groups_that_add()
    first(torch.zeros(1))
    with pytest.raises(CalledOtherwise, match="2 layers were not called"):
        groups.check_that_all_ran()
    with pytest.raises(CalledOtherwise, match="another order"):
        third(torch.zeros(1))
    _, (first, second, third) = groups_that_add()
    with pytest.raises(CalledOtherwise, match="another order"):
        second(torch.zeros(1))
    _, (first, second, third) = groups_that_add()
    with pytest.raises(CalledOtherwise, match="different arguments"):
        second(first(torch.zeros(1)).clone())
    _, (first, second, third) = groups_that_add()
    with pytest.raises(CalledOtherwise, match="different arguments"):
        second(first(torch.zeros(1), mask=None), mask=torch.zeros(1))
    _, (first, second, third) = groups_that_add()
    with pytest.raises(CalledOtherwise, match="different arguments"):
        second(first(torch.zeros(1)).add_(1.0))
    third_twice = groups_that_add()[1]
    third_twice[2](third_twice[1](third_twice[0](torch.zeros(1))))
    with pytest.raises(CalledOtherwise, match="another order"):
        third_twice[2](torch.zeros(1))
