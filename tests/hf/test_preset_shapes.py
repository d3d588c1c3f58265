"""The table of presets is what a dry run finds today, and everything that it lacks is measured."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import transformers

from gradients import more
from streamgrad.hf import dry_run
from streamgrad.hf.configs import preset_config
from streamgrad.hf.presets import packaged, preset_names
from streamgrad.hf.shapes import TABLE, TABLE_RANK, shape_of
from streamgrad.memory.costs import ModelShape
from tiny import tiny_config

KNOWN = packaged(TABLE)
# One with windows and one with experts; the others are alike.
FIRST = ("gemma-3-1b", "qwen3-30b-a3b")


def numbers(shape: dict) -> list[float]:
    """Return the numbers of a shape in order; a window that is not there counts as 0."""
    lists = [numbers(value) if isinstance(value, dict) else [float(value or 0)] for value in shape.values()]
    return [number for own in lists for number in own]


@pytest.mark.parametrize("rank", [None, TABLE_RANK])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FIRST else more) for name in preset_names()])
def test_the_table_is_what_a_dry_run_finds(name, rank):
    """Exactly so with the version of transformers that it was made with; in another one a layer may save a few bytes more."""
    measured = asdict(shape_of(preset_config(name), lora_rank=rank))
    known = KNOWN["presets"][name]["full" if rank is None else "lora"]
    if transformers.__version__ == KNOWN["transformers"]:
        assert known == measured, "run `python docs/generate_preset_shapes.py`"
    assert numbers(known) == pytest.approx(numbers(measured), rel=1e-3)


def test_every_preset_is_in_the_table():
    assert list(KNOWN["presets"]) == preset_names()


def test_every_number_comes_back_from_json_as_it_was():
    """Whole numbers as ints, others bit for bit."""
    shape = shape_of("qwen3-0.6b")
    costs = replace(shape.profile.costs, input=1 / 3, widest=2.0**60 + 256.0, gradients=2**62 + 1)
    exact = replace(shape, profile=replace(shape.profile, costs=costs))
    assert repr(ModelShape.from_dict(json.loads(json.dumps(asdict(exact))))) == repr(exact)


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """Replaces the dry run, and lists what it was asked for."""
    asked: list[tuple] = []

    def model_shape(config, *, dtype, lora_rank):
        asked.append((config.model_type, dtype, lora_rank))
        return len(asked)

    monkeypatch.setattr(dry_run, "model_shape", model_shape)
    return asked


def test_a_preset_is_read_from_the_table(measured):
    full, lora = shape_of("qwen3-8b", lora_rank=None), shape_of("qwen3-8b", lora_rank=TABLE_RANK)
    assert full.layers == lora.layers == 36 and full.outside_trainable and not lora.outside_trainable
    assert not measured


@pytest.mark.parametrize(("dtype", "rank"), [("float32", None), ("float16", None), ("bfloat16", 8), ("float32", TABLE_RANK)])
def test_a_preset_in_another_dtype_or_rank_is_measured(measured, dtype, rank):
    assert shape_of("qwen3-8b", dtype=dtype, lora_rank=rank) == 1
    assert measured == [("qwen3", getattr(torch, dtype), rank)]


def test_whatever_else_is_measured_each_time(measured, tmp_path):
    """A directory may change, and a configuration may be of a preset."""
    tiny_config("llama").save_pretrained(tmp_path)
    for model in (tmp_path, str(tmp_path), Path(os.path.relpath(tmp_path)), tiny_config("llama")):
        shape_of(model)
    assert measured == 4 * [("llama", torch.bfloat16, None)]
    assert shape_of(preset_config("qwen3-8b")) == 5


def test_a_directory_with_a_presets_name_is_not_looked_at(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_config("llama").save_pretrained("qwen3-8b")
    assert shape_of("qwen3-8b").layers == 36 and shape_of("./qwen3-8b") == 1
    assert measured == [("llama", torch.bfloat16, None)]
