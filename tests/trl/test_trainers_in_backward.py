"""Trainers whose optimizer updates in backward: the losses, norms and weights of an ordinary run, and what is refused."""

from __future__ import annotations

import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import streamgrad
from gradients import no_float32, worst_gradient_error
from offload_without_gpu import offload_without_gpu
from streamgrad.cli.train import save_embedded_model
from streamgrad.hf.updates.in_backward import updates_of
from streamgrad.integrations import StreamgradCallback
from streamgrad.trl.command import Command
from streamgrad.trl.command import train as train_by
from streamgrad.trl.optimizer_place import check_optimizer_place
from tiny import tiny_model, tokens
from trainer_kinds import STREAM, build

DATASET = [{"input_ids": tokens(1, 20, seed=i)[0], "labels": tokens(1, 20, seed=i)[0]} for i in range(8)]
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # torch's loader, on a machine without accelerator


def trainer(folder, *, in_backward: bool, **options) -> Trainer:
    clip = options.pop("clip", None)
    given = {"max_steps": 3, "max_grad_norm": 0.0, "save_strategy": "no"} | options
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
        seed=1, **given,
    )  # fmt: skip
    model = tiny_model("qwen3")
    if in_backward:
        streamgrad.enable(model, chunk_size=7, head_chunk_size=5)
        optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2, max_grad_norm=clip)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Trainer(model=model, args=arguments, train_dataset=DATASET, optimizers=(optimizer, None))


def test_a_trainer_follows_stock_and_logs_the_norm(tmp_path):
    outcomes = []
    for in_backward in (False, True):
        run = trainer(tmp_path, in_backward=in_backward)
        with no_float32():
            run.train()
        logged = [
            (entry["loss"], entry["grad_norm"], entry["learning_rate"]) for entry in run.state.log_history if "loss" in entry
        ]
        outcomes.append((logged, dict(run.model.named_parameters())))
    (stock, weights), (ours, in_backward) = outcomes
    assert len(stock) == 3 and all(norm > 0 for _, norm, _ in stock)
    for ours_logged, stock_logged in zip(ours, stock, strict=True):
        assert ours_logged == pytest.approx(stock_logged, rel=1e-5)
    assert worst_gradient_error(in_backward, weights)[0] < 1e-9


def test_a_callback_tells_the_optimizer(tmp_path):
    run = trainer(tmp_path, in_backward=False, max_steps=1)
    run.add_callback(StreamgradCallback(chunk_size=7))
    run.train()
    assert "; optimizer AdamW; expected peak" in streamgrad.status(run.model).first_line


def test_a_trainer_resumes_bit_for_bit(tmp_path):
    """With the clipping that a Trainer asks for by default, done by the optimizer."""
    options = {"in_backward": True, "clip": 1.0, "max_grad_norm": 1.0, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole, resumed = (trainer(tmp_path, **options) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, resumed.model.get_parameter(name)), name


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"max_grad_norm": 1.0},
            "max_grad_norm=1.0 of the Trainer's.*optimizer_in_backward.*max_grad_norm=0.*on the host",
        ),
        ({"max_grad_norm": 1.0, "clip": 2.0}, "max_grad_norm=1.0 of the Trainer's arguments"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1 and pass larger batches"),
    ],
)
def test_what_a_trainer_cannot_ask_for(tmp_path, options, match):
    """Refused before anything is updated."""
    run = trainer(tmp_path, in_backward=True, **options)
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    try:
        with pytest.raises((ValueError, RuntimeError), match=match):
            run.train()
    finally:
        run.accelerator.gradient_state._set_sync_gradients(True)
    assert all(map(torch.equal, before, run.model.parameters()))


