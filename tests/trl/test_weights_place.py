"""`streamgrad train --weights host`: the model of an ordinary run, by FSDP2 on one process; and what is refused."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from gradients import worst_gradient_error
from streamgrad.cli.train import save_embedded_model
from streamgrad.trl.command import Command, train
from streamgrad.trl.weights_place import check_with_weights_on_host, keep_weights

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Accelerate starts FSDP2 only where it finds an accelerator: let it take the CPU for one, without pinned memory."""
    before = dict(os.environ)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(PartialState, "_prepare_backend", lambda *_, **__: ("gloo", DistributedType.MULTI_GPU))
    monkeypatch.setattr(PartialState, "set_device", lambda self: setattr(self, "device", torch.device("cpu")))
    monkeypatch.setattr(CPUOffloadPolicy.__init__, "__defaults__", (False,))
    yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_a_run_with_weights_on_the_host(tmp_path, request, caplog, monkeypatch):
    """With clipping and accumulation, which an optimizer in backward and torchao's on the host refuse."""
    caplog.set_level(logging.INFO, logger="streamgrad")
    save_embedded_model(tmp_path / "model")
    data = {"train": Dataset.from_dict({"text": ["abcdefgh" * 4, "hgfedcba" * 3] * 4})}
    words = f"--model_name_or_path {tmp_path / 'model'} --bf16 false --max_steps 2 --max_grad_norm 0.5 --chunk_size 16"
    words += " --learning_rate 1e-2 --report_to none --dtype float32 --logging_steps 1 --save_strategy no"
    words += " --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --dataloader_pin_memory false"
    saved, logs, unshared = [], [], []
    monkeypatch.setattr(FSDPModule, "set_requires_gradient_sync", lambda self, shared: shared or unshared.append(self))
    for flags in (["--use_cpu"], ["--use_cpu", "false", "--weights", "host", "--optimizer", "host"]):
        if len(flags) > 1:
            request.getfixturevalue("cpu_as_gpu")
        out = tmp_path / str(len(flags))
        run = train(Command.parse("sft", [*words.split(), *flags, "--output_dir", str(out)]), dataset=data)
        logs.append([(entry["loss"], entry["grad_norm"]) for entry in run.state.log_history if "loss" in entry])
        saved.append(load_file(out / "model.safetensors"))
    assert len(logs[0]) == 2 and all(norm > 0.5 for _, norm in logs[0])
    assert [value for entry in logs[1] for value in entry] == pytest.approx([value for entry in logs[0] for value in entry])
    assert worst_gradient_error(saved[1], saved[0])[0] < 1e-6
    assert isinstance(run.accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    assert all(isinstance(parameter, DTensor) for parameter in run.model.model.layers.parameters())
    assert unshared == [], "gradients of the whole model stayed on the device"
    told = [record.getMessage() for record in caplog.records if "is streamed" in record.getMessage()]
    assert len(told) == 2 and all("; optimizer AdamW; expected peak" in line for line in told)


def test_what_is_refused_later_leaves_the_environment(cpu_as_gpu):
    before, words = dict(os.environ), ["--bf16", "false", "--weights", "host", "--report_to", "none"]
    for refused in (["--optimizer", "in-backward"], ["--no_such_option"]):
        with pytest.raises((ValueError, SystemExit)):
            Command.parse("sft", [*words, *refused])
        assert {name: value for name, value in os.environ.items() if before.get(name) != value} == {}


def test_what_is_refused_before_anything_is_loaded(monkeypatch):
    before = dict(os.environ)
    with pytest.raises(ValueError, match="--weights must be device or host, got 'disk'"):
        Command.parse("sft", ["--weights", "disk"])
    with pytest.raises(ValueError, match="training on the CPU. Leave it out"):
        Command.parse("sft", ["--weights", "host", "--use_cpu"])
    assert dict(os.environ) == before
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match="asked for DeepSpeed. Name offload_param"):
        keep_weights("host", use_cpu=False)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "false")
    monkeypatch.setenv("FSDP_VERSION", "2")  # as fsdp2.yaml says it, which keeps weights on the GPU
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "false")
    with pytest.raises(ValueError, match="needs FSDP_OFFLOAD_PARAMS=true, and the launcher was asked for false. Change that"):
        keep_weights("host", use_cpu=False)
    assert os.environ["FSDP_OFFLOAD_PARAMS"] == "false" and "ACCELERATE_USE_FSDP" not in os.environ
    monkeypatch.undo()
    model = SimpleNamespace(load_in_4bit=False, load_in_8bit=False)
    training = TrainingArguments(use_cpu=True, report_to=[])
    check_with_weights_on_host("adamw", training, model)
    for optimizer in ("in-backward", "adamw8bit"):
        with pytest.raises(ValueError, match=f"--optimizer {optimizer} has no gradients on the GPU.*Pass --optimizer host"):
            check_with_weights_on_host(optimizer, training, model)
    with pytest.raises(ValueError, match="weights in 4 or 8 bits"):
        check_with_weights_on_host("adamw", training, SimpleNamespace(load_in_4bit=True, load_in_8bit=False))
    with pytest.raises(ValueError, match="--optim adafactor is transformers.optimization.Adafactor"):
        check_with_weights_on_host("adamw", TrainingArguments(use_cpu=True, report_to=[], optim="adafactor"), model)
