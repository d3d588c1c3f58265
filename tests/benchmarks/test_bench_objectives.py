"""Compares what the benchmarks run, steps of every objective and the mini-sequence peer, with plain backpropagation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import streamgrad
from benchmarks import objective, peers
from gradients import Step, assert_same_step, no_float32, run_step
from lora import with_lora
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.objectives import dpo_loss, grpo_loss
from tiny import tiny_model, tokens


def logprobs_of(model, ids_BT: Tensor) -> Tensor:
    logps_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].log_softmax(-1)
    return logps_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]


def plain_dpo(model, ids_BT: Tensor, ref_BT: Tensor) -> Tensor:
    chosen, rejected = logprobs_of(model, ids_BT).chunk(2)
    mask = torch.ones_like(chosen)
    return dpo_loss(chosen, rejected, *ref_BT.chunk(2), mask, mask, beta=objective.DPO_BETA)


def plain_grpo(model, ids_BT: Tensor, ref_BT: Tensor) -> Tensor:
    logprobs_BT = logprobs_of(model, ids_BT)
    advantages = torch.linspace(1.0, -1.0, len(ids_BT))
    mask, old = torch.ones_like(logprobs_BT), logprobs_BT.detach()
    return grpo_loss(logprobs_BT, advantages, mask, old_logprobs=old, ref_logprobs=ref_BT, beta=objective.GRPO_BETA)


PLAIN = {"dpo": plain_dpo, "grpo": plain_grpo}


def step_with(model, loss) -> Step:
    return run_step(model, {}, forward=lambda model, batch: loss(model))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "granite"])
@pytest.mark.parametrize("name", PLAIN)
def test_with_a_reference_model(name, family):
    ids_BT = tokens(objective.ROWS[name], 19)
    model, reference = tiny_model(family), tiny_model(family, seed=5).requires_grad_(False)
    with no_float32():
        ref_BT = logprobs_of(reference, ids_BT)
        expected = step_with(copy.deepcopy(model), lambda plain: PLAIN[name](plain, ids_BT, ref_BT))
        for each in (model, reference):
            streamgrad.enable(each, chunk_size=7, head_chunk_size=5)
        actual = step_with(model, lambda streamed: objective.OBJECTIVES[name](streamed, ids_BT, reference))
    assert_same_step(actual, expected, 1e-10)
    assert all(parameter.grad is None for parameter in reference.parameters())


@pytest.mark.parametrize("name", PLAIN)
def test_with_adapters_switched_off_as_the_reference(name):
    ids_BT = tokens(objective.ROWS[name], 19)
    model = with_lora(tiny_model("qwen3")).base_model.model
    model._hf_peft_config_loaded = True  # as `add_adapter`, which the benchmark uses, leaves a model
    with no_float32():
        ref_BT = logprobs_of(tiny_model("qwen3"), ids_BT).detach()
        expected = step_with(copy.deepcopy(model), lambda plain: PLAIN[name](plain, ids_BT, ref_BT))
        streamgrad.enable(model, chunk_size=7, head_chunk_size=5)
        actual = step_with(model, lambda streamed: objective.OBJECTIVES[name](streamed, ids_BT, None))
    assert_same_step(actual, expected, 1e-10)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(peers, "MLP_PIECE_TOKENS", 5)
    monkeypatch.setattr(peers, "HEAD_PIECES", 4)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("length", [23, 3])  # pieces of unequal length; fewer tokens than pieces
@pytest.mark.usefixtures("small_pieces")
def test_mini_sequences_have_the_gradients_of_plain_backpropagation(family, length):
    ids_BT = tokens(2, length)
    model = tiny_model(family)
    with no_float32():
        expected = run_step(model, {"input_ids": ids_BT, "labels": ids_BT})
        peers.split_mlps(model)
        model.gradient_checkpointing_enable()
        actual = step_with(model, lambda model: peers.mini_sequence_loss(model, ids_BT))
    assert_same_step(actual, expected, 1e-10)


@pytest.mark.usefixtures("small_pieces")
def test_mini_sequences_split_the_mlp_and_the_logits():
    model, ids_BT, lengths = tiny_model("qwen3"), tokens(1, 41), []
    peers.split_mlps(model)
    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    with LiveBytes() as live:
        peers.mini_sequence_loss(model, ids_BT).backward()
    assert lengths == [5, 5, 5, 5, 5, 5, 5, 5, 1] * 2
    assert live.largest[0] < 40 * model.config.vocab_size * 8  # the logits of all tokens that have a target


def test_a_layer_without_an_mlp_is_refused():
    model = tiny_model("qwen3")
    del model.model.layers[1].mlp
    with pytest.raises(ValueError, match="Qwen3DecoderLayer has no module named mlp"):
        peers.split_mlps(model)
