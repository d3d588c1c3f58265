"""A plain `transformers.Trainer` given an enabled model: the same losses and the same weights as without."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments

import streamgrad
from gradients import more, no_float32, worst_gradient_error
from lora import with_lora
from tiny import tiny_model, tokens

DATASET = [{"input_ids": tokens(1, 20, seed=i)[0], "labels": tokens(1, 20, seed=i)[0], "unused": i} for i in range(8)]


def train(tmp_path, *, streamed: bool, lora: bool, **options) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = tiny_model("qwen3")
    if lora:
        model = with_lora(model)
    if streamed:
        streamgrad.enable(model, chunk_size=7, head_chunk_size=5)
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=1, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=DATASET, eval_dataset=DATASET[:2])
    with no_float32():
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate()["eval_loss"])
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # torch's data loader, on a machine without an accelerator
@pytest.mark.parametrize(
    ("lora", "gradient_checkpointing"),
    [(False, False), (True, True), pytest.param(False, True, marks=more), pytest.param(True, False, marks=more)],
)
def test_trainer_follows_stock(tmp_path, lora, gradient_checkpointing):
    options = {"lora": lora, "gradient_checkpointing": gradient_checkpointing}
    stock_losses, stock_weights = train(tmp_path, streamed=False, **options)
    losses, weights = train(tmp_path, streamed=True, **options)
    assert len(losses) == 4
    assert losses == pytest.approx(stock_losses, rel=1e-9)
    worst, name = worst_gradient_error(weights, stock_weights)
    assert worst < 1e-9, name
