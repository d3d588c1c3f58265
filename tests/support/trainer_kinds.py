"""TRL's trainers and ours, built alike: `build(name, ...)` for every objective."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
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

from streamgrad import StreamConfig
from streamgrad.trl import (
    StreamDistillationTrainer,
    StreamDPOTrainer,
    StreamGRPOTrainer,
    StreamKTOTrainer,
    StreamRewardTrainer,
    StreamRLOOTrainer,
    StreamSFTTrainer,
)
from tiny import tiny_model
from trainers import completions, judged, lora, pairs, prompts, reward, settings, tokenizer

STREAM = StreamConfig(chunk_size=7, head_chunk_size=5)
_SAMPLING = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.1, "num_iterations": 2}
# Trainer of TRL's, ours, arguments, their defaults, dataset, and what only those that sample take.
KINDS = {
    "sft": (SFTTrainer, StreamSFTTrainer, SFTConfig, {}, completions, {}),
    "dpo": (DPOTrainer, StreamDPOTrainer, DPOConfig, {}, pairs, {}),
    "grpo": (GRPOTrainer, StreamGRPOTrainer, GRPOConfig, _SAMPLING, prompts, {"reward_funcs": reward}),
    "kto": (KTOTrainer, StreamKTOTrainer, KTOConfig, {}, judged, {}),
    "reward": (RewardTrainer, StreamRewardTrainer, RewardConfig, {}, pairs, {}),
    "rloo": (RLOOTrainer, StreamRLOOTrainer, RLOOConfig, _SAMPLING, prompts, {"reward_funcs": reward}),
    "distillation": (
        DistillationTrainer, StreamDistillationTrainer, DistillationConfig, {"max_completion_length": 8}, prompts, {},
    ),
}  # fmt: skip
# Those that score tokens, that take a reference, and that sample completions.
SCORING = [name for name in KINDS if name not in ("reward", "distillation")]
REFERENCED, SAMPLED = ("dpo", "kto"), ("grpo", "rloo", "distillation")


def model_kind(name: str) -> dict:
    """Which class of model the trainer takes, as `tiny_model` is told."""
    return {"kind": AutoModelForSequenceClassification, "num_labels": 1} if name == "reward" else {}


def build(name: str, tmp_path, model, *, streamed: bool, method: str = "full", stream=STREAM, extra=None, **options):
    stock, ours, config, defaults, dataset, inputs = KINDS[name]
    arguments = settings(config, tmp_path, **defaults | options)
    more = {"peft_config": lora(modules_to_save=["score"] if name == "reward" else None)} if method == "lora" else {}
    if name == "distillation":
        more["teacher_model"] = tiny_model("qwen3", seed=3, dtype=getattr(model, "dtype", torch.float32))
    if "eval_strategy" in options:
        more["eval_dataset"] = dataset(4)
    return (ours if streamed else stock)(
        model=model, args=arguments, processing_class=tokenizer(), train_dataset=dataset(), **inputs, **more | (extra or {}),
        **({"stream": stream} if streamed else {}),
    )  # fmt: skip


def load(saved: str, dtype=torch.float64, *, name: str = "sft"):
    options = model_kind(name)
    torch.manual_seed(0)  # a head that is not among the saved weights is drawn
    return options.pop("kind", AutoModelForCausalLM).from_pretrained(saved, dtype=dtype, **options)
