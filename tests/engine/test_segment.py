"""Layers of which only every n-th keeps its input: plain backpropagation's gradients, counted runs, counted bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import batches
import streamgrad
from families import LAYERS_TAKE_STATES_UP, small_model
from gradients import assert_same_step, more, no_float32, relative_error, run_step
from images import float64_throughout, image_batch, image_model
from lora import with_lora
from streamgrad.engine.segment import Recomputed
from streamgrad.memory.live_bytes import LiveBytes
from tiny import FAMILIES, tiny_model, tokens

LAYERS = 5
# Kinds of layers in turn, where a family has several.
_TURNS = {
    "gemma2": {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0, 1]},
}


def deep_model(family: str, **options):
    return tiny_model(family, num_hidden_layers=LAYERS, **_TURNS.get(family, {}), **options)


@contextmanager
def recomputed_layers() -> Iterator[list[Recomputed]]:
    """Collects the layers that keep no input within the block."""
    found: list[Recomputed] = []
    stock = Recomputed.__init__

    def noted(self, *args):
        stock(self, *args)
        found.append(self)

    with mock.patch.object(Recomputed, "__init__", noted):
        yield found


def assert_exact(model, batch: dict, *, joined: int | None = None, forward=None, **options) -> None:
    """Compare a step with plain backpropagation's; `joined` layers keep no input."""
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **{"chunk_size": 7, "head_chunk_size": 5} | options)
        with recomputed_layers() as found:
            actual = run_step(model, batch, forward=forward)
        streamgrad.disable(model)
    assert_same_step(actual, expected, 1e-10)
    assert joined is None or len(found) == joined, f"{len(found)} layers keep no input"


CASES = [
    ("llama", "right_padded", 2, 7, "input"),
    ("qwen3", "packed", 3, 7, "attention"),
    ("mistral", "left_padded", 5, 1, "attention"),
    ("gpt_oss", "plain", 9, 40, "input"),
    ("gemma3_text", "dense_mask", 3, 7, "input"),
    ("qwen3_moe", "embedded", 2, 5, "attention"),
    ("deepseek_v3", "counted", 4, 7, "attention"),
]


@pytest.mark.parametrize(("family", "kind", "layers", "chunk_size", "keep"), CASES)
def test_fp64_gradients_equal_plain_backprop(family, kind, layers, chunk_size, keep):
    model = deep_model(family)
    joined = LAYERS - -(-LAYERS // layers)
    assert_exact(model, batches.KINDS[kind](model), joined=joined, recompute_layers=layers, chunk_size=chunk_size, keep=keep)


@more
@pytest.mark.parametrize("kind", ["plain", "left_padded", "packed", "multi_turn"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fp64_gradients_of_every_family(family, kind):
    model = deep_model(family)
    for layers in (1, 2, 3, LAYERS):
        for chunk_size, keep in ((1, "input"), (7, "attention"), (40, "input")):
            assert_exact(
                model, batches.KINDS[kind](model), recompute_layers=layers, chunk_size=chunk_size, keep=keep,
                joined=LAYERS - -(-LAYERS // layers),
            )  # fmt: skip


@pytest.mark.parametrize("inputs_require_grad", [False, True])
def test_adapters_on_some_layers(inputs_require_grad):
    """Layers below the first adapter make no graph, so that the first above keeps its input."""
    model = with_lora(deep_model("llama"), targets=r".*layers\.[134]\..*(q_proj|down_proj)")
    if inputs_require_grad:
        model.enable_input_require_grads()
    # Layers 1 and 3 are recomputed by plan, and layer 0 makes a graph only where its input needs a gradient.
    assert_exact(model, batches.packed(model), recompute_layers=2, joined=2 if inputs_require_grad else 1)


@pytest.mark.parametrize("family", ["gemma4_text", *(["qwen3_next", "zamba2"] if LAYERS_TAKE_STATES_UP else [])])
def test_layers_with_states_and_with_inputs_of_their_own(family):
    """Shared keys, a vector per token and layer, recurrent states."""
    model, ids = small_model(family), tokens(2, 23)
    batch = {"input_ids": ids, "labels": ids}
    with no_float32():
        expected = run_step(model, batch)
        for layers in (2, 9):
            streamgrad.enable(model, chunk_size=7, recompute_layers=layers)
            assert_same_step(run_step(model, batch), expected, 1e-9)
            streamgrad.disable(model)


def test_router_logits_beside_hidden_states():
    model = deep_model("qwen3_moe")
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.3
    assert_exact(model, batches.plain(model), recompute_layers=3, joined=3)


def test_what_is_added_between_layers_is_kept():
    """DeepStack adds features of images to the output of the first layers."""
    model = image_model("qwen3_vl")
    batch = image_batch("qwen3_vl")
    with float64_throughout():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=7, recompute_layers=9)
        with recomputed_layers() as found:
            assert_same_step(run_step(model, batch), expected, 1e-10)
    assert len(found) < model.config.text_config.num_hidden_layers - 1


@pytest.mark.parametrize("way", ["out of place", "in place", "data", "detached", "pre-hook"])
def test_hooks_between_layers(way):
    model = deep_model("llama")

    def hook(module, args, out):
        if way == "data":  # by less than a re-run may differ
            out.data[:, 3] *= 1.0001
            return None
        if way == "detached":
            return out.detach()
        return out.mul_(1.5) if way == "in place" else out * 1.5

    if way == "pre-hook":
        model.model.layers[2].register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:]))
    else:
        model.model.layers[1].register_forward_hook(hook)
    assert_exact(model, batches.plain(model), recompute_layers=9, joined=3)


