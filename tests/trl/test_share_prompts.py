"""Trainers whose rows have equal prompts compute them once, and log and learn what separate rows would."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, GRPOConfig

from gradients import assert_same_step, no_float32
from lora import with_lora
from streamgrad import StreamConfig
from streamgrad.trl import StreamDPOTrainer, StreamGRPOTrainer
from tiny import tiny_model
from trainers import first_step, pairs, prompts, reward, settings, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

STREAM = StreamConfig(chunk_size=7, head_chunk_size=6)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A function that loads a tiny model from where trainers find it, too."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return lambda **changes: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, **changes)


def step_of(kind, arguments, share_prompts, model, **inputs):
    """The first step of a trainer, its metrics, and the tokens that each pass took through a layer."""
    with no_float32():
        trainer = kind(
            model=model(),
            args=arguments,
            processing_class=tokenizer(),
            stream=STREAM,
            share_prompts=share_prompts,
            **inputs,
        )
        layer = trainer.accelerator.unwrap_model(trainer.model).get_decoder().layers[0]
        seen = []
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0].shape[:2].numel()), with_kwargs=True)
        return *first_step(trainer), seen


@pytest.mark.parametrize("method", ["full", "lora"])
def test_dpo(tmp_path, method, saved):
    arguments = settings(DPOConfig, tmp_path, per_device_train_batch_size=3)
    model = (lambda: with_lora(saved())) if method == "lora" else saved
    shared, shared_metrics, few = step_of(StreamDPOTrainer, arguments, True, model, train_dataset=pairs())
    expected, expected_metrics, many = step_of(StreamDPOTrainer, arguments, False, model, train_dataset=pairs())
    assert_same_step(shared, expected, 1e-10)
    assert shared_metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-9)
    assert max(few) < 0.9 * max(many)


def test_grpo(tmp_path, saved):
    arguments = settings(
        GRPOConfig, tmp_path, per_device_train_batch_size=4, num_generations=4, max_completion_length=5, beta=0.1
    )
    inputs = {"train_dataset": prompts(), "reward_funcs": reward}
    shared, shared_metrics, few = step_of(StreamGRPOTrainer, arguments, True, saved, **inputs)
    expected, expected_metrics, many = step_of(StreamGRPOTrainer, arguments, False, saved, **inputs)
    assert_same_step(shared, expected, 1e-10)
    assert shared_metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-9)
    assert min(few) < 0.7 * max(many)


def test_dropout_is_said_and_left_to_separate_rows(tmp_path, saved):
    arguments = settings(DPOConfig, tmp_path, per_device_train_batch_size=2, disable_dropout=False)
    with pytest.warns(UserWarning, match="equal prompts are computed in every row: dropout is on"):
        step_of(StreamDPOTrainer, arguments, True, lambda: saved(attention_dropout=0.1), train_dataset=pairs())


def test_a_batch_without_equal_prompts_runs_as_before(tmp_path, saved):
    rows = [{"prompt": f"t{i} t{i + 1}", "chosen": " t3 t4", "rejected": " t5"} for i in (5, 9)]
    arguments = settings(DPOConfig, tmp_path, per_device_train_batch_size=1)
    step, _, seen = step_of(StreamDPOTrainer, arguments, True, saved, train_dataset=Dataset.from_list(rows))
    assert all(torch.isfinite(gradient).all() for gradient in step.gradients.values() if gradient is not None)
    assert seen
