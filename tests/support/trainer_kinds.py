"""TRL's trainers and ours, built alike: `build(name, ...)` for SFT, DPO and GRPO."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from streamgrad import StreamConfig
from streamgrad.trl import StreamDPOTrainer, StreamGRPOTrainer, StreamSFTTrainer
from trainers import completions, lora, pairs, prompts, reward, settings, tokenizer

STREAM = StreamConfig(chunk_size=7, head_chunk_size=5)
# Trainer of TRL's, ours, arguments, dataset, and what GRPO alone takes.
KINDS = {
    "sft": (SFTTrainer, StreamSFTTrainer, SFTConfig, {}, completions, {}),
    "dpo": (DPOTrainer, StreamDPOTrainer, DPOConfig, {}, pairs, {}),
    "grpo": (
        GRPOTrainer,
        StreamGRPOTrainer,
        GRPOConfig,
        {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8, "beta": 0.1, "num_iterations": 2},
        prompts,
        {"reward_funcs": reward},
    ),
}


def build(name: str, tmp_path, model, *, streamed: bool, method: str = "full", stream=STREAM, extra=None, **options):
    stock, ours, config, defaults, dataset, inputs = KINDS[name]
    arguments = settings(config, tmp_path, **defaults | options)
    more = {"peft_config": lora()} if method == "lora" else {}
    if "eval_strategy" in options:
        more["eval_dataset"] = dataset(4)
    return (ours if streamed else stock)(
        model=model, args=arguments, processing_class=tokenizer(), train_dataset=dataset(), **inputs, **more, **(extra or {}),
        **({"stream": stream} if streamed else {}),
    )  # fmt: skip


def load(saved: str, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
