"""TRL's own trainers, unchanged, given a model that was enabled: the same losses, metrics and gradient norms as without."""

from __future__ import annotations

import pytest
import torch
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import streamgrad
from gradients import more, no_float32
from tiny import tiny_model
from trainer_kinds import model_kind
from trainers import history, judged, lora, pairs, prompts, reward, settings, texts, tokenizer, trl_on_full_logits

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}


def assert_follows_stock(
    kind: type, arguments, method: str, *, metric: str, other: str | None = None, model_options=None, **inputs
) -> None:
    """Three steps of the trainer `kind` with a stock model and with an enabled one, from the same weights and seed.

    `other` is the name of the argument for a reference or a teacher, which is enabled too.
    """
    histories = []
    for streamed in (False, True):
        model = tiny_model("qwen3", **model_options or {})
        extra = {"peft_config": lora()} if method == "lora" else {}
        others = {} if other is None else {other: tiny_model("qwen3", seed=3)}
        if streamed:
            for network in (model, *others.values()):
                streamgrad.enable(network, **OPTIONS)
        torch.manual_seed(0)
        with no_float32(), trl_on_full_logits():
            histories.append(
                history(kind(model=model, args=arguments, processing_class=tokenizer(), **inputs, **extra, **others))
            )
    expected, actual = histories
    assert len(actual) == len(expected) == 3
    assert {"loss", "grad_norm", metric} <= expected[0].keys()
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-11)


# Adapters take the same way through stock TRL; test_trl_losses.py compares them for every trainer.
METHODS = ["full", pytest.param("lora", marks=more)]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"loss_type": "nll"}, marks=more), {"packing": True, "max_length": 16}], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_sft(tmp_path, method, options):
    arguments = settings(SFTConfig, tmp_path, **options)
    assert_follows_stock(SFTTrainer, arguments, method, metric="entropy", train_dataset=texts())


@pytest.mark.parametrize("method", METHODS)
def test_dpo(tmp_path, method):
    """Pairs of different lengths; the reference is a model of its own, or the policy without its adapters."""
    arguments = settings(DPOConfig, tmp_path)
    reference = "ref_model" if method == "full" else None
    assert_follows_stock(DPOTrainer, arguments, method, metric="rewards/margins", other=reference, train_dataset=pairs())


@pytest.mark.parametrize("method", METHODS)
def test_grpo(tmp_path, method):
    """Generation under the same seed, old log-probabilities and two updates from each batch of completions."""
    options = {"num_generations": 4, "max_completion_length": 10, "num_iterations": 2, "beta": 0.0}
    arguments = settings(GRPOConfig, tmp_path, **options)
    assert_follows_stock(GRPOTrainer, arguments, method, metric="reward", reward_funcs=reward, train_dataset=prompts())


@pytest.mark.parametrize("method", METHODS)
def test_kto(tmp_path, method):
    reference = "ref_model" if method == "full" else None
    arguments = settings(KTOConfig, tmp_path)
    assert_follows_stock(KTOTrainer, arguments, method, metric="rewards/margins", other=reference, train_dataset=judged())


@pytest.mark.parametrize("method", METHODS)
def test_rloo(tmp_path, method):
    arguments = settings(RLOOConfig, tmp_path, num_generations=4, max_completion_length=10, num_iterations=2, beta=0.0)
    assert_follows_stock(RLOOTrainer, arguments, method, metric="reward", reward_funcs=reward, train_dataset=prompts())


@pytest.mark.parametrize("method", METHODS)
def test_reward(tmp_path, method):
    arguments, options = settings(RewardConfig, tmp_path), model_kind("reward")
    assert_follows_stock(RewardTrainer, arguments, method, metric="margin", model_options=options, train_dataset=pairs())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beta", [0.5, *(pytest.param(beta, marks=more) for beta in (0.0, 1.0))])
def test_distillation(tmp_path, method, beta):
    """On completions of the student, from forward to reverse KL; TRL's head holds tiles of logits alone."""
    arguments = settings(DistillationConfig, tmp_path, max_completion_length=10, beta=beta)
    inputs = {"other": "teacher_model", "train_dataset": prompts()}
    assert_follows_stock(DistillationTrainer, arguments, method, metric="entropy", **inputs)
