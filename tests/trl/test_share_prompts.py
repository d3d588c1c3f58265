"""Trainers whose rows have equal prompts compute them once, and log and learn what separate rows would."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, GRPOConfig

from families import small_model
from gradients import assert_same_step, no_float32
from lora import with_lora
from streamgrad import StreamConfig
from streamgrad.hf.discover import decoder_layers
from streamgrad.trl import StreamDPOTrainer, StreamGRPOTrainer
from streamgrad.trl.scoring import add_streamed_head
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


# --- batches that only look alike -----------------------------------------------------------------------------------------


def scored(model, share_prompts, **inputs):
    """Scores of a model, and the shapes of what went through its first layer."""
    add_streamed_head(model, StreamConfig(chunk_size=4), share_prompts=share_prompts)
    seen = []
    decoder_layers(model.get_decoder())[0].register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[:2])))
    output = model(**inputs, fused_lm_head=True)
    return output.log_probs, output.label_mask, seen[-1]


def same_prompts():
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[:, :5] = ids[0, :5]
    return ids, ids.masked_fill(torch.arange(9) < 5, -100)


@pytest.mark.parametrize("case", ["another token", "padding predicts", "all as usual"])
def test_labels_that_are_not_the_next_tokens_are_scored_in_separate_rows(case):
    ids, labels = same_prompts()
    mask = torch.ones_like(ids)
    if case == "another token":
        labels[0, 7] = 11
    if case == "padding predicts":
        mask[1, 0], labels[1, 1] = 0, ids[1, 1]
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with no_float32():
        shared, is_scored, shape = scored(tiny_model("llama"), True, **inputs)
        expected, expected_mask, _ = scored(tiny_model("llama"), False, **inputs)
    assert shape == ((1, 13) if case == "all as usual" else (2, 9))
    assert torch.equal(is_scored, expected_mask)
    torch.testing.assert_close(shared * is_scored, expected * is_scored, rtol=1e-10, atol=1e-12)


def test_a_model_that_cannot_share_is_trained_as_before():
    """BioGPT makes a mask of its own, which only a run of the model shows."""
    ids, labels = same_prompts()
    with no_float32(), pytest.warns(UserWarning, match="computed in every row: .*its mask has other rules"):
        log_probs, _, shape = scored(small_model("biogpt"), True, input_ids=ids, labels=labels)
    assert shape == (2, 9) and log_probs.shape == (2, 8)


def test_learned_positions_share_what_has_the_same_padding():
    ids, _ = same_prompts()
    ids = torch.cat([ids, torch.nn.functional.pad(ids[:, :-2], (2, 0))])  # the same two rows, two tokens later
    mask = torch.ones_like(ids)
    mask[2:, :2] = 0
    labels = ids.masked_fill(torch.arange(9) < torch.tensor([5, 5, 7, 7])[:, None], -100)
    torch.manual_seed(0)
    model = small_model("gpt2")
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with no_float32():
        expected, _, _ = scored(deepcopy(model), False, **inputs)
        shared, is_scored, shape = scored(model, True, **inputs)
    assert shape == (1, 5 + 4 + 4 + 5 + 2 + 2)
    torch.testing.assert_close(shared * is_scored, expected * is_scored, rtol=1e-10, atol=1e-12)
