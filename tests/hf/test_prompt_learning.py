"""PEFT's trained prompts: those that are tokens are streamed exactly, and keys without tokens are refused by their name."""

from __future__ import annotations

import peft
import pytest
import torch

import streamgrad
from gradients import assert_same_step, no_float32, run_step
from tiny import tiny_model, tokens

PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "P-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
    "multitask": lambda: peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, num_tasks=2),
}


def prompted(config: peft.PeftConfig) -> peft.PeftModel:
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_model("qwen3"), config).double()


def batch(**more) -> dict:
    ids = tokens(2, 23)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} | more


def untouched(model: peft.PeftModel) -> bool:
    return all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_of_tokens_are_exact(kind):
    model = prompted(PROMPTS[kind]())
    inputs = batch(task_ids=torch.tensor([0, 1])) if kind == "multitask" else batch()
    with no_float32():
        plain = run_step(model, inputs)
        for chunk_size in (1, 7, 64):
            streamgrad.enable(model, chunk_size=chunk_size)
            assert_same_step(run_step(model, inputs), plain, 1e-10)
            streamgrad.disable(model)


@pytest.mark.parametrize("projected", [False, True])
def test_prefix_tuning_is_refused_by_its_name(projected):
    model = prompted(
        peft.PrefixTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=projected, encoder_hidden_size=8 if projected else None
        )
    )
    streamgrad.enable(model)
    with pytest.raises(ValueError, match=r"past_key_values holds 3 tokens.*PEFT's prefix tuning.*streamgrad.disable"):
        model(**batch())
    assert untouched(model)
    streamgrad.disable(model)
    run_step(model, batch())
    assert not untouched(model)


def test_context_aware_prompt_tuning_is_refused_for_its_logits():
    model = prompted(
        peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[5, 6, 7], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 4])
    )
    streamgrad.enable(model)
    with pytest.raises(AttributeError, match="streamgrad makes no logits"):
        model(**batch(input_type_mask=torch.full((2, 23), 4)))
    assert untouched(model)
