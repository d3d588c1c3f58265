"""Where a loss reaches a model's output by no gradient at all, not one of zeros, parameters get none, as in the stock model.

So it is under DDP with `find_unused_parameters=True`, which hands on the gradient of every output, and None for those that the
loss leaves out. With zeros an optimizer would decay weights that stock training leaves alone.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from tiny import tiny_model

WAYS = [{"chunk_size": 7}, {"chunk_size": 7, "keep": "attention"}, {"chunk_size": 21}, {"keep": "all"}]


class Sink(torch.autograd.Function):
    """The identity on a model's outputs, which has no gradient where there is none."""

    @staticmethod
    def forward(ctx, *tensors):
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients


def of_first_layer(model, batch):
    output = model(**batch, output_hidden_states=True)
    _, hidden = Sink.apply(output.loss, output.hidden_states[1])
    return hidden.pow(2).mean()


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe", "granite"])
def test_what_the_loss_does_not_reach_has_no_gradient(family, adapted, way, attention):
    def made():
        return with_lora(tiny_model(family)) if adapted else tiny_model(family)

    batch, model = batches.plain(None), streamgrad.enable(made(), head_chunk_size=5, attention=attention, **way)
    with no_float32():
        expected = run_step(made(), batch, forward=of_first_layer)
        for _ in range(3):
            assert_same_step(run_step(model, batch, forward=of_first_layer), expected, 1e-10)


def scores(hidden, weight):
    targets = torch.tensor([1, 2, 3])
    teacher = torch.ones(3, 4, dtype=torch.float64), torch.ones(9, 4, dtype=torch.float64)
    yield streamgrad.linear_cross_entropy(hidden, weight, targets)
    yield streamgrad.linear_divergence(hidden, weight, *teacher).sum()
    yield streamgrad.token_logprobs(hidden, weight, targets).sum()


def test_heads_alone():
    hidden, weight = (torch.randn(size, 4, dtype=torch.float64, requires_grad=True) for size in (3, 9))
    for score in scores(hidden, weight):
        other = torch.ones((), dtype=torch.float64, requires_grad=True)
        _, used = Sink.apply(score, other * 2)
        used.backward()
        assert hidden.grad is None and weight.grad is None and other.grad == 2


def test_every_function_tells_no_gradient_from_zeros():
    functions = []
    for found in pkgutil.walk_packages(streamgrad.__path__, "streamgrad."):
        try:
            module = importlib.import_module(found.name)
        except ImportError:  # of a library that is not installed, or of Triton
            continue
        functions += [
            kind
            for kind in vars(module).values()
            if inspect.isclass(kind) and issubclass(kind, torch.autograd.Function) and kind.__module__ == module.__name__
        ]
    functions = [kind for kind in functions if "forward" in vars(kind)]
    assert len(functions) > 15
    assert [kind for kind in functions if "ctx.materialize_grads = False" not in inspect.getsource(kind)] == []