@pytest.mark.parametrize("place", ["in-backward", "host"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_the_command_has_a_flag(place, tmp_path, monkeypatch, caplog):
    """With the groups of weight decay and the scheduler that a Trainer makes; the flag changes nothing but memory."""
    if place == "host":
        pytest.importorskip("torchao.optim", reason="needs torchao: pip install torchao")
        offload_without_gpu(monkeypatch)
    caplog.set_level(logging.INFO, logger="streamgrad")
    save_embedded_model(tmp_path / "model")
    data = {"train": Dataset.from_dict({"text": ["abcdefgh" * 4, "hgfedcba" * 3] * 4})}
    words = f"--model_name_or_path {tmp_path / 'model'} --use_cpu --bf16 false --max_steps 3 --max_grad_norm 0 --weight_decay 0.1"
    words = f"{words} --learning_rate 1e-2 --report_to none --dtype float32".split()
    weights, optimizers = [], []
    for flag in ("adamw", place):
        out = tmp_path / flag
        run = train_by(Command.parse("sft", [*words, "--output_dir", str(out), "--optimizer", flag]), dataset=data)
        optimizers.append(run.optimizer.optimizer)
        weights.append(load_file(out / "model.safetensors"))
    assert worst_gradient_error(weights[1], weights[0])[0] < 1e-6
    assert [updates_of(run.model.model.norm.weight), optimizers[1]][place == "host"] is optimizers[1]
    names = ["AdamW", "AdamW in backward" if place == "in-backward" else "CPUOffloadOptimizer"]
    told = [record.getMessage() for record in caplog.records if "is streamed" in record.getMessage()]
    assert len(told) == 2 and all(f"; optimizer {name}; expected peak" in line for name, line in zip(names, told, strict=True))
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2 adds gradients"):
        train_by(Command.parse("sft", [*words, "--optimizer", place, "--gradient_accumulation_steps", "2"]), dataset=data)


def test_choices_of_the_command(monkeypatch):
    parse = partial(Command.parse, "sft")
    place = ["--use_cpu", "--bf16", "false"]
    assert parse([*place, "--optimizer", "adamw8bit"]).training.optim == "adamw_8bit"
    assert parse([*place, "--optim", "sgd"]).training.optim == "sgd"
    with pytest.raises(ValueError, match="one of adamw, adamw8bit, in-backward, host, got 'none'"):
        parse([*place, "--optimizer", "none"])
    with pytest.raises(ValueError, match="--optimizer adamw8bit and --optim sgd"):
        parse([*place, "--optimizer", "adamw8bit", "--optim", "sgd"])
    check = partial(check_optimizer_place, in_backward=False, on_host=True)
    monkeypatch.setattr("streamgrad.trl.optimizer_place.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs torchao.*pip install torchao"):
        check(SimpleNamespace(max_grad_norm=0.0))
    monkeypatch.undo()
    monkeypatch.setattr("streamgrad.trl.optimizer_place.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"max_grad_norm=1.0 .*left for the host.*optimizer_in_backward=True"):
        check(SimpleNamespace(max_grad_norm=1.0))
    with pytest.raises(ValueError, match="fp16=True scales the loss.*bf16=True"):
        check(SimpleNamespace(fp16=True), in_backward=True, on_host=False)
    with pytest.raises(ValueError, match="one process, got 2"):
        check(SimpleNamespace(max_grad_norm=0.0, world_size=2))
    with pytest.raises(ValueError, match="two places"):
        check(SimpleNamespace(), in_backward=True)


@pytest.mark.parametrize("later", ["in backward", "ordinary", "stock with the callback"])
def test_a_later_trainer_of_the_model_takes_over(tmp_path, later):
    """SFT and then DPO, as of ordinary optimizers: the first trainer's makes none of the second one's updates."""
    options = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 1, "max_steps": 2, "learning_rate": 1e-2}
    in_backward, weights = {"optimizer_in_backward": True}, []
    for is_first_in_backward in (False, True):
        model = tiny_model("qwen3")
        with no_float32():
            extra = in_backward if is_first_in_backward else {}
            build("sft", tmp_path, model, streamed=True, extra=extra, **options).train()
            if later == "stock with the callback":
                arguments = TrainingArguments(
                    output_dir=str(tmp_path), use_cpu=True, report_to=[], max_steps=2, max_grad_norm=0.0
                )
                Trainer(model=model, args=arguments, train_dataset=DATASET, callbacks=[StreamgradCallback(config=STREAM)]).train()
            else:
                extra = in_backward if is_first_in_backward and later == "in backward" else {}
                build("dpo", tmp_path, model, streamed=True, extra=extra | {"ref_model": tiny_model("qwen3")}, **options).train()
        assert (updates_of(model.lm_head.weight) is not None) == (is_first_in_backward and later == "in backward")
        weights.append(dict(model.named_parameters()))
    assert worst_gradient_error(*weights)[0] < 1e-9
