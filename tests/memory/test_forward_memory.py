"""Chunks that run forward together hold no more than backward does, one chunk at a time."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import streamgrad
from lora import with_lora
from streamgrad.engine.policy import LayerPolicy
from streamgrad.engine.ulysses import ALONE
from streamgrad.hf import step_plan
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.step_facts import kind_of_layer
from streamgrad.memory.costs import LayerCosts, Shape, chunks_in_forward
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.memory.planner import Plan
from stretches import chunks_in_forward as with_chunks_in_forward
from tiny import tiny_model, tokens

CHUNK = 32


def peaks_of_step(model, ids):
    """The most bytes alive in forward and in backward of a decoder without its head."""
    with LiveBytes() as live:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        forward, live.peak_bytes = live.peak_bytes, live.live_bytes
        hidden.sum().backward()
    model.zero_grad()
    return forward, live.peak_bytes


def measured(model, ids, keep):
    """The costs of a layer of a model with this option, as training measures them."""
    streamgrad.enable(model, chunk_size=CHUNK, keep=keep, offload="none", memory_budget="1GiB")
    model(input_ids=ids, labels=ids).loss.backward()
    costs = InstalledForward.on(inner_of(model).get_decoder()).stream.planner._costs.values()
    model.zero_grad()
    return LayerCosts.largest(costs)


def inner_of(model):
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@pytest.mark.parametrize(
    ("family", "adapted", "keep", "rows"),
    [("qwen3", False, "input", 1), ("qwen3", True, "attention", 2), ("gemma3_text", False, "input", 2)],
)
def test_forward_holds_no_more_than_backward(family, adapted, keep, rows):
    model = tiny_model(family, dtype=torch.float32, hidden_size=96, intermediate_size=192)
    model = with_lora(model) if adapted else model
    ids = tokens(rows, 24 * CHUNK)
    costs = measured(model, ids, keep)
    count = chunks_in_forward(costs, Shape(*ids.shape), LayerPolicy(keep), CHUNK)
    assert count in (2, 4, 8, 16)
    with with_chunks_in_forward(count):
        forward, backward = peaks_of_step(inner_of(model), ids)
    assert forward <= backward
    with with_chunks_in_forward(64 * count):  # what would be held without the bound
        assert peaks_of_step(inner_of(model), ids)[0] > forward, count


def test_same_count_on_the_device_and_on_the_host():
    """So that a plan that moves layers changes no number, and one that recomputes them neither."""
    costs = LayerCosts(
        input=2.0, keys_and_values=1.0, key_sums=2.0, attention=2.0, graph=20.0, widest=40.0, at_attention=20.0, gradients=1000.0,
        gradient_sums=2000.0, largest_gradient=100.0, forward=24.0,
    )  # fmt: skip
    for keep in ("input", "attention"):
        counts = {
            chunks_in_forward(costs, Shape(1, 400), LayerPolicy(keep, on_host, recomputed), 8)
            for on_host in (False, True)
            for recomputed in (False, True)
        }
        assert len(counts) == 1 and max(counts) > 1
    assert chunks_in_forward(costs, Shape(1, 400), LayerPolicy("all"), 8) == 1
    assert chunks_in_forward(costs, Shape(1, 400, ring=2), LayerPolicy("input"), 8) == 1
    assert chunks_in_forward(costs, Shape(1, 1 << 20), LayerPolicy("input"), 16_384) == 1


def test_chunks_run_alone_where_there_is_no_room():
    """As with adapters: little is trained, and an input on its way to the host is larger than sums of keys' gradients."""
    costs = LayerCosts(
        input=8.0, keys_and_values=1.0, key_sums=2.0, attention=2.0, graph=20.0, widest=40.0, at_attention=20.0, gradients=1.0,
        gradient_sums=2.0, largest_gradient=1.0, forward=24.0,
    )  # fmt: skip
    for length in (1 << 12, 1 << 16, 1 << 20):
        assert chunks_in_forward(costs, Shape(1, length), LayerPolicy("input"), 64) == 1


@pytest.mark.parametrize(
    ("dtype", "autocast", "changes", "joined"),
    [
        (torch.bfloat16, False, {}, True), (torch.float32, True, {}, True), (torch.float64, False, {}, False),
        (torch.float32, False, {}, False),  # some products may be in TF32 or in 16 bits, and guards allow little
        (torch.bfloat16, False, {"on_cuda": False}, False), (torch.bfloat16, False, {"sharing": mock.Mock(ranks=2)}, False),
        (torch.bfloat16, False, {"unmeasured": True}, False),
    ],
)  # fmt: skip
def test_which_steps_run_chunks_together(dtype, autocast, changes, joined):
    model = tiny_model("qwen3", dtype=dtype)
    decoder = model.get_decoder()
    costs = measured(tiny_model("qwen3", dtype=torch.float32), tokens(1, 24 * CHUNK), "input")
    kinds = [*map(kind_of_layer, decoder.layers)]
    call = {"kinds": kinds, "h_BTE": torch.zeros(1, 24 * CHUNK, 8, dtype=dtype), "on_cuda": True, "sharing": ALONE} | changes
    plan, step = Plan((LayerPolicy("input"),) * 2, (CHUNK,) * 2, 0.0, 0.0), mock.Mock(costs=costs, shape=Shape(1, 24 * CHUNK))
    known = [] if changes.get("unmeasured") else kinds
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        counts = step_plan._with_joined_chunks(plan, step, known, mock.Mock(**call)).chunks_in_forward
    assert (len(counts) == 2 and min(counts) > 1) if joined else not counts


def test_a_layer_that_cannot_be_measured_runs_where_nothing_has_to_be_decided(monkeypatch):
    """As on a GPU, where a layer is measured for this alone."""
    model, ids = tiny_model("qwen3"), tokens(1, 3 * CHUNK)
    monkeypatch.setattr(step_plan.Planner, "must_measure", lambda self, layers, h_BTE: True)
    monkeypatch.setattr(step_plan, "measured_costs", mock.Mock(side_effect=TypeError("of so many tokens")))
    streamgrad.enable(model, chunk_size=CHUNK, keep="input", offload="none")
    model(input_ids=ids, labels=ids).loss.backward()
    streamgrad.enable(streamgrad.disable(model), memory_budget="1GiB")
    with pytest.raises(TypeError, match="of so many tokens"):
        model(input_ids=ids, labels=ids)
