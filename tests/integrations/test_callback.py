"""`StreamgradCallback`: trainers of transformers and TRL train as without it, and log the plan and the peak of memory."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

import streamgrad
from gradients import more, no_float32, worst_gradient_error
from lora import with_lora
from streamgrad.hf.patching import InstalledForward
from streamgrad.integrations import StreamgradCallback
from tiny import tiny_model, tokens
from trainers import history, settings, texts, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # torch's data loader, without an accelerator

DATASET = [{"input_ids": tokens(1, 20, seed=i)[0], "labels": tokens(1, 20, seed=i)[0]} for i in range(8)]


class Reporter(TrainerCallback):
    """What Weights & Biases and TensorBoard are to a trainer: a callback that comes before the user's."""

    def __init__(self) -> None:
        self.reported: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.reported.append(dict(logs))


def trainer_with(tmp_path, *callbacks: TrainerCallback, lora: bool = False, **options) -> Trainer:
    model = with_lora(tiny_model("qwen3")) if lora else tiny_model("qwen3")
    arguments = settings(TrainingArguments, tmp_path, learning_rate=1e-3, **options)
    return Trainer(model=model, args=arguments, train_dataset=DATASET, eval_dataset=DATASET[:2], callbacks=list(callbacks))


def trained(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    with no_float32():
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        losses.append(trainer.evaluate()["eval_loss"])
    return losses, {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    ("lora", "gradient_checkpointing"),
    [(True, True), pytest.param(False, False, marks=more), pytest.param(False, True, marks=more)],
)
def test_a_trainer_trains_as_without_it(tmp_path, lora, gradient_checkpointing):
    options = {"lora": lora, "gradient_checkpointing": gradient_checkpointing}
    stock_losses, stock_weights = trained(trainer_with(tmp_path, **options))
    streamed = trainer_with(tmp_path, StreamgradCallback(chunk_size=7, head_chunk_size=5), **options)
    assert streamgrad.is_enabled(streamed.model)  # before an engine could wrap it
    losses, weights = trained(streamed)
    assert len(losses) == 4
    assert losses == pytest.approx(stock_losses, rel=1e-9)
    worst, name = worst_gradient_error(weights, stock_weights)
    assert worst < 1e-9, name


@pytest.mark.parametrize("late", [True, pytest.param(False, marks=more)])
def test_a_trainer_of_trl_trains_as_without_it(tmp_path, late):
    """Also where it is added after TRL's constructor has put its own head around the model."""

    def logged(*callbacks: TrainerCallback) -> list[dict[str, float]]:
        given = {"args": settings(SFTConfig, tmp_path), "train_dataset": texts(), "processing_class": tokenizer()}
        trainer = SFTTrainer(tiny_model("qwen3", dtype=torch.float32), callbacks=[] if late else list(callbacks), **given)
        for callback in callbacks if late else ():
            trainer.add_callback(callback)
        return history(trainer)

    stock, ours = logged(), logged(StreamgradCallback(chunk_size=5))
    assert [entry.pop("streamgrad/chunk_tokens") for entry in ours] == [5, 5, 5]
    for entry, expected in zip(ours, stock, strict=True):
        alike = {name: value for name, value in entry.items() if not name.startswith("streamgrad/")}
        assert alike == pytest.approx(expected, rel=2e-5)


def test_the_plan_and_the_peak_are_logged_and_reported(tmp_path, caplog):
    """To those who report as well, who come before a user's callbacks and would see the logs without them."""
    caplog.set_level(logging.INFO, logger="streamgrad")
    reporter = Reporter()
    trainer = trainer_with(tmp_path, reporter, StreamgradCallback(chunk_size=7, keep="attention"))
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert entry["streamgrad/chunk_tokens"] == 7
        assert (entry["streamgrad/layers_keep_attention"], entry["streamgrad/layers_keep_input"]) == (2, 0)
        assert 0.0 < entry["streamgrad/peak_memory_gib"] < 1000.0
    assert [entry.get("streamgrad/chunk_tokens") for entry in reporter.reported if "loss" in entry] == [7, 7, 7]
    assert not any(name.startswith("streamgrad/") for name in trainer.evaluate())
    told = [record.getMessage() for record in caplog.records if "is streamed" in record.getMessage()]
    assert len(told) == 1 and "3 chunks of at most 7" in told[0]


def test_a_model_of_model_init_is_enabled_when_training_begins(tmp_path):
    trainer = Trainer(
        model_init=lambda: tiny_model("qwen3", dtype=torch.float32),
        args=settings(TrainingArguments, tmp_path, max_steps=1),
        train_dataset=DATASET,
        callbacks=[StreamgradCallback(chunk_size=7)],
    )
    trainer.train()
    assert trainer.state.log_history[0]["streamgrad/chunk_tokens"] == 7


def test_an_enabled_model_keeps_its_options_unless_others_are_given(tmp_path):
    model = streamgrad.enable(tiny_model("qwen3"), chunk_size=3)
    arguments = settings(TrainingArguments, tmp_path)
    Trainer(model=model, args=arguments, train_dataset=DATASET, callbacks=[StreamgradCallback()])
    assert InstalledForward.on(model.model).stream.config.chunk_size == 3
    with pytest.raises(ValueError, match="already enabled with"):
        Trainer(model=model, args=arguments, train_dataset=DATASET, callbacks=[StreamgradCallback(chunk_size=7)])


def test_what_works_against_it_is_refused_with_the_model_untouched(tmp_path):
    model, arguments = tiny_model("qwen3"), settings(TrainingArguments, tmp_path)
    arguments.activation_offloading = True  # as TRL's arguments have it
    with pytest.raises(ValueError, match=r'activation_offloading moves .* pass offload="host" to streamgrad'):
        Trainer(model=model, args=arguments, train_dataset=DATASET, callbacks=[StreamgradCallback()])
    assert not streamgrad.is_enabled(model)
    with pytest.raises(TypeError, match="'chunks' is not a streamgrad option"):
        StreamgradCallback(chunks=3)


def test_layers_that_an_engine_has_wrapped_in_pieces_are_refused_when_training_begins(tmp_path):
    """Here by the wrapper of checkpointing, which one process can make; FSDP's and ZeRO-3's are refused by the same look."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    trainer = trainer_with(tmp_path, StreamgradCallback(chunk_size=7))
    trainer.model.model.layers[0] = checkpoint_wrapper(trainer.model.model.layers[0])
    with pytest.raises(ValueError, match="CheckpointWrapper is around its layers"):
        trainer.train()
    assert trainer.state.global_step == 0
