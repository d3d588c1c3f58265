"""Models whose sequences cannot share their beginnings are found by a trial, whatever the cause; the others share exactly."""

from __future__ import annotations

from collections.abc import Callable

import peft
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import streamgrad
from families import STREAMED, small_model
from gradients import assert_same_step, more, no_float32, run_step
from shared_batches import BATCHES, batch_of, group
from streamgrad.hf.discover import unwrap
from tiny import tiny_model

RIGHT, LEFT = BATCHES["turns"], batch_of(*group(9, [3, 2, 7, 1]), side="left")
# Angles of rotary embeddings are rounded to float32, at other positions to others. DeepSeek-V2 rounds by the place in the row.
ROUNDED_ANGLES = 1e-4


def loss_of(hidden_ME: torch.Tensor) -> torch.Tensor:
    weights = torch.randn(hidden_ME.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (hidden_ME * weights).sum() + hidden_ME.square().sum()


def separate(model: nn.Module, batch: dict) -> torch.Tensor:
    """A loss of the hidden states that predict scored tokens, by the stock model."""
    output = unwrap(model).base_model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    real = batch["attention_mask"].bool()
    scored = batch["completion_mask"][:, 1:].bool() & real[:, 1:] & real[:, :-1]
    return loss_of(output.last_hidden_state[:, :-1][scored])


def shared(model: nn.Module, batch: dict, **options) -> torch.Tensor:
    return loss_of(streamgrad.share_prefixes(**batch, **options).hidden_states(model)[0])


def outcome(model: nn.Module, batch: dict, tolerance: float = 1e-9, **options) -> str:
    """The reason of a refusal; "" where the model shares, which then is exact."""
    with no_float32():
        expected = run_step(model, batch, forward=separate)
        streamgrad.enable(model, chunk_size=7, keep="input")
        try:
            actual = run_step(model, batch, forward=lambda model, batch: shared(model, batch, **options))
        except ValueError as error:
            if "cannot share the beginnings" not in str(error):
                raise
            return str(error)
    assert_same_step(actual, expected, tolerance)
    return ""


# --- families -------------------------------------------------------------------------------------------------------------

HERE = ["gpt2", "opt", "ministral3", "hunyuan_v1_dense", "biogpt", "gemma3", "phimoe", "gpt_oss"]


@pytest.mark.parametrize("family", [*HERE, *(pytest.param(f, marks=more) for f in sorted(STREAMED - set(HERE)))])
def test_a_family_shares_exactly_or_not_at_all(family):
    told = outcome(small_model(family), RIGHT, ROUNDED_ANGLES if family == "deepseek_v2" else 1e-9)
    fates = {"opt": "depends on a token's place", "biogpt": "its mask has other rules"}
    if family in HERE:
        assert fates[family] in told if family in fates else not told
    # Equal prompts at other positions, which rotary embeddings alone do not see.
    told = told or outcome(small_model(family), LEFT, ROUNDED_ANGLES)
    if family in ("gpt2", "ministral3", "hunyuan_v1_dense"):
        assert "Pass same_padding=True" in told


def test_rows_of_unequal_padding_are_kept_apart_where_asked():
    ids = torch.randint(3, 60, (4, 14), generator=torch.Generator().manual_seed(0))
    ids[:, 4:10] = ids[0, 4:10]
    ids[2:, 2:4] = ids[2, 2:4]
    mask = torch.ones_like(ids)
    mask[:2, :4], mask[2:, :2] = 0, 0
    completion = torch.zeros_like(ids)
    completion[:, 10:] = 1
    batch = {"input_ids": ids, "attention_mask": mask, "completion_mask": completion}
    assert outcome(small_model("gpt2"), batch, same_padding=True) == ""
    assert outcome(small_model("ministral3"), batch, same_padding=True) == ""


# --- models and hooks on no list ------------------------------------------------------------------------------------------


def pairs_of_tokens(model: nn.Module) -> None:
    """Embeddings to which those of the tokens before are added."""

    def hook(_: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        return out + 0.3 * nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]

    model.model.embed_tokens.register_forward_hook(hook)


def counted_positions(model: nn.Module) -> None:
    """Embeddings of places in the row, whatever the position_ids."""
    table = torch.randn(100, 24, dtype=torch.float64)
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: out + table[: out.shape[1]])


def token_shift(model: nn.Module) -> None:
    """Between layers, where all tokens are there."""

    def hook(_: nn.Module, args: tuple) -> tuple:
        return (args[0] + 0.3 * args[0].roll(1, dims=1), *args[1:])

    model.model.layers[1].register_forward_pre_hook(hook)


