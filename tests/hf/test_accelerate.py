"""Models that Accelerate prepares for 16 bits, which wraps their forward, and their copies."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import streamgrad
from gradients import assert_same_step, no_float32, run_step
from tiny import tiny_model, tokens

BATCH = {"input_ids": tokens(2, 21), "labels": tokens(2, 21), "use_cache": False}


@pytest.fixture
def accelerator():
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(True)


def prepared(accelerator, *, enabled):
    """Return a tiny model in fp32, enabled before it is prepared or after it."""
    model = tiny_model("llama", dtype=torch.float32)
    if enabled == "before":
        streamgrad.enable(model, chunk_size=7)
    model = accelerator.prepare(model)
    return streamgrad.enable(model, chunk_size=7) if enabled == "after" else model


def loss_of(model):
    return model(**BATCH).loss


@pytest.mark.parametrize("enabled", ["before", "after"])
@pytest.mark.parametrize("unwrapped", [False, True])
@pytest.mark.parametrize("disabled", ["neither", "the model", "the copy", "and enabled again"])
def test_a_deep_copy_has_its_own_weights_and_gradients(accelerator, enabled, unwrapped, disabled):
    model, stock = (prepared(accelerator, enabled=each) for each in (enabled, None))
    if unwrapped:
        model, stock = (accelerator.unwrap_model(each, keep_fp32_wrapper=False) for each in (model, stock))
    if disabled == "the model":
        streamgrad.disable(model)
    ours, expected = copy.deepcopy(model), copy.deepcopy(stock)
    if disabled in ("the copy", "and enabled again"):
        streamgrad.disable(ours)
    if disabled == "and enabled again":
        streamgrad.enable(ours, chunk_size=7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert loss_of(ours).item() == pytest.approx(loss_of(expected).item(), rel=1e-6 if unwrapped else 1e-3)
    loss_of(ours).backward()
    assert all(parameter.grad is not None for parameter in ours.parameters() if parameter.requires_grad)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("enabled", ["before", "after"])
@pytest.mark.parametrize("disabled", [False, True])
def test_an_unwrapped_model_is_what_it_was_without_accelerate(accelerator, enabled, disabled):
    """Out of autocast, streamed or not, and called with the same names."""
    model = accelerator.unwrap_model(prepared(accelerator, enabled=enabled), keep_fp32_wrapper=False)
    assert streamgrad.is_enabled(model)
    if disabled:
        streamgrad.disable(model)
    stock = tiny_model("llama", dtype=torch.float32)
    assert list(inspect.signature(model.forward).parameters) == list(inspect.signature(stock.forward).parameters)
    assert_same_step(run_step(model, BATCH), run_step(stock, BATCH), 1e-5)
    with no_float32():
        assert_same_step(run_step(model.double(), BATCH), run_step(stock.double(), BATCH), 1e-10)
