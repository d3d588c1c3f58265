"""Several backward passes through one graph, and what is left of a graph that has been run."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch

import batches
import streamgrad
from gradients import no_float32, relative_error
from streamgrad.hf.layer_args import LayerArguments
from tiny import tiny_model, tokens


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gemma3_text"])
def test_backward_twice_through_a_retained_graph(family, keep):
    """Twice the gradient, neither more nor less."""
    model = tiny_model(family)
    batch = batches.right_padded(model)
    with no_float32():
        model(**batch).loss.backward()
        once = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        model.zero_grad()
        for chunk_size in (5, 64):
            streamgrad.enable(model, keep=keep, chunk_size=chunk_size)
            loss = model(**batch).loss
            loss.backward(retain_graph=True)
            loss.backward()
            streamgrad.disable(model)
            for name, parameter in model.named_parameters():
                assert (parameter.grad is not None) == (name in once), name
                if name in once:
                    assert relative_error(parameter.grad, 2 * once[name]) < 1e-10, name
            model.zero_grad()


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_a_loss_that_is_held_holds_no_layer_tensors(keep):
    """As in `loss = step()` in a loop: the last graph lives until the next one is there."""
    model = tiny_model("llama", dtype=torch.float32)
    ids = tokens(1, 64)
    streamgrad.enable(model, keep=keep, chunk_size=16)
    values: list[weakref.ref] = []

    def note(module, inputs, out):
        values.append(weakref.ref(out.untyped_storage()))

    model.model.layers[0].self_attn.v_proj.register_forward_hook(note)
    loss = model(input_ids=ids, labels=ids).loss
    assert keep != "all" or values[0]() is not None
    loss.backward()
    gc.collect()
    assert values and not any(value() for value in values)
    assert loss.grad_fn is not None


def test_gradients_of_float32_regions_are_float32_under_autocast():
    """A layer that leaves autocast for some of its work leaves it in backward too."""
    model = tiny_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        stock = layer.mlp.forward

        def in_float32(x, stock=stock):
            with torch.autocast("cpu", enabled=False):
                return stock(x.float())

        layer.mlp.forward = in_float32
    batch = batches.plain(model)

    def gradients():
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    streamgrad.enable(model, keep="all")
    expected = gradients()
    streamgrad.disable(model)
    streamgrad.enable(model, keep="input", chunk_size=batches.LENGTH)
    actual = gradients()
    for name, gradient in expected.items():
        if "mlp" in name:
            assert relative_error(actual[name], gradient) < 1e-5, name


@pytest.mark.parametrize(
    "name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
)
@pytest.mark.parametrize("keep", ["input", "all"])
def test_gradients_of_gradients_are_refused(name, keep):
    """With create_graph=True a gradient without a graph would be taken for a constant."""
    model = tiny_model("llama", tie_word_embeddings=False)
    streamgrad.enable(model, keep=keep, chunk_size=7)
    loss = model(**batches.plain(model)).loss
    with pytest.raises(RuntimeError, match=r"create_graph=True.*streamgrad.disable"):
        torch.autograd.grad(loss, model.get_parameter(name), create_graph=True)


def test_a_loss_that_is_held_after_backward_holds_no_arguments_of_layers():
    """A program holds its last loss while the next step runs, and each layer has rotary angles for the whole sequence."""
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    angles = []
    model.model.rotary_emb.register_forward_hook(lambda module, inputs, output: angles.append(weakref.ref(output[0])))
    loss = model(input_ids=tokens(1, 9), labels=tokens(1, 9)).loss
    assert angles[0]() is not None
    loss.backward()
    gc.collect()
    assert angles[0]() is None


def test_a_chunk_is_gone_when_the_next_one_runs():
    """Its output, and with that its input's gradient."""
    model, outputs, alive = streamgrad.enable(tiny_model("llama"), chunk_size=4), [], []
    plain = LayerArguments.run
    model(input_ids=tokens(1, 19), labels=tokens(1, 19)).loss.backward()  # in which layers are tried

    def run(arguments, h_BLE, chunk):
        out_BLE = plain(arguments, h_BLE, chunk)
        if out_BLE.requires_grad:
            alive.extend(output() is not None for output in outputs)
            outputs[:] = [weakref.ref(out_BLE)]
        return out_BLE

    with mock.patch.object(LayerArguments, "run", run):
        model(input_ids=tokens(1, 19), labels=tokens(1, 19)).loss.backward()
    assert len(alive) == 2 * 5 - 1 and not any(alive)