def test_hidden_states_may_be_used():
    model = deep_model("llama")

    def forward(model, batch):
        outputs = model(**batch, output_hidden_states=True)
        return outputs.loss + sum((states**2).mean() for states in outputs.hidden_states)

    with no_float32():
        batch = batches.right_padded(model)
        expected = run_step(model, batch, forward=forward)
        streamgrad.enable(model, chunk_size=7, recompute_layers=3)
        assert_same_step(run_step(model, batch, forward=forward), expected, 1e-10)


def test_inside_of_checkpointing():
    """Which gives what a layer saved only once."""

    def checkpointed(model, batch):
        return checkpoint(lambda ids: model(input_ids=ids, labels=ids).loss, batch["input_ids"], use_reentrant=False)

    model = deep_model("llama")
    assert_exact(model, batches.plain(model), recompute_layers=3, forward=checkpointed)


def test_dropout_and_autocast_are_those_of_forward():
    """Bit for bit the gradients of a step whose layers keep their inputs."""
    model = deep_model("gpt_neox", dtype=torch.float32, hidden_dropout=0.3, attention_dropout=0.2)
    batch, steps = batches.plain(model), []
    for layers in (1, 3):
        streamgrad.enable(model, chunk_size=7, recompute_layers=layers)
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            steps.append(run_step(model, batch))
        streamgrad.disable(model)
    assert_same_step(steps[1], steps[0], 0.0)


def test_a_retained_graph_and_one_that_is_gone():
    model = deep_model("llama")
    batch = batches.plain(model)
    with no_float32():
        once = run_step(model, batch).gradients
        model.zero_grad()
        streamgrad.enable(model, chunk_size=7, recompute_layers=3)
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, 2 * once[name]) < 1e-10, name
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_layer_that_was_changed_is_noticed(layer):
    model = deep_model("llama")
    streamgrad.enable(model, chunk_size=7, recompute_layers=3)
    loss = model(**batches.plain(model)).loss
    with torch.no_grad():
        model.model.layers[layer].mlp.up_proj.weight.mul_(1.1)
    with pytest.raises(RuntimeError, match=f"LlamaDecoderLayer {layer} was modified in place"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_after_an_error_on_the_way():
    """Backward fails among the layers that run again, and then does not."""
    model = deep_model("llama")
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        model.zero_grad()
        streamgrad.enable(model, chunk_size=7, recompute_layers=3)
        divisors = [1]
        model.model.layers[1].mlp.register_forward_hook(lambda *args: divisors.append(1 // divisors[0]))
        loss = model(**batch).loss
        divisors[0] = 0
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        divisors[0] = 1
        model.zero_grad()
        loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, expected.gradients[name]) < 1e-10, name


def test_an_input_that_changes_between_two_passes_is_noticed():
    """The first pass ends above the layer that keeps its input, whose backward has not read it yet."""
    model, found = deep_model("llama"), []
    streamgrad.enable(model, chunk_size=7, recompute_layers=3)
    model.model.layers[0].register_forward_hook(lambda module, args, out: found.append(out))
    leaf = batches.embedded(model)["inputs_embeds"].requires_grad_()
    inputs = leaf.clone()
    hidden = model.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    torch.autograd.grad(hidden.sum(), found[0], retain_graph=True)
    with torch.no_grad():
        inputs[:, 2] *= 1.0001
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(found[0].sum(), leaf)


# --- What it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "forwards"), [(1, [2] * 5), (2, [3, 2, 3, 2, 2]), (3, [3, 3, 2, 3, 2]), (9, [3, 3, 3, 3, 2])])
def test_each_layer_runs_once_more_but_for_the_last_of_a_segment(layers, forwards):
    model = deep_model("llama")
    batch = batches.plain(model)
    streamgrad.enable(model, chunk_size=8, recompute_layers=layers)
    calls = [0] * LAYERS

    def count(index):
        def hook(*args):
            calls[index] += 1

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.mlp.register_forward_hook(count(index))
    run_step(model, batch)  # in which layers are tried on a few tokens
    calls[:] = [0] * LAYERS
    run_step(model, batch)
    assert calls == [3 * times for times in forwards]  # by three chunks


@pytest.mark.parametrize("layers", [1, 2, 3, 9])
def test_inputs_that_are_kept(layers):
    """Between forward and backward, counted: one of `layers` inputs, and nothing else that depends on it."""
    length, count = 512, 9
    model = tiny_model("llama", num_hidden_layers=count, dtype=torch.float32)
    ids = tokens(1, length)
    one = length * model.config.hidden_size * 4
    held = {}
    for number in (1, layers):
        streamgrad.enable(model, chunk_size=64, recompute_layers=number)
        run_step(model, {"input_ids": ids, "labels": ids})
        with LiveBytes() as live:
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
            held[number] = live.live_bytes
        streamgrad.disable(model)
        del hidden
    assert held[1] - held[layers] == pytest.approx((count - -(-count // layers)) * one, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_layers": 0}, "leaves no layers in a segment"),
        ({"memory_budget": 80}, "memory_budget: 80 counts bytes"),
        ({"recompute_layers": 2, "keep": "all"}, "not run again"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        streamgrad.StreamConfig(**options)
    with pytest.raises(TypeError, match="a number of layers is a whole number"):
        streamgrad.StreamConfig(recompute_layers=1.5)
