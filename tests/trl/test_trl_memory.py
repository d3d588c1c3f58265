"""No tensor of (tokens x vocabulary) elements in a run of TRL's trainers with streamed models: each allocation is counted."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, KTOConfig, RLOOConfig, SFTConfig

from gradients import more
from streamgrad import StreamConfig
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.trl import StreamDPOTrainer, StreamGRPOTrainer, StreamKTOTrainer, StreamRLOOTrainer, StreamSFTTrainer
from tiny import tiny_model
from trainers import lora, reward, sentences, settings, tokenizer, trl_on_full_logits

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

# A vocabulary large beside everything else: the head's weight is (VOCABULARY x 24).
VOCABULARY, TOKENS, CHUNK = 2048, 36, 6


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("policy")
    # Its end token is not among the words, so completions are as long as they may be.
    tiny_model("qwen3", dtype=torch.float32, vocab_size=VOCABULARY, eos_token_id=VOCABULARY - 1).save_pretrained(path)
    return str(path)


def long(count: int, *columns: str) -> Dataset:
    return Dataset.from_dict({column: sentences(count, TOKENS) for column in columns})


def run(kind, config, saved: str, tmp_path, dataset, *, method="full", streamed=True, inputs=None, **options) -> LiveBytes:
    """Construction, one step of two micro-batches, evaluation: the most that any one tensor took."""
    arguments = settings(config, tmp_path, max_steps=1, eval_strategy="steps", eval_steps=1, **options)
    extra = {"stream": StreamConfig(chunk_size=16, head_chunk_size=CHUNK)} if streamed else {}
    if method == "lora":
        extra["peft_config"] = lora()
    with LiveBytes() as live:
        trainer = kind(
            model=AutoModelForCausalLM.from_pretrained(saved), args=arguments, processing_class=tokenizer(),
            train_dataset=dataset(4), eval_dataset=dataset(4), **inputs or {}, **extra,
        )  # fmt: skip
        trainer.train()
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    return live


RUNS = {
    "sft": (StreamSFTTrainer, SFTConfig, lambda count: long(count, "text"), {}),
    "sft, smoothed": (StreamSFTTrainer, SFTConfig, lambda count: long(count, "text"), {"label_smoothing_factor": 0.1}),
    "dpo": (StreamDPOTrainer, DPOConfig, lambda count: long(count, "prompt", "chosen", "rejected"), {"use_weighting": True}),
    "dpo, precomputed": (
        StreamDPOTrainer,
        DPOConfig,
        lambda count: long(count, "prompt", "chosen", "rejected"),
        {"precompute_ref_log_probs": True},
    ),
    "grpo": (
        StreamGRPOTrainer,
        GRPOConfig,
        lambda count: long(count, "prompt"),
        {
            "num_generations": 2, "max_completion_length": TOKENS, "beta": 0.1, "num_iterations": 2, "entropy_coef": 0.1,
            "per_device_eval_batch_size": 4, "inputs": {"reward_funcs": reward},
        },
    ),
    "kto": (
        StreamKTOTrainer,
        KTOConfig,
        lambda count: long(count, "prompt", "completion").add_column("label", [i % 2 == 0 for i in range(count)]),
        {},
    ),
    "rloo": (
        StreamRLOOTrainer,
        RLOOConfig,
        lambda count: long(count, "prompt"),
        {
            "num_generations": 2, "max_completion_length": TOKENS, "beta": 0.1, "num_iterations": 2,
            "per_device_eval_batch_size": 4, "inputs": {"reward_funcs": reward},
        },
    ),
}  # fmt: skip


CASES = [*((name, "full") for name in RUNS), ("dpo", "lora")]
QUICK = [("sft", "full"), ("dpo", "full"), ("grpo", "full")]


@pytest.mark.parametrize(("name", "method"), [pytest.param(*case, marks=() if case in QUICK else more) for case in CASES])
def test_no_tensor_of_tokens_times_vocabulary(tmp_path, name, method, saved):
    """Policy pass, reference pass, old log-probabilities, generation, metrics, optimizer and evaluation."""
    kind, config, dataset, options = RUNS[name]
    size, shape = run(kind, config, saved, tmp_path, dataset, method=method, **options).largest
    assert 4 * CHUNK * VOCABULARY <= size < 4 * TOKENS * VOCABULARY, f"a tensor of shape {shape}"


def test_the_count_would_see_full_logits(tmp_path, saved):
    with trl_on_full_logits():
        live = run(
            DPOTrainer, DPOConfig, saved, tmp_path, lambda count: long(count, "prompt", "chosen", "rejected"), streamed=False
        )
    assert live.largest[0] >= 4 * TOKENS * VOCABULARY