def mean_of_the_row(model: nn.Module) -> None:
    model.model.norm.register_forward_pre_hook(lambda _, args: (args[0] - args[0].mean(dim=1, keepdim=True),))


def noise(model: nn.Module) -> None:
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: out + torch.randn_like(out))


def clipped_gradient(model: nn.Module) -> None:
    """A row's own gradient of the hidden states, clipped."""
    model.model.layers[1].register_full_backward_hook(lambda _, grads, __: (grads[0].clamp(-0.1, 0.1),))


def own_dropout(model: nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.attn_drop = layer.self_attn.attention_dropout = 0.1


CHANGES = {
    pairs_of_tokens: "depends on a token's place in the row or on its neighbours",
    counted_positions: "depends on a token's place in the row or on its neighbours",
    token_shift: "depends on a token's place in the row or on its neighbours",
    mean_of_the_row: "depends on a token's place in the row or on its neighbours",
    noise: "it draws random numbers",
    clipped_gradient: "a backward hook of LlamaDecoderLayer",
    own_dropout: "dropout is on",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_sees_the_row_is_refused(change: Callable):
    """Also where it comes after a shared step that was right."""
    model = tiny_model("llama")
    assert outcome(model, RIGHT) == ""
    change(model)
    with pytest.raises(ValueError, match=CHANGES[change]):
        shared(model, RIGHT)


def test_the_trial_leaves_no_trace():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=7)
    state, hooks = torch.get_rng_state(), [dict(layer._forward_pre_hooks) for layer in model.model.layers]
    with torch.no_grad():
        shared(model, RIGHT)
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(layer._forward_pre_hooks) for layer in model.model.layers] == hooks
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_tried_once():
    """Trainers register a hook of transformers' anew at every step, and switch checkpointing."""
    model, calls = streamgrad.enable(tiny_model("llama"), chunk_size=7), []
    found = streamgrad.share_prefixes(**RIGHT)
    model.model.norm.register_forward_hook(lambda _, args, out: calls.append(out.shape[1]))
    for _ in range(3):
        calls.clear()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
        found.hidden_states(model)
    assert calls == [found.input_ids.shape[1]]


# --- wrappers and modes ---------------------------------------------------------------------------------------------------


def test_a_wrapper_that_must_be_called_itself_is_refused(tmp_path):
    """DDP reduces gradients only of forward passes that it has seen: others would silently stay those of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = streamgrad.enable(tiny_model("llama"))
        with pytest.raises(ValueError, match=r"inside a DistributedDataParallel.* Put share_prefixes and the loss into"):
            shared(DistributedDataParallel(model), RIGHT)
    finally:
        torch.distributed.destroy_process_group()


def test_an_adapter_that_adds_tokens_is_refused():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = streamgrad.enable(peft.get_peft_model(tiny_model("llama"), config))
    with pytest.raises(ValueError, match="tokens of its own before every row"):
        shared(model, RIGHT)


def test_a_row_other_than_the_shared_one_is_refused():
    model, found = streamgrad.enable(tiny_model("llama")), streamgrad.share_prefixes(**RIGHT)
    with (
        pytest.raises(ValueError, match=r"tokens of shape \[\(5, 45\)\] were passed for a shared row of 67"),
        found.streamed(model),
    ):
        model.model(input_ids=RIGHT["input_ids"])


def test_evaluation_mode_and_no_graph():
    """Dropout is off there, so that what may not share while training shares."""
    model = streamgrad.enable(tiny_model("llama", attention_dropout=0.3), chunk_size=7).eval()
    with no_float32(), torch.no_grad():
        expected = separate(streamgrad.disable(model), RIGHT)
        torch.testing.assert_close(shared(streamgrad.enable(model, chunk_size=7), RIGHT), expected, rtol=1e-10, atol=0.0)


def test_frozen_layers_and_accumulated_gradients():
    model = tiny_model("qwen3")
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    batches = [RIGHT, BATCHES["four completions"]]

    def both(forward: Callable) -> Callable:
        return lambda model, _: sum(forward(model, batch) for batch in batches)

    with no_float32():
        expected = run_step(model, {}, forward=both(separate))
        streamgrad.enable(model, chunk_size=5)
        assert_same_step(run_step(model, {}, forward=both(shared)), expected, 1e-10)


@pytest.mark.parametrize("keep", ["input", "all"])
def test_what_changes_inside_of_a_layer_is_tried_anew(keep):
    """A layer that keeps its graph runs as it is, in which nothing else would find tokens that it mixes."""
    model = streamgrad.enable(tiny_model("llama"), keep=keep)
    shared(model, RIGHT)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (args[0] + 0.5 * args[0].roll(1, 1),))
    with pytest.raises(ValueError, match="cannot share the beginnings"):
        shared(model, RIGHT)
