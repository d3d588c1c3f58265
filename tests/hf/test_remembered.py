"""Shapes that `plan` does not measure: those that are known by formulas, and a directory's, from the user's cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

import streamgrad
from streamgrad.hf import remembered
from streamgrad.hf.configs import preset_config
from streamgrad.hf.remembered import shape_of
from streamgrad.memory.model_shape import ModelShape
from tiny import tiny_config

SHAPE = shape_of("qwen3-0.6b", dtype="bfloat16", lora_rank=None)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("qwen3-0.6b", {"method": "lora", "objective": "grpo", "batch": 4}),
        ("qwen3-8b", {"engine": "zero3", "gpus": 8, "seq_len": 65_536}),
        ("qwen3-30b-a3b", {"method": "lora", "engine": "fsdp2", "gpus": 2, "keep": "input", "offload": "host"}),
        ("llama-3.1-8b", {"objective": "dpo", "optimizer": "none", "gpu_memory": "140GiB", "seq_len": 8192}),
        ("gemma-3-1b", {"optimizer": "adamw8bit", "offload": "none"}),
    ],
)
def test_an_estimate_is_the_same_with_and_without_the_formulas(preset, options):
    """A configuration is measured wherever it comes from."""
    kept, measured = (streamgrad.estimate(model, **options).to_dict() for model in (preset, preset_config(preset)))
    assert kept.pop("model") == preset and measured.pop("model") != preset
    assert kept == measured and kept["streamed"]["longest_tokens"] > 0


@pytest.fixture
def measured(monkeypatch) -> list[ModelShape]:
    """What was measured, by a stand-in: each time another shape."""
    made: list[ModelShape] = []

    def measure(model, dtype, lora_rank):
        made.append(replace(SHAPE, layers=len(made) + 1, window=[None, 512][len(made) % 2]))
        return made[-1]

    monkeypatch.setattr(remembered, "_measured", measure)
    # As in a process that has not imported transformers, which this one has.
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules={}))
    return made


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("STREAMGRAD_CACHE", str(tmp_path / "made" / "here"))
    return tmp_path / "made" / "here"


@pytest.fixture
def model(tmp_path) -> Path:
    tiny_config("gpt_neox").save_pretrained(tmp_path / "model")  # of a family that has no formulas
    return tmp_path / "model"


def shape(model, dtype="bfloat16", lora_rank=None) -> ModelShape:
    return shape_of(model, dtype=dtype, lora_rank=lora_rank)


def change_config(model: Path, **values) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_directory_is_measured_once(measured, cache, model):
    assert shape(model) == shape(str(model)) == shape(os.path.relpath(model)) == measured[0]
    assert len(measured) == 1
    (file,) = cache.iterdir()  # and nothing beside it
    copy = model.parent / "copy"
    copy.mkdir()
    (copy / "config.json").write_text((model / "config.json").read_text())
    assert shape(copy) == measured[0] and len(measured) == 1 and file.exists()


def test_every_number_comes_back_as_it_was(measured, cache, model):
    """Whole numbers as ints, others bit for bit."""
    costs = replace(SHAPE.profile.costs, input=1 / 3, widest=2.0**60 + 256.0, gradients=2**62 + 1)
    exact = replace(SHAPE, profile=replace(SHAPE.profile, costs=costs))
    file = remembered._file_for(remembered._configuration(model), "bfloat16", None)
    remembered._write(file, exact)
    assert repr(shape(model)) == repr(exact) and not measured


# A configuration of a family that is known by formulas.
KNOWN = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 100, "num_hidden_layers": 3,
}  # fmt: skip


def directory_of(tmp_path: Path, configuration: dict) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    return tmp_path


def test_a_directory_of_a_known_family_is_not_measured(measured, cache, tmp_path):
    known = shape(directory_of(tmp_path, KNOWN))
    assert (known.layers, known.width) == (3, 64) and known != shape(tmp_path, lora_rank=5)
    assert not measured and not cache.exists()
    assert shape(tmp_path, "float32") == shape(tmp_path, "float32") == measured[0] and len(measured) == 1


def test_where_transformers_was_imported_a_directory_is_measured(measured, cache, tmp_path, monkeypatch):
    """Somebody may have changed its code."""
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules={"transformers": None}))
    assert shape(directory_of(tmp_path, KNOWN)) == measured[0]


def other_version(name: str) -> str:
    return "9.9" if name == "transformers" else metadata.version(name)


def without_peft(name: str) -> str:
    if name == "peft":
        raise metadata.PackageNotFoundError(name)
    return metadata.version(name)


@pytest.mark.parametrize(
    "change",
    [
        lambda model, monkeypatch: change_config(model, num_hidden_layers=7),
        lambda model, monkeypatch: change_config(model, anything="else"),
        lambda model, monkeypatch: monkeypatch.setattr(remembered, "metadata", SimpleNamespace(
            version=other_version, PackageNotFoundError=metadata.PackageNotFoundError)),
        lambda model, monkeypatch: monkeypatch.setattr(remembered, "metadata", SimpleNamespace(
            version=without_peft, PackageNotFoundError=metadata.PackageNotFoundError)),
        lambda model, monkeypatch: monkeypatch.setattr(remembered, "__file__", str(model / "a" / "b.py")),
    ],
    ids=["layers", "a key that may matter", "transformers", "no peft", "streamgrad's code"],
)  # fmt: skip
def test_whatever_it_depends_on_is_part_of_its_name(measured, cache, model, monkeypatch, change):
    shape(model)
    change(model, monkeypatch)
    assert shape(model) == shape(model) == measured[1] and len(measured) == 2


def test_dtypes_and_ranks_are_kept_apart(measured, cache, model):
    kinds = [(dtype, rank) for dtype in ("bfloat16", "float32") for rank in (None, 8, 32)]
    shapes = [shape(model, *kind) for kind in kinds]
    assert shapes == [shape(model, *kind) for kind in kinds] == measured and len(measured) == 6


def test_a_preset_in_another_dtype_is_remembered_too(measured, cache):
    assert len({shape("qwen3-8b", lora_rank=rank) for rank in (None, 8, 32)}) == 3 and not measured and not cache.exists()
    assert shape("qwen3-8b", "float32") == shape("qwen3-8b", "float32") == measured[0]
    assert shape("qwen3-4b", "float32") == measured[1] and len(measured) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b"\xff\xfe\x00"),
        lambda file: file.write_text(""),
        lambda file: file.write_text(file.read_text()[:-20]),
        lambda file: file.write_text(file.read_text().replace('"layers": 1', '"layers": 2')),
        lambda file: file.write_text("{}"),
    ],
    ids=["no text", "empty", "cut off", "another number", "another format"],
)
def test_a_file_that_is_not_what_was_written_is_measured_again_and_replaced(measured, cache, model, spoil, capfd):
    shape(model)
    (file,) = cache.iterdir()
    spoil(file)
    assert shape(model) == shape(model) == measured[1] and len(measured) == 2
    assert capfd.readouterr() == ("", "")


def in_the_way(tmp_path: Path, model: Path) -> str:
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file" / "cache")


def a_folder_for_the_file(tmp_path: Path, model: Path) -> str:
    os.environ["STREAMGRAD_CACHE"] = str(tmp_path)
    remembered._file_for(remembered._configuration(model), "bfloat16", None).mkdir()
    return str(tmp_path)


@pytest.mark.parametrize("place", [in_the_way, a_folder_for_the_file, lambda tmp_path, model: "off"])
def test_a_cache_that_cannot_be_used_is_not(measured, model, tmp_path, monkeypatch, capfd, place):
    monkeypatch.setenv("STREAMGRAD_CACHE", "off")  # restored afterwards, whatever `place` does
    monkeypatch.setenv("STREAMGRAD_CACHE", place(tmp_path, model))
    before = sorted(tmp_path.rglob("*"))
    assert [shape(model), shape(model)] == measured and len(measured) == 2
    assert sorted(tmp_path.rglob("*")) == before and capfd.readouterr() == ("", "")


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.delenv("STREAMGRAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert remembered._folder() == tmp_path / "xdg" / "streamgrad"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert remembered._folder() == tmp_path / ".cache" / "streamgrad"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert remembered._folder() is None
    monkeypatch.setenv("STREAMGRAD_CACHE", "own")
    assert remembered._folder() == Path("own")


@pytest.mark.parametrize(
    "values",
    [{"auto_map": {"AutoConfig": "mine.Config"}}, {"configuration_files": ["config.4.0.0.json"]}, {"model_type": None}],
    ids=str,
)
def test_what_depends_on_more_than_the_file_is_not_remembered(measured, cache, model, values):
    """On code of the model's own, on other files, on the directory's name."""
    change_config(model, **values)
    if values == {"model_type": None}:
        (model / "config.json").write_text('{"hidden_size": 64}')
    assert [shape(model), shape(model)] == measured and len(measured) == 2 and not cache.exists()


def test_where_transformers_may_have_been_changed_nothing_is_remembered(measured, cache, model, monkeypatch):
    shape(model)
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules={"transformers": None}))
    assert shape(model) == measured[1]
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules={}))
    assert shape(model) == measured[0] and len(measured) == 2


def test_a_configuration_and_a_model_are_measured(measured, cache):
    assert shape(tiny_config("llama")) == measured[0] and not cache.exists()
