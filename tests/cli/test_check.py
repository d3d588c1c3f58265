"""`streamgrad check`: passes for what is exact, and fails, with the reason, for each way in which gradients can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

import streamgrad
from streamgrad import precision
from streamgrad.cli import CheckFailed
from streamgrad.cli.app import app
from streamgrad.engine.kv_chunk import KeyValueStream
from streamgrad.hf.configs import preset_config
from streamgrad.hf.presets import preset_names
from streamgrad.hf.small_copy import reduced_config, reduced_model
from streamgrad.precision import GROUPS, KINDS, check_precision, group_of_parameters
from tiny import FAMILIES, tiny_config

CPU = torch.device("cpu")


@pytest.fixture
def one_model(monkeypatch):
    """Where noise does not matter: one random model, and any ratio (a router may send a token elsewhere in 16 bits)."""
    monkeypatch.setattr(precision, "MODELS", 1)
    monkeypatch.setattr(precision, "LARGEST_RATIO", float("inf"))


def run(*arguments: str):
    return CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "120"})


def test_a_preset_passes_and_the_table_has_every_group():
    result = run("qwen3-8b", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in (*GROUPS, *KINDS, "Qwen3ForCausalLM"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma-3-1b", "qwen3-30b-a3b"])
def test_a_preset_passes_on_a_gpu(name):
    outcome = check_precision(preset_config(name), device=torch.device("cuda"))
    assert outcome.passed, outcome.failures


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_in_fp32(family, one_model):
    outcome = check_precision(tiny_config(family), device=CPU)
    assert outcome.passed, outcome.failures
    for row in outcome.table.values():
        assert 0 < row["stream32"].relative < precision.LARGEST_ERROR < 1e-3 < row["base16"].relative


def test_json_says_the_same(one_model):
    result = run("gemma-3-1b", "--device", "cpu", "--json")
    row = json.loads(result.output)
    expected = check_precision(preset_config("gemma-3-1b"), device=CPU).to_dict()
    assert row == {"model": "gemma-3-1b"} | json.loads(json.dumps(expected))
    assert row["passed"] and set(row["table"]) == {"embeddings", "attention", "mlp", "norms"}  # its head is its embeddings


def test_progress_is_told_copy_by_copy(monkeypatch):
    monkeypatch.setattr(precision, "MODELS", 2)
    monkeypatch.setattr(precision, "LARGEST_RATIO", 0.0)  # more and more copies are asked for
    told = []
    check_precision(tiny_config("llama"), device=CPU, progress=lambda *counts: told.append(counts))
    assert told == [(0, 2), (1, 2), (2, 4), (3, 4), (4, 6), (5, 6), (6, 8), (7, 8)]


# --- What is wrong is found ---------------------------------------------------------------------------------------------------


def with_hooks(monkeypatch, change):
    """Let `change(name, parameter)` return a hook for gradients of streamed models, or None."""
    handles = []

    def enable(model, options):
        for name, parameter in model.named_parameters():
            hook = change(name, parameter)
            if hook is not None:
                handles.append(parameter.register_hook(hook))
        return streamgrad.enable(model, options)

    def disable(model):
        while handles:
            handles.pop().remove()
        return streamgrad.disable(model)

    monkeypatch.setattr(precision, "enable", enable)
    monkeypatch.setattr(precision, "disable", disable)


def test_a_wrong_sum_over_chunks_fails(monkeypatch, one_model):
    """The gradient of keys off by a thousandth."""
    collect = KeyValueStream.collect
    monkeypatch.setattr(KeyValueStream, "collect", lambda self, *span: tuple(1.001 * g for g in collect(self, *span)))
    result = run("qwen3-8b", "--device", "cpu")
    assert isinstance(result.exception, CheckFailed) and "Not exact" in result.output
    assert "attention: in fp32 streamed gradients differ" in str(result.exception)
    assert "lm_head" not in str(result.exception)


def test_a_gradient_that_is_not_a_number_fails(monkeypatch, one_model):
    with_hooks(monkeypatch, lambda name, p: (lambda g: g * float("nan")) if "down_proj" in name else None)
    outcome = check_precision(preset_config("qwen3-8b"), device=CPU)
    assert any(failure.startswith("mlp: ") for failure in outcome.failures)


def test_a_missing_gradient_fails(monkeypatch, one_model):
    step = precision._step

    def without_norms(model, ids):
        found = step(model, ids)
        return {n: None if streamgrad.is_enabled(model) and "q_norm" in n else g for n, g in found.items()}

    monkeypatch.setattr(precision, "_step", without_norms)
    outcome = check_precision(preset_config("qwen3-8b"), device=CPU)
    assert any("q_norm" in failure and "no gradient, unlike base32" in failure for failure in outcome.failures)
    assert any(failure.startswith("norms: ") for failure in outcome.failures)


def test_more_noise_than_plain_16_bits_fails(monkeypatch):
    """Gradients rounded once more, and only there: what fp32 cannot show."""
    torch.manual_seed(0)

    def rounded(name, parameter):
        if parameter.dtype != torch.bfloat16:
            return None
        return lambda g: g * (1.0 + 0.006 * torch.randn_like(g))

    with_hooks(monkeypatch, rounded)
    outcome = check_precision(preset_config("qwen3-8b"), device=CPU)
    (failure,) = outcome.failures
    assert "times as wrong as plain ones" in failure and 1.02 < outcome.ratio < 1.3


def test_a_refused_model_says_why(tmp_path):
    AutoConfig.for_model("mamba", hidden_size=16, num_hidden_layers=2, vocab_size=32).save_pretrained(tmp_path)
    result = run(str(tmp_path), "--device", "cpu")
    assert result.exit_code == 1
    assert isinstance(result.exception, ValueError) and "cannot be streamed" in str(result.exception)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_device_that_is_not_there():
    for device, said in (("cuda", "torch sees no GPU"), ("tpu", "--device must be cpu or cuda, got 'tpu'")):
        result = run("qwen3-8b", "--device", device)
        assert isinstance(result.exception, ValueError) and said in str(result.exception)


# --- Small copies ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_a_small_copy_has_the_class_and_the_flags_of_the_model(name):
    config = preset_config(name)
    small = reduced_config(config)
    assert type(small) is type(config) and config.to_dict() == preset_config(name).to_dict()
    sizes = {key for key, value in config.to_dict().items() if value != small.to_dict()[key]}
    assert sizes <= {
        "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "vocab_size", "num_experts", "num_experts_per_tok", "sliding_window", "layer_types",
        "pad_token_id", "bos_token_id", "eos_token_id", "num_local_experts", "max_window_layers",
    }  # fmt: skip
    model = reduced_model(config, seed=0, dtype=torch.float32, device=CPU)
    assert sum(parameter.numel() for parameter in model.parameters()) < 500_000
    assert set(small.layer_types if getattr(small, "layer_types", None) else ["?"]) == set(
        config.layer_types if getattr(config, "layer_types", None) else ["?"]
    )


def test_parameters_are_grouped_by_what_they_do():
    model = reduced_model(preset_config("qwen3-8b"), seed=0, dtype=torch.float32, device=CPU)
    groups = group_of_parameters(model)
    assert groups["lm_head.weight"] == "lm_head" and groups["model.embed_tokens.weight"] == "embeddings"
    assert groups["model.layers.0.self_attn.q_norm.weight"] == groups["model.norm.weight"] == "norms"
    assert (
        groups["model.layers.1.self_attn.o_proj.weight"] == "attention" and groups["model.layers.1.mlp.up_proj.weight"] == "mlp"
    )
    assert set(groups.values()) == set(GROUPS)
