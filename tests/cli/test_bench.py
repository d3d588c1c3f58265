"""`streamgrad bench`: times a user's model on this machine, says what does not fit, and writes nothing."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from streamgrad.cli import bench_run, main
from streamgrad.cli.app import app
from streamgrad.hf.patching import InstalledForward
from tiny import tiny_config, tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path):
    """A configuration of two layers, without weights."""
    tiny_config("qwen3").save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(*words: str):
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["bench", *words, "--device", "cpu"], catch_exceptions=False)


def test_one_table_has_time_and_peak_of_each_length(directory):
    result = run(directory, "--seq-len", "16,48", "--runs", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("ms") == result.output.count("MiB") == 4
    for tokens in (16, 48):
        assert re.search(rf"│ +{tokens} │( +[\d.,]+ ms │){{2}}( +[\d.,]+ MiB │){{2}}", result.output), result.output
    assert "random weights, layers: 2, float32, cpu" in result.output and "above the weights" in result.output


def test_json_has_every_cell(directory):
    found = json.loads(run(directory, "--seq-len", "16,48", "--runs", "1", "--layers", "1", "--json").stdout)
    cells = found.pop("cells")
    assert found == {
        "model": directory, "layers": 1, "weights": "random", "dtype": "float32", "device": "cpu, 1 thread", "runs": 1,
    }  # fmt: skip
    assert [(cell["seq_len"], cell["method"]) for cell in cells] == [
        (16, "checkpointing"), (16, "streamgrad"), (48, "checkpointing"), (48, "streamgrad"),
    ]  # fmt: skip
    assert all(cell["step_ms"] > 0 and cell["peak_bytes"] > 0 and cell["error"] is None for cell in cells)


def test_nothing_is_written(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(directory, "--seq-len", "8", "--runs", "1").exit_code == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "model"]


def test_stored_weights_are_those_that_run(tmp_path):
    model = tiny_model("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    built = bench_run.measured_model(str(tmp_path), None, CPU)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(built.parameters(), model.parameters(), strict=True))
    assert built.training and bench_run.has_weights(str(tmp_path))
    assert len(bench_run.measured_model(str(tmp_path), 1, CPU).model.layers) == 1


def test_the_model_is_left_as_it_was():
    """Neither checkpointing nor streaming stays on, and no gradient stays."""
    model = tiny_model("qwen3", dtype=torch.float32)
    stock, streamed = bench_run.steps_of(model, 40, 1, CPU)
    assert (stock.error, streamed.error) == (None, None)
    assert InstalledForward.on(model) is None and not model.is_gradient_checkpointing
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")]
)
def test_out_of_memory_is_said_in_its_cell(directory, monkeypatch, error):
    """With checkpointing at the second length alone: the steps after it are measured."""
    stock, calls = bench_run.peak_bytes_of, []

    def third_fails(step, device):
        calls.append(step)
        if len(calls) == 3:
            raise error
        return stock(step, device)

    monkeypatch.setattr(bench_run, "peak_bytes_of", third_fails)
    result = run(directory, "--seq-len", "8,16", "--runs", "1")
    assert result.exit_code == 0 and len(calls) == 4
    row = next(line for line in result.output.splitlines() if re.match(r"│ +16 ", line))
    cells = [cell.strip() for cell in row.split("│")[2:-1]]
    assert cells[0] == "out of memory" and cells[1].endswith(" ms") and cells[2] == "-" and cells[3].endswith(" MiB")


def test_another_failure_ends_the_command(directory, monkeypatch):
    def fails(step, device):
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(bench_run, "peak_bytes_of", fails)
    with pytest.raises(RuntimeError, match="shapes differ"):
        run(directory, "--seq-len", "8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["qwen9", "--seq-len", "8"],
            "model='qwen9' is neither a directory that exists nor a preset. The presets are qwen3-0.6b",
        ),
        (["./nodir", "--seq-len", "8"], "model='./nodir' is neither a directory that exists nor a preset"),
        (["empty", "--seq-len", "8"], "'empty' has no configuration that transformers can load"),
        (
            ["unbuildable", "--seq-len", "8"],
            "'unbuildable': transformers cannot build this qwen3 model: .* Pass a",
        ),
        (
            ["good", "--seq-len", "8,1"],
            "--seq-len must be whole numbers of at least 2, separated by commas, got '8,1'. Pass",
        ),
        (["good", "--seq-len", "8k"], "--seq-len must be whole numbers of at least 2, separated by commas, got '8k'"),
        (["good", "--seq-len", "8", "--layers", "3"], "layers=3.* the model has.* 2. Pass at most that many"),
        (["good", "--seq-len", "8", "--device", "tpu"], "--device .*cpu"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    tiny_config("qwen3").save_pretrained(tmp_path / "good")
    config = tiny_config("qwen3").to_dict() | {"hidden_act": "x"}
    (tmp_path / "unbuildable").mkdir()
    (tmp_path / "unbuildable" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(sys, "argv", ["streamgrad", "bench", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert re.fullmatch(f"streamgrad: .*{said}.*", stopped.value.code), stopped.value.code
