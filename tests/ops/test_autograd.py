"""Derivatives other than the first, by backward: each way to ask for one is refused by name, or is exact."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap

import batches
import streamgrad
from gradients import Step, assert_same_step, no_float32, relative_error, run_step
from lora import with_lora
from tiny import tiny_model

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}
REFUSED = r"was called inside .* torch\.func .* streamgrad computes gradients by"


def operands():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, 4, dtype=torch.float64, generator=generator) for rows in (6, 9))
    return hidden, weight, torch.arange(6)


def tangent_by_dual_numbers(function, argument):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(argument, torch.ones_like(argument)))).tangent


WAYS = {
    "dual numbers": tangent_by_dual_numbers,
    "jvp": lambda function, argument: jvp(function, (argument,), (argument,)),
    "grad": lambda function, argument: grad(function)(argument),
    "vmap": lambda function, argument: vmap(function)(argument.expand(2, *argument.shape)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("function", [streamgrad.linear_cross_entropy, streamgrad.token_logprobs])
@pytest.mark.parametrize("with_graph", [True, False])
def test_transforms_of_the_head(function, way, with_graph):
    hidden, weight, targets = operands()
    with torch.set_grad_enabled(with_graph), pytest.raises(RuntimeError, match=REFUSED):
        WAYS[way](lambda hidden: function(hidden, weight, targets).sum(), hidden)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_transforms_of_a_model(name, way):
    """Transforms by frozen parameters are refused too, though no autograd function has those as inputs."""
    model = streamgrad.enable(tiny_model("llama").requires_grad_(False), **OPTIONS)
    batch = batches.plain(model)
    with pytest.raises(RuntimeError, match=REFUSED):
        WAYS[way](lambda value: functional_call(model, {name: value}, kwargs=batch).loss, model.get_parameter(name).detach())


@pytest.mark.parametrize("use_cache", [True, False])
def test_transforms_without_a_graph_are_as_in_stock(use_cache):
    stock, model = tiny_model("llama"), streamgrad.enable(tiny_model("llama"), **OPTIONS)
    for each in (stock, model):
        each.set_attn_implementation("eager")  # torch's fused kernels have no tangents
    batch, name = batches.plain(model) | {"use_cache": use_cache}, "model.layers.0.mlp.up_proj.weight"
    with no_float32(), torch.no_grad():
        ours, theirs = (
            tangent_by_dual_numbers(
                lambda value, each=each: functional_call(each, {name: value}, kwargs=batch).loss, each.get_parameter(name)
            )
            for each in (model, stock)
        )
    assert relative_error(ours, theirs) < 1e-12


def test_a_batch_of_gradients():
    hidden, weight, targets = operands()
    values = streamgrad.token_logprobs(hidden.requires_grad_(), weight, targets)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.autograd.grad(values, hidden, torch.eye(6, dtype=torch.float64), is_grads_batched=True)


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("lora", [False, True])
def test_backward_in_inference_mode(keep, lora):
    model = tiny_model("llama")
    if lora:
        model = with_lora(model, targets=["q_proj", "down_proj", "lm_head"])
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **OPTIONS, keep=keep)
        model.zero_grad()
        loss = model(**batch).loss
        with torch.inference_mode():
            loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_step(Step(loss.detach(), gradients), expected, 1e-10)
