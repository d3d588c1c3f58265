"""The step benchmark, as far as a machine without a GPU can go: presets, errors and the table."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from streamgrad.bench import step
from streamgrad.bench.records import append_records, versions
from streamgrad.cli.app import _step_table
from streamgrad.config import StreamConfig
from streamgrad.models.presets import preset_config, preset_model, preset_names


def test_every_preset_has_a_configuration_of_its_published_shape():
    assert "qwen3-8b" in preset_names()
    for name in preset_names():
        assert preset_config(name).hidden_size >= 1024
    config = preset_config("qwen3-8b")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 36, 151936)


def test_a_preset_is_built_where_and_as_asked():
    before = torch.get_default_dtype()
    model = preset_model("qwen3-0.6b", device=torch.device("meta"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.6e9, rel=0.01)
    assert model.training
    assert torch.get_default_dtype() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "qwen9"}, "'qwen9' is not a preset.*qwen3-4b"),
        ({"methods": ["hf", "magic"]}, "'magic' is not a choice.*streamgrad"),
        pytest.param({}, "torch sees none", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")),
    ],
)
def test_errors_name_the_value(change, words):
    options = {"model": "qwen3-4b", "lengths": [100], "methods": ["hf"], "config": StreamConfig(), "runs": 1, "command": ""}
    with pytest.raises(ValueError, match=words):
        list(step.measure_steps(**(options | change)))


def test_records_and_table(tmp_path):
    shared = {"benchmark": "step", "model": "qwen3-4b", "device": "a GPU", "policy": {}, "versions": versions(), "command": ""}
    made = [
        step.StepRecord(
            method="hf", seq_len=9, step_ms=200.0, peak_bytes=10**9, reserved_bytes=2, host_bytes=0, error=None, **shared,
        ),
        step.StepRecord(
            method="streamgrad", seq_len=9, step_ms=None, peak_bytes=None, reserved_bytes=None, host_bytes=0,
            error="out of memory", **shared,
        ),
    ]  # fmt: skip
    append_records(tmp_path / "a" / "step.jsonl", made)
    append_records(tmp_path / "a" / "step.jsonl", made[:1])
    assert len((tmp_path / "a" / "step.jsonl").read_text().splitlines()) == 3
    assert _step_table(made).row_count == 2


def test_help_has_an_example():
    from streamgrad.cli.app import app

    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["bench", "step", "--help"])
    assert result.exit_code == 0
    assert "--methods hf,liger,streamgrad" in result.output
