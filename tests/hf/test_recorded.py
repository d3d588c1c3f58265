"""Load-balancing losses: the logits of routers are outputs of streamed layers, and gradients flow back through them."""

from __future__ import annotations

import pytest
import torch

import batches
import streamgrad
from families import LAYERS_TAKE_STATES_UP, small_model
from gradients import assert_same_step, more, no_float32, run_step
from lora import with_lora
from tiny import tiny_model, tokens

# Families that record the logits of their routers.
FAMILIES = [
    "qwen3_moe", "gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_next", "granitemoe", "jetmoe", "phimoe", "minimax_m2",
    "ernie4_5_moe", "flex_olmo", "dbrx", "qwen3_5_moe_text",
]  # fmt: skip
BATCHES = {"plain": batches.plain, "right padded": batches.right_padded, "packed": batches.packed}


def balanced(model):
    """Let the balance loss be a large part of the loss."""
    config = model.config.get_text_config()
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    if hasattr(model, "router_aux_loss_coef"):
        model.router_aux_loss_coef = 0.5
    return model


def assert_exact(model, batch, **options):
    with no_float32():
        expected = run_step(model, batch)
        config = model.config.get_text_config()
        config.output_router_logits = False
        without = run_step(model, batch)
        config.output_router_logits = True
        assert abs(expected.loss - without.loss) > 1e-3  # else nothing would be shown
        streamgrad.enable(model, **options)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("mixtral", "jetmoe", "qwen3_next") else more) for f in FAMILIES]
)
def test_families(family):
    model = balanced(small_model(family))
    assert_exact(model, batches.plain(model), chunk_size=7)


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_chunks_and_policies(chunk_size, keep):
    model = balanced(tiny_model("qwen3_moe"))
    assert_exact(model, batches.right_padded(model), chunk_size=chunk_size, keep=keep)


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name):
    model = balanced(tiny_model("gpt_oss"))
    assert_exact(model, BATCHES[name](model), chunk_size=7)


def test_adapters():
    model = with_lora(balanced(tiny_model("qwen3_moe")))
    assert_exact(model, batches.plain(model), chunk_size=7)


def test_what_is_returned():
    model, ids = tiny_model("qwen3_moe"), tokens(2, 23)
    asked = {"input_ids": ids, "labels": ids, "output_router_logits": True, "use_cache": False}
    expected = model(**asked)
    streamgrad.enable(model, chunk_size=7)
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            actual = model(**asked)
        torch.testing.assert_close(actual.aux_loss, expected.aux_loss, rtol=1e-10, atol=0)
        assert len(actual.router_logits) == 2
        for ours, theirs in zip(actual.router_logits, expected.router_logits, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_your_own_loss_of_router_logits():
    model, ids = tiny_model("qwen3_moe"), tokens(2, 23)

    def forward(model, batch):
        output = model(**batch, output_router_logits=True, use_cache=False)
        return output.loss + sum((logits**2).mean() for logits in output.router_logits[1:])

    batch = {"input_ids": ids, "labels": ids}
    with no_float32():
        expected = run_step(model, batch, forward=forward)
        streamgrad.enable(model, chunk_size=7)
        assert_same_step(run_step(model, batch, forward=forward), expected, 1e-10)


# With the size of chunks: phimoe draws twice for each, so only a single one draws what the stock model does.
NOISE = {
    "mixtral": (7, {"router_jitter_noise": 0.3}),
    "minimax_m2": (7, {"router_jitter_noise": 0.3}),
    "phimoe": (23, {"input_jitter_noise": 0.3, "router_jitter_noise": 0.1}),
    "dbrx": (7, {"ffn_config": {"moe_jitter_eps": 0.3}}),
}


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("family", [pytest.param(f, marks=() if f in ("mixtral", "phimoe") else more) for f in NOISE])
def test_noise_of_routers_is_replayed(family, keep):
    """A CPU draws numbers one by one: for a batch of one row, chunks in order draw what the whole sequence would."""
    chunk_size, options = NOISE[family]
    model = balanced(small_model(family, **options))
    ids = tokens(1, 23)

    def forward(model, batch):
        torch.manual_seed(5)
        return model(**batch).loss

    with no_float32():
        expected = run_step(model, {"input_ids": ids, "labels": ids}, forward=forward)
        torch.manual_seed(6)
        assert abs(model(input_ids=ids, labels=ids).loss - expected.loss) > 1e-6, "there is no noise"
        streamgrad.enable(model, chunk_size=chunk_size, keep=keep)
        assert_same_step(run_step(model, {"input_ids": ids, "labels": ids}, forward=forward), expected, 1e-10)


def test_the_balance_loss_alone():
    """It does not reach the experts of the last layer, which have no gradient then, and not one of zeros."""
    model, ids = tiny_model("qwen3_moe"), tokens(2, 23)

    def forward(model, batch):
        return model(**batch, output_router_logits=True, use_cache=False).aux_loss

    batch = {"input_ids": ids, "labels": ids}
    with no_float32():
        expected = run_step(model, batch, forward=forward)
        assert expected.gradients["model.layers.1.mlp.experts.down_proj"] is None
        for keep in ("input", "attention", "all"):
            streamgrad.enable(model, chunk_size=7, keep=keep)
            assert_same_step(run_step(model, batch, forward=forward), expected, 1e-10)
            streamgrad.disable(model)


@pytest.mark.skipif(not LAYERS_TAKE_STATES_UP, reason="layers of transformers before 5.21 are refused")
@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"memory_budget": "2GiB"}])
def test_hidden_states_of_a_module_inside_a_layer_are_refused(options):
    """Zamba 2 records them there; chunks, trials and measurements of layers would each add theirs."""
    model, ids = streamgrad.enable(small_model("zamba2"), **options), tokens(1, 7)
    with pytest.raises(ValueError, match="record hidden_states of a module inside of them"):
        model(input_ids=ids, labels=ids, output_hidden_states=True)
    model(input_ids=ids, labels=ids).loss.backward()
