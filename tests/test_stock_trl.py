"""TRL's own trainers, unchanged, given a model that was enabled: the same losses, metrics and gradient norms as without."""

from __future__ import annotations

import random

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import streamgrad
from tiny import VOCABULARY, tiny_model

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}
TIMES = ("runtime", "per_second", "num_tokens", "epoch", "step", "total_flos")


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t1", bos_token="t1", eos_token="t2")


def sentences(count: int, shortest: int) -> list[str]:
    draw = random.Random(shortest)
    return [" ".join(f"t{draw.randint(3, VOCABULARY - 1)}" for _ in range(shortest + i)) for i in range(count)]


def settings(kind: type, tmp_path, **options):
    return kind(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False, seed=1, **options,
    )  # fmt: skip


def lora() -> LoraConfig:
    return LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def history(trainer) -> list[dict[str, float]]:
    """Everything that was logged, but for times and counters."""
    trainer.train()
    return [
        {name: value for name, value in entry.items() if not any(part in name for part in TIMES)}
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


def assert_follows_stock(kind: type, arguments, method: str, *, metric: str, with_reference: bool = False, **inputs) -> None:
    """Three steps of the trainer `kind` with a stock model and with an enabled one, from the same weights and seed."""
    histories = []
    for streamed in (False, True):
        model = tiny_model("qwen3", dtype=torch.float32)
        extra = {"peft_config": lora()} if method == "lora" else {}
        if with_reference:
            extra["ref_model"] = tiny_model("qwen3", dtype=torch.float32, seed=3)
        if streamed:
            for network in (model, extra.get("ref_model")):
                if network is not None:
                    streamgrad.enable(network, **OPTIONS)
        torch.manual_seed(0)
        histories.append(history(kind(model=model, args=arguments, processing_class=tokenizer(), **inputs, **extra)))
    expected, actual = histories
    assert len(actual) == len(expected) == 3
    assert {"loss", "grad_norm", metric} <= expected[0].keys()
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-5, abs=2e-6)


@pytest.mark.parametrize("options", [{}, {"loss_type": "nll"}, {"packing": True, "max_length": 16}], ids=str)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_sft(tmp_path, method, options):
    dataset = Dataset.from_dict({"text": sentences(8, 12)})
    arguments = settings(SFTConfig, tmp_path, **options)
    assert_follows_stock(SFTTrainer, arguments, method, metric="entropy", train_dataset=dataset)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_dpo(tmp_path, method):
    """Pairs of different lengths; the reference is a model of its own, or the policy without its adapters."""
    dataset = Dataset.from_dict({"prompt": sentences(8, 5), "chosen": sentences(8, 6), "rejected": sentences(8, 9)})
    arguments = settings(DPOConfig, tmp_path)
    reference = method == "full"
    assert_follows_stock(DPOTrainer, arguments, method, metric="rewards/margins", with_reference=reference, train_dataset=dataset)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_grpo(tmp_path, method):
    """Generation under the same seed, old log-probabilities and two updates from each batch of completions."""
    options = {"num_generations": 4, "max_completion_length": 10, "num_iterations": 2, "beta": 0.0}
    dataset = Dataset.from_dict({"prompt": sentences(8, 5)})
    arguments = settings(GRPOConfig, tmp_path, **options)
    assert_follows_stock(GRPOTrainer, arguments, method, metric="reward", reward_funcs=_reward, train_dataset=dataset)


def _reward(completions, **_) -> list[float]:
    return [completion.count("t7") + 0.1 * len(completion) for completion in completions]
