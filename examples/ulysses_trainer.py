"""transformers' Trainer on sequences that the GPUs share, through Accelerate's own configuration of it (DeepSpeed Ulysses):

    accelerate launch --config_file examples/accelerate_configs/ulysses.yaml examples/ulysses_trainer.py Qwen/Qwen3-0.6B

It trains on random tokens; put your own data in their place. The lines that matter for streamgrad are marked.
"""

from __future__ import annotations

import argparse
import os

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

import streamgrad
from streamgrad.parallel import check_launch, make_zero3_leaves


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", help="name or folder of a causal language model")
    parser.add_argument("--length", type=int, default=65_536, help="tokens of a sequence, a multiple of the ranks that share it")
    parser.add_argument("--chunk-size", type=int, default=1024, help="tokens of one rank that a layer processes at a time")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--clipping", type=float, default=1.0, help="of gradients, as in the configuration")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--output", default="trained", help="folder for the trained model")
    options = parser.parse_args()

    settings = TrainingArguments(
        output_dir=options.output,
        per_device_train_batch_size=1,
        max_steps=options.steps,
        optim="sgd",
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=options.clipping,
        bf16=os.environ.get("ACCELERATE_MIXED_PRECISION") == "bf16",  # as in the configuration: both have to say it
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    check_launch(settings.distributed_state)  # <- without GPUs, Accelerate would leave out the engine and say nothing
    model = AutoModelForCausalLM.from_pretrained(options.model, attn_implementation="sdpa")
    streamgrad.enable(model, chunk_size=options.chunk_size)  # <- it finds the ranks that share a sequence
    make_zero3_leaves(model)  # <- before the Trainer's engine is made

    seeded = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (options.steps, options.length), generator=seeded).tolist()
    rows = {"input_ids": ids, "labels": ids, "position_ids": [list(range(options.length))] * options.steps}
    trainer = Trainer(model=model, args=settings, train_dataset=Dataset.from_dict(rows), data_collator=default_data_collator)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.print("losses", *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))


if __name__ == "__main__":
    main()
