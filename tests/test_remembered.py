"""Shapes that `plan` does not measure: a preset's, from the package, and a directory's, from the user's cache."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoConfig

import streamgrad
from streamgrad.models import remembered
from streamgrad.models.dry_run import model_shape
from streamgrad.models.names import packaged, preset_names
from streamgrad.models.presets import preset_config
from streamgrad.models.remembered import shape_of
from streamgrad.models.shape import ModelShape
from tiny import tiny_config

SHAPE = ModelShape.from_dict(packaged("shapes.json")["qwen3-0.6b"]["bfloat16"])


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
def test_an_estimate_is_the_same_with_and_without_the_kept_shape(preset, options):
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
    tiny_config("llama").save_pretrained(tmp_path / "model")
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


# As they are published: by earlier versions of transformers, with what a preset leaves to its family.
PUBLISHED = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
        "use_cache": True, "vocab_size": 128256,
    },
}  # fmt: skip


def directory_of(tmp_path: Path, configuration: dict) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(configuration))
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_directory_with_the_configuration_of_a_preset_is_not_measured(measured, cache, tmp_path, name):
    """And what is taken for it is what would be."""
    directory = directory_of(tmp_path, PUBLISHED[name])
    assert shape(directory) == shape(name) and shape(directory, lora_rank=32) == shape(name, lora_rank=32) and not measured
    assert shape(directory, lora_rank=8) == measured[0]


def test_that_is_the_shape_of_such_a_directory(tmp_path):
    """In the dtype that was asked for, whatever a file says of the weights."""
    for dtype in ("bfloat16", "float32"):
        config = AutoConfig.from_pretrained(directory_of(tmp_path, PUBLISHED["llama-3.1-8b"] | {"torch_dtype": dtype}))
        assert model_shape(config) == shape("llama-3.1-8b")


@pytest.mark.parametrize("name", [name for name in preset_names() if name not in PUBLISHED])
def test_every_preset_is_recognised(measured, cache, tmp_path, name):
    preset_config(name).save_pretrained(tmp_path)
    assert shape(tmp_path) == shape(name) and not measured


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 35}, {"attention_bias": True}, {"hidden_act": "gelu"}, {"tie_word_embeddings": True},
        {"use_sliding_window": True}, {"quantization_config": {"bits": 4}}, {"head_dim": None}, {"model_type": "qwen2"},
        {"rope_scaling": {"rope_type": "longrope"}}, {"rope_scaling": "much"}, {"rope_scaling": {}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        # transformers refuses what is of another type.
        {"num_hidden_layers": 36.0}, {"tie_word_embeddings": 0}, {"attention_dropout": False}, {"rope_theta": None},
        {"max_position_embeddings": "many"}, {"rms_norm_eps": None}, {"pad_token_id": 10**9}, {"dtype": "floaty"},
        {"max_window_layers": True}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_a_directory_that_says_anything_else_is_measured(measured, cache, tmp_path, change):
    assert shape(directory_of(tmp_path, PUBLISHED["qwen3-8b"] | change)) == measured[0]


@pytest.mark.parametrize("order", [("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")])
def test_two_names_of_one_thing_are_no_preset(measured, cache, tmp_path, order):
    """transformers takes one of them, and which is not known here."""
    said = {key: value for key, value in PUBLISHED["qwen3-30b-a3b"].items() if key != "num_experts"}
    assert shape(directory_of(tmp_path, said | dict.fromkeys(order, 128))) == measured[0]


def test_a_directory_that_says_less_is_measured(measured, cache, tmp_path):
    """Unless what it leaves out is what transformers takes for it."""
    said = PUBLISHED["qwen3-8b"]
    for key in ("num_key_value_heads", "intermediate_size", "model_type"):
        shape(directory_of(tmp_path, {other: said[other] for other in said if other != key}))
    assert len(measured) == 3
    shape(directory_of(tmp_path, {key: value for key, value in said.items() if key not in ("head_dim", "vocab_size")}))
    assert len(measured) == 3


def test_where_transformers_was_imported_a_directory_is_measured(measured, cache, tmp_path, monkeypatch):
    """Somebody may have changed its code."""
    monkeypatch.setattr(remembered, "sys", SimpleNamespace(modules={"transformers": None}))
    assert shape(directory_of(tmp_path, PUBLISHED["qwen3-8b"])) == measured[0]


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


def test_a_preset_of_another_rank_or_dtype_is_remembered_too(measured, cache):
    assert shape("qwen3-8b") != shape("qwen3-8b", lora_rank=32) and not measured and not cache.exists()
    assert shape("qwen3-8b", lora_rank=8) == shape("qwen3-8b", lora_rank=8) == measured[0]
    assert shape("qwen3-8b", "float32") == shape("qwen3-8b", "float32") == measured[1]
    assert shape("qwen3-4b", "float32") == measured[2] and len(measured) == 3


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
