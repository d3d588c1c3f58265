"""TRL's trainers with streamed models through whole runs: 20 steps as stock takes them, evaluation, checkpoints, generation."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
import trl.trainer.sft_trainer

import streamgrad
from gradients import more, no_float32, relative_error
from streamgrad import StreamConfig
from streamgrad.hf.step_plan import Planner
from tiny import tiny_model
from trainer_kinds import KINDS, SAMPLED, SCORING, STREAM, build, load
from trainers import (
    first_step,
    history,
    lora,
    prompts,
    tokenizer,
    trl_on_full_logits,
)

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    """A model and tokenizer on disk: trainers load models by name, and DPO and GRPO their references."""
    path = tmp_path_factory.mktemp("policy")
    tiny_model("qwen3").save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


SOME = [pytest.param(name, marks=() if name in ("sft", "dpo", "grpo") else more) for name in KINDS]


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=more)])
@pytest.mark.parametrize("name", SOME)
def test_many_steps(tmp_path, name, method, saved):
    """Losses, metrics, gradient norms, evaluations and final weights, with accumulation and TRL's default of checkpointing."""
    runs = []
    for streamed in (False, True):
        with no_float32(), trl_on_full_logits():
            trainer = build(
                name, tmp_path, load(saved, name=name), streamed=streamed, method=method, max_steps=6, learning_rate=1e-3,
                eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4,
            )  # fmt: skip
            assert trainer.args.gradient_checkpointing
            runs.append((history(trainer), dict(trainer.model.named_parameters())))
    (expected, expected_weights), (actual, weights) = runs
    assert len(actual) == len(expected) == 8
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9)
    assert sum("eval_loss" in entry for entry in actual) == 2
    assert expected[0]["loss"] != expected[-2]["loss"]
    start = load(saved).get_parameter("model.layers.0.mlp.up_proj.weight")
    if method == "full":
        assert relative_error(weights["model.layers.0.mlp.up_proj.weight"], start) > 1e-3, "nothing was trained"
    for key, weight in expected_weights.items():
        assert relative_error(weights[key], weight) < 1e-7


