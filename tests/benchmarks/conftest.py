"""A model that a CPU can be measured with, and the command line on it."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import in_turn, lengths, step
from benchmarks.commands import app
from streamgrad.config import StreamConfig


@pytest.fixture
def tiny_preset(monkeypatch):
    """Options of a measurement, whose model is a preset that a CPU can be measured with."""
    shape = {
        "family": "qwen3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
    }  # fmt: skip
    monkeypatch.setattr("streamgrad.hf.presets.presets", lambda: {"tiny": shape})
    return {
        "model": "tiny", "lengths": [33], "methods": ["streamgrad"], "config": StreamConfig(chunk_size=16, keep="input"),
        "runs": 1, "warm_ups": 0, "command": "", "device": torch.device("cpu"),
    }  # fmt: skip


@pytest.fixture
def on_cpu(tiny_preset, monkeypatch):
    """The command line, whose steps run on a CPU."""
    for module in (step, lengths):
        monkeypatch.setattr(module, "measure_steps", partial(step.measure_steps, device=torch.device("cpu")))
    monkeypatch.setattr(in_turn, "measure_in_turn", partial(in_turn.measure_in_turn, device=torch.device("cpu")))

    def invoke(command: str):
        return CliRunner(env={"COLUMNS": "200"}).invoke(app, command.split())

    return invoke
