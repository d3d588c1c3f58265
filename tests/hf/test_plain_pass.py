"""The plain pass: steps whose layers all keep everything run the model's own layers, and what does not is run by the engine."""

from __future__ import annotations

import pytest
import torch

import batches
import streamgrad
from batches import labelled
from gradients import assert_same_step, more, no_float32, run_step
from lora import with_lora
from streamgrad.hf import decoder
from streamgrad.hf.whole import plain_pass
from tiny import BY_SDPA, tiny_model


@pytest.fixture
def streamed(monkeypatch):
    """How many layers have been run by the engine so far, in a list of one number."""
    count, run = [0], decoder.run_layer

    def counting(call, h_BTE):
        count[0] += 1
        return run(call, h_BTE)

    monkeypatch.setattr(decoder, "run_layer", counting)
    return count


# --- Exact, and plain -------------------------------------------------------------------------------------------------------

WITHOUT_BOUNDARIES = [kind for kind in batches.KINDS if kind not in ("packed_flat", "dense_mask")]
FEW = [("qwen3", "plain"), ("qwen3", "left_padded"), ("qwen3", "packed"), ("mistral", "right_padded"), ("gemma3_text", "plain")]
REST = [(family, kind) for family in BY_SDPA for kind in WITHOUT_BOUNDARIES if (family, kind) not in FEW]


@pytest.mark.parametrize(("family", "kind"), [*FEW, *(pytest.param(*case, marks=more) for case in REST)])
@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=more)])
def test_a_plain_step_is_the_stock_models(family, kind, method, streamed):
    model = tiny_model(family) if method == "full" else with_lora(tiny_model(family))
    batch = batches.KINDS[kind](model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, keep="all", head_chunk_size=5)
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert streamed == [0]


def test_hidden_states_of_a_plain_pass_are_the_same_bits():
    model = tiny_model("qwen3", attention_dropout=0.3)
    batch = batches.right_padded(model) | {"output_hidden_states": True}
    seen = []
    model.model.layers[1].register_forward_hook(lambda module, args, out: seen.append(out))
    torch.manual_seed(5)
    expected = model(**batch).hidden_states
    streamgrad.enable(model, keep="all")
    torch.manual_seed(5)
    actual = model(**batch).hidden_states
    assert len(actual) == len(expected) == 3
    assert all(map(torch.equal, actual, expected)) and torch.equal(*seen)


@pytest.mark.parametrize("family", ["qwen3_moe"])
def test_router_logits_of_a_plain_pass(family, streamed):
    model = tiny_model(family)
    batch = batches.plain(model) | {"output_router_logits": True}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, keep="all")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert streamed == [0]


def test_layers_that_keep_everything_are_not_checkpointed():
    model = tiny_model("qwen3")
    runs = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        model.gradient_checkpointing_enable()
        streamgrad.enable(model, keep="all")
        runs.clear()
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert len(runs) == 1
    assert model.model.layers[0].gradient_checkpointing


# --- What goes through the engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("qwen3", "plain", {"keep": "input"}),
        ("qwen3", "plain", {"attention": "eager"}),
        ("qwen3", "dense_mask", {}),
        ("qwen3", "packed_flat", {}),
        ("gpt_oss", "plain", {}),
    ],
)
def test_what_is_not_plain(family, kind, options, streamed):
    model = tiny_model(family)
    batch = batches.KINDS[kind](model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **({"keep": "all"} | options))
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert streamed == [2]


@pytest.mark.parametrize(
    ("family", "kind", "is_plain"),
    [
        ("qwen3", "plain", True),
        ("qwen3", "right_padded", False),
        ("qwen3", "packed", False),
        ("mistral", "plain", False),
        ("qwen3", "all real", True),
        ("qwen3", "one document", True),
    ],
)
def test_long_rows_with_masks_are_left_to_streamed_attention(family, kind, is_plain, streamed, monkeypatch):
    monkeypatch.setattr(plain_pass, "_MASKED_TOKENS", 16)
    model = tiny_model(family)
    if kind in batches.KINDS:
        batch = batches.KINDS[kind](model)
    else:
        batch = batches.plain(model)
        mask = torch.ones_like(batch["input_ids"])
        batch |= {"attention_mask": mask} if kind == "all real" else {"position_ids": mask.cumsum(1) - 1}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, keep="all")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert (streamed == [0]) == is_plain


# --- By the budget ----------------------------------------------------------------------------------------------------------


def test_a_step_is_plain_once_a_plan_for_as_many_tokens_has_kept_everything(streamed):
    model = tiny_model("qwen3")
    streamgrad.enable(model, memory_budget="1GiB")
    for length, is_plain in ((16, False), (16, True), (9, True), (17, False), (17, True), (16, True)):
        before = streamed[0]
        run_step(model, labelled(length))
        assert (streamed[0] == before) == is_plain, length
    status = streamgrad.status(model)
    assert (status.rows, status.tokens) == (1, 16)
    assert {policy.keep for policy in status.plan.policies} == {"all"}
    assert 0 < status.expected_peak_bytes <= 2**30


def test_a_step_that_would_not_fit_any_more_is_not_plain(streamed, monkeypatch):
    """Memory that others hold by now, adapters of another size, and a step that ran out of memory all ask for a new plan."""
    model = tiny_model("qwen3")
    streamgrad.enable(model, memory_budget="1GiB")
    batch = labelled(16)
    for _ in range(2):
        run_step(model, batch)
    assert streamed == [2]
    held = torch.zeros(2**30 // 8, dtype=torch.float64)
    model.model.register_buffer("held", held, persistent=False)
    with pytest.raises(ValueError, match="cannot hold"):
        model(**batch)
    del model.model.held
    run_step(model, batch)
    assert streamed == [2]
    model.model._streamgrad.stream.planner.note_shortage()
    run_step(model, batch)
    assert streamed == [4]


def test_plain_and_chunked_steps_add_up():
    """A short micro-batch that keeps everything and a long one that does not, accumulated into the same gradients."""
    model = tiny_model("qwen3", hidden_size=64, intermediate_size=512)
    short, long = labelled(8), labelled(160)
    layers = model.model.layers

    def both(model, batch):
        model(**short).loss.backward()
        return model(**long).loss

    with no_float32():
        expected = run_step(model, short, forward=both)
        streamgrad.enable(model, memory_budget="9MiB", chunk_size=32, head_chunk_size=16)
        for _ in range(2):  # in the second, the short one is plain
            assert_same_step(run_step(model, short, forward=both), expected, 1e-10)
    kept = {policy.keep for policy in streamgrad.status(model).plan.policies}
    assert len(layers) == 2 and kept != {"all"}, kept