@pytest.mark.parametrize("name", SOME)
def test_a_run_can_be_resumed(tmp_path, name, saved):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    trainer = build(name, tmp_path / "whole", load(saved, name=name), streamed=True, **options)
    expected = history(trainer)
    resumed = build(name, tmp_path / "resumed", load(saved, name=name), streamed=True, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    again = [entry for entry in resumed.state.log_history if "loss" in entry and entry["step"] > 2]
    if name not in SAMPLED:  # completions are sampled anew
        assert [entry["loss"] for entry in again] == pytest.approx([entry["loss"] for entry in expected[2:]], rel=1e-6)
    assert len(again) == 2
    plain = load(str(tmp_path / "whole" / "checkpoint-4"), name=name)
    for key, weight in trainer.model.state_dict().items():
        assert torch.equal(plain.state_dict()[key], weight), key


@pytest.mark.parametrize("name", SOME)
def test_models_given_by_name_are_streamed(tmp_path, name, saved):
    trainer = build(name, tmp_path, saved, streamed=True, extra={"teacher_model": saved} if name == "distillation" else {})
    assert streamgrad.is_enabled(trainer.model)
    if name not in ("sft", "reward"):
        other = trainer.teacher_model if name == "distillation" else trainer.ref_model
        assert other is not trainer.model and streamgrad.is_enabled(other)
    assert len(history(trainer)) == 3


def test_an_enabled_model_keeps_its_configuration(tmp_path, saved):
    model = streamgrad.enable(load(saved), chunk_size=3, head_chunk_size=2)
    trainer = build("sft", tmp_path, model, streamed=True, stream=None)
    assert trainer.model.forward.stream.config.head_chunk_size == 2
    with pytest.raises(ValueError, match="already enabled with .*chunk_size=3"):
        build("sft", tmp_path, model, streamed=True, stream=StreamConfig(chunk_size=4))
    assert trl.trainer.sft_trainer.add_fused_lm_head is trl.trainer.utils.add_fused_lm_head, "not restored after an error"


@pytest.mark.parametrize("enabled", [False, True])
def test_a_trainer_whose_model_was_disabled_says_so(tmp_path, saved, enabled):
    trainer = build("sft", tmp_path, load(saved), streamed=True)
    streamgrad.disable(trainer.model)
    if enabled:
        streamgrad.enable(trainer.model)
    with pytest.raises(
        ValueError, match=r"was disabled, or enabled anew, after this StreamSFTTrainer was made.* or a SFTTrainer"
    ):
        trainer.train()


def test_a_copy_scores_with_its_own_weights(tmp_path, saved):
    trainer = build("sft", tmp_path, load(saved), streamed=True)
    inputs = next(iter(trainer.get_train_dataloader()))
    before = trainer.model(**inputs, fused_lm_head=True).loss
    twin = copy.deepcopy(trainer.model)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    assert torch.equal(twin(**inputs, fused_lm_head=True).loss, before)
    assert trainer.model(**inputs, fused_lm_head=True).loss != before


class Calls:
    """How many tokens a module was given, call by call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.tokens: list[int] = []
        module.register_forward_pre_hook(lambda _, args: self.tokens.append(args[0].shape[1]))


def test_layers_run_twice_a_step(tmp_path, saved):
    """Once forward and once in backward: checkpointing, which TRL turns on again after every reference pass, adds nothing."""
    trainer = build("dpo", tmp_path, load(saved), streamed=True, method="lora", max_steps=3, gradient_accumulation_steps=1)
    model = trainer.model.get_base_model()
    calls = Calls(model.model.layers[0].mlp)
    steps = []
    whole = trainer.training_step

    def training_step(*args, **kwargs):
        loss = whole(*args, **kwargs)
        steps.append(calls.tokens[:])
        calls.tokens.clear()
        return loss

    trainer.training_step = training_step
    trainer.train()
    assert len(steps) == 3
    for tokens in steps[1:]:  # in the first one layers are tried, with their adapters and without
        assert max(tokens) == STREAM.chunk_size
        longest = sum(tokens) // 3
        # Policy, reference, policy again.
        assert sum(tokens) == 3 * longest and len(tokens) == 3 * -(-longest // STREAM.chunk_size)


def test_generation_is_not_streamed(tmp_path, saved):
    """A prompt at once, then one token a call, with the cache: as many calls as stock makes, on as many tokens."""
    counts = []
    for streamed in (False, True):
        trainer = build("grpo", tmp_path, load(saved), streamed=streamed)
        trainer.model.train()
        torch.manual_seed(0)
        calls = Calls(trainer.model.model.layers[0].mlp)
        trainer._generate([example["prompt"] for example in prompts(4)])
        counts.append(Counter(calls.tokens))
    assert counts[0] == counts[1]
    assert counts[1][1] >= 5


def test_bfloat16_autocast(tmp_path, saved):
    """TRL's default precision. What is rounded on the way differs, so losses agree to its precision."""
    for name in ("sft", "dpo"):
        ours, theirs = (
            history(build(name, tmp_path, load(saved, torch.float32), streamed=streamed, bf16=True)) for streamed in (True, False)
        )
        for mine, stock in zip(ours, theirs, strict=True):
            assert mine["loss"] == pytest.approx(stock["loss"], rel=2e-2)
            assert mine["entropy"] == pytest.approx(stock["entropy"], rel=1e-2)
            assert mine["grad_norm"] == pytest.approx(stock["grad_norm"], rel=5e-2)


def test_a_head_that_peft_saves_along(tmp_path):
    """`modules_to_save=["lm_head"]` trains a copy of the head beside the adapters."""
    results = []
    for streamed in (False, True):
        with no_float32(), trl_on_full_logits():
            trainer = build(
                "sft", tmp_path, tiny_model("llama"), streamed=streamed, extra={"peft_config": lora(modules_to_save=["lm_head"])}
            )
            results.append(first_step(trainer)[0])
    head = [name for name, gradient in results[0].gradients.items() if "lm_head" in name and gradient is not None]
    assert len(head) == 1 and "modules_to_save" in head[0]
    for name, gradient in results[0].gradients.items():
        assert (gradient is None) == (results[1].gradients[name] is None)
        assert gradient is None or relative_error(results[1].gradients[name], gradient) < 1e-10


def test_a_users_own_functions_get_logits(tmp_path, saved):
    """As in stock TRL, which says that this costs a forward pass with full logits."""
    seen = []

    def loss_of(outputs, labels, num_items_in_batch=None):
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {"top": float(prediction.predictions.max())}

    functions = {"compute_loss_func": loss_of, "compute_metrics": metrics}
    options = {"eval_strategy": "steps", "eval_steps": 3, "extra": functions}
    with no_float32(), trl_on_full_logits():
        ours, theirs = (history(build("sft", tmp_path, load(saved), streamed=streamed, **options)) for streamed in (True, False))
    assert "eval_top" in ours[-1] and len(seen) == 2
    for mine, stock in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(stock, rel=1e-7)


def test_predict(tmp_path, saved):
    with no_float32(), trl_on_full_logits():
        ours, theirs = (
            (trainer := build("sft", tmp_path, load(saved), streamed=streamed)).predict(trainer.train_dataset)
            for streamed in (True, False)
        )
    assert ours.predictions.shape[-1] == 61
    torch.testing.assert_close(torch.tensor(ours.predictions), torch.tensor(theirs.predictions))
    assert ours.metrics["test_loss"] == pytest.approx(theirs.metrics["test_loss"], rel=1e-9)


@pytest.mark.parametrize("name", SCORING)
def test_a_memory_budget_counts_the_head(tmp_path, name, saved, monkeypatch):
    """What is planned for the layers leaves room for what scoring will hold; a budget that cannot do is refused beforehand."""
    seen = []
    plan = Planner.plan
    monkeypatch.setattr(Planner, "plan", lambda self, call, costs: seen.append(call.head) or plan(self, call, costs))
    stream = StreamConfig(chunk_size=7, head_chunk_size=5, memory_budget="64MiB")
    first_step(build(name, tmp_path, load(saved), streamed=True, stream=stream))
    vocabulary, width = 61, 24
    assert seen and all(head.bytes_at_work(1000) > 8 * vocabulary * (width + 2 * 5) for head in seen)
    stream = StreamConfig(memory_budget="100KB")
    with pytest.raises(ValueError, match="memory_budget='100KB' cannot hold"):
        first_step(build(name, tmp_path, load(saved), streamed=True, stream=stream))
