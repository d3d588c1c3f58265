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
from streamgrad.hf.configs import preset_config
from streamgrad.hf.estimates import dry_run
from streamgrad.hf.estimates.shapes import TABLE, TABLE_RANK, shape_of
from streamgrad.hf.presets import packaged, preset_names, preset_of
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


# The published sizes, written down by hand; of Gemma 3 from 4B on, without the part that sees images.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.3-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800,
    "mistral-7b-v0.3": 7_248_023_552, "mistral-nemo-12b": 12_247_782_400, "mistral-small-24b": 23_572_403_200,
    "gemma-3-1b": 999_885_952, "gemma-3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma-3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    "phi-4-mini": 3_836_021_760, "phi-4": 14_659_507_200, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "olmo-2-1b": 1_484_916_736, "olmo-2-7b": 7_298_617_344, "olmo-2-13b": 13_716_198_400, "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
}  # fmt: skip


def test_parameters_are_as_many_as_were_published():
    """To the last one: a wrong size is a wrong plan. Layers of the table have the mean of all."""
    assert len(PUBLISHED) >= 25 and set(PUBLISHED) == set(preset_names())
    for name, published in PUBLISHED.items():
        shape = shape_of(name)
        counted = shape.layers * shape.layer_parameters + shape.outside_parameters
        assert 0 <= published - counted < shape.layers, name


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen3-8B", "qwen3-8b"), ("Qwen/Qwen3-8B", "qwen3-8b"), ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"), ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"), ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mistralai/Mistral-7B-v0.1", None), ("Qwen/Qwen2.5-7B-Instruct-1M", None), ("other/Qwen3-8B", None), ("qwen9", None),
    ],
)  # fmt: skip
def test_names_of_the_same_sizes_mean_one_preset(name, meant, measured):
    assert preset_of(name) == meant
    if meant:
        assert shape_of(name) == shape_of(meant) and not measured


def test_a_directory_comes_before_another_spelling(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_config("llama").save_pretrained("Qwen3-8B")
    assert preset_of("Qwen3-8B") is None and preset_of("qwen3-8b") == "qwen3-8b"
