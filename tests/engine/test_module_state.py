"""What a layer sets on its modules in its first call: refused where a chunk's tokens would set it, and no trace of trials."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from streamgrad.engine.checks.module_state import left_as_they_were
from tiny import tiny_model

CHUNK = 7


class Calibrated(LlamaMLP):
    """Sets the step of a quantiser by the tokens of its first call, and counts its calls."""

    is_set, calls = False, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.is_set:
            step = x.detach().abs().mean() * 0.5
            if isinstance(self.step, Tensor):
                self.step.data.copy_(step)
            else:
                self.step = step if self.step == "tensor" else step.item()
            self.is_set = True
        return super().forward(x + (x / self.step).detach().round() * self.step - x.detach())


def calibrated_model(kind):
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.__class__, one = Calibrated, torch.ones((), dtype=torch.float64)
        if kind == "buffer":
            layer.mlp.register_buffer("step", one)
        else:
            layer.mlp.step = nn.Parameter(one) if kind == "parameter" else kind
    return model


KINDS = ["parameter", "buffer", "tensor", "number"]


@pytest.mark.parametrize("with_graph", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_first_chunk_would_set_is_refused_and_put_back(kind, with_graph):
    model, batch = calibrated_model(kind), batches.plain(None)
    mlp = model.model.layers[0].mlp
    streamgrad.enable(model, chunk_size=CHUNK)
    for _ in range(2):
        message = "LlamaDecoderLayer 0 sets Calibrated.step in its first call.*before streamgrad.enable"
        with torch.set_grad_enabled(with_graph), pytest.raises(ValueError, match=message):
            model(**batch | {"use_cache": False})
        assert mlp.step == (1 if isinstance(mlp.step, Tensor) else kind) and not mlp.is_set and mlp.calls == 0
    streamgrad.disable(model)
    with torch.no_grad():
        model(**batch)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=CHUNK)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("options", [{}, {"memory_budget": "1GiB"}, {"keep": "input"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_call_in_one_chunk_sets_what_it_would_in_the_stock_model(kind, options):
    """And not by the few tokens on which a layer is measured for a plan."""
    batch, stock = batches.plain(None), calibrated_model(kind)
    model = streamgrad.enable(copy.deepcopy(stock), **options)
    with no_float32():
        for _ in range(2):
            assert_same_step(run_step(model, batch), run_step(stock, batch), 1e-10)
    assert [layer.mlp.step for layer in model.model.layers] == [layer.mlp.step for layer in stock.model.layers]


class Noting(LlamaMLP):
    """Leaves on itself, in every call, what it is called with."""

    def forward(self, x: Tensor) -> Tensor:
        self.tokens, self.mean = x.shape[1], x.detach().mean()
        return super().forward(x)


def test_a_layer_that_notes_something_in_every_call_is_streamed():
    stock, batch = tiny_model("llama"), batches.plain(None)
    for layer in stock.model.layers:
        layer.mlp.__class__ = Noting
    with no_float32():
        expected = run_step(stock, batch)
        assert_same_step(run_step(streamgrad.enable(stock, chunk_size=CHUNK), batch), expected, 1e-10)


def test_a_parameter_that_an_engine_gathers_is_not_set():
    """ZeRO-3 keeps parameters of no elements, and gives them their values while a layer runs."""
    module, weight = nn.Linear(3, 2, bias=False), torch.randn(2, 3)
    module.weight.data = torch.empty(0)
    with left_as_they_were([module]) as before:
        module.weight.data = weight
        assert before.changed_unseen() is None
    assert module.weight.data_ptr() == weight.data_ptr()


class RunningLargest(LlamaMLP):
    """Scales by the largest value that it has been called with so far."""

    def forward(self, x: Tensor) -> Tensor:
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        return super().forward(x * (1 + 1 / (1 + self.largest)))


def test_the_tokens_of_a_trial_leave_no_trace_on_modules():
    """They are not the program's: a maximum over all tokens that it has seen would be another between a chunk and its re-run."""
    model, batch = tiny_model("llama"), batches.plain(None)
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.largest = RunningLargest, torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        model(**batch)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=CHUNK, keep="attention")
        assert_same_step(run_step(model, batch), expected, 1e-10)
