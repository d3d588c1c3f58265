"""The head benchmark at a size a CPU can do: every method gives the same gradients, and records and table are whole."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import head_alone as head
from benchmarks.commands import app
from benchmarks.tables import head_table
from gradients import no_float32, relative_error

SMALL = ["head", "--tokens", "20", "--width", "8", "--vocabulary", "50", "--device", "cpu", "--runs", "2"]


def test_all_methods_of_an_objective_compute_the_same_gradients():
    hidden = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    inputs = head.Inputs(hidden, weight, torch.randint(0, 50, (20,)), torch.randn(20).double())
    with no_float32():
        gradients = {(objective, method): step() for objective, method, step in head._steps(inputs, 7)}
    for objective in ("cross_entropy", "token_logprobs"):
        for ours, theirs in zip(gradients[objective, "streamgrad"], gradients[objective, "torch"], strict=True):
            assert relative_error(ours, theirs) < 1e-12
        assert [tuple(gradient.shape) for gradient in gradients[objective, head.GEMMS]] == [(20, 8), (50, 8)]


@pytest.mark.parametrize("chunk_size", ["auto", "7"])
def test_the_command_appends_valid_records(tmp_path, chunk_size):
    out = tmp_path / "deep" / "head.jsonl"
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, [*SMALL, "--chunk-size", chunk_size, "--out", str(out)])
    assert result.exit_code == 0, result.output
    records = [head.HeadRecord(**json.loads(line)) for line in out.read_text().splitlines()]
    assert [(record.objective, record.method) for record in records] == [
        *(("cross_entropy", method) for method in (head.GEMMS, "torch", "streamgrad")),
        *(("token_logprobs", method) for method in (head.GEMMS, "torch", "streamgrad")),
    ]
    for record in records:
        assert record.shape == {"tokens": 20, "width": 8, "vocabulary": 50} and record.runs == 2
        assert record.step_ms > 0 and record.error is None
        assert record.command == " ".join(["python -m benchmarks", *SMALL[:7], "--dtype float32", *SMALL[7:9]]) + (
            f" --chunk-size {chunk_size} --runs 2"
        )
    assert "against bare GEMMs" in result.output and "1.00x" in result.output


def test_peak_is_counted_above_inputs_and_gradients():
    shape = head.Shape(64, 8, 400)
    records = {
        (record.objective, record.method): record
        for record in head.measure_head(shape=shape, device=torch.device("cpu"), dtype=torch.float32, chunk_size=8, runs=1)
    }
    logits_bytes = 64 * 400 * 4
    for objective in ("cross_entropy", "token_logprobs"):
        assert records[objective, head.GEMMS].peak_bytes == logits_bytes
        assert records[objective, "torch"].peak_bytes >= 2 * logits_bytes
        assert records[objective, "streamgrad"].peak_bytes < logits_bytes / 2


def test_what_does_not_fit_is_a_row_that_says_so():
    def fail():
        raise torch.OutOfMemoryError

    assert head._measure(fail, torch.device("cpu"), 1) == (None, None, "out of memory")
    shared = {
        "benchmark": "head",
        "objective": "cross_entropy",
        "dtype": "bfloat16",
        "runs": 1,
        "device": "a GPU",
        "versions": {},
    }
    shared |= {"shape": head.GPU_SHAPE._asdict(), "command": ""}
    records = [
        head.HeadRecord(method=head.GEMMS, step_ms=39.0, peak_bytes=2**31, error=None, **shared),
        head.HeadRecord(method="torch", step_ms=None, peak_bytes=None, error="out of memory", **shared),
        head.HeadRecord(method="streamgrad", step_ms=44.0, peak_bytes=2**31, error=None, **shared),
    ]
    table = head_table(records)
    assert list(table.columns[2].cells) == ["39.00 ms", "out of memory", "44.00 ms"]
    assert list(table.columns[4].cells) == ["1.00x", "-", "1.13x"]
    assert list(table.columns[5].cells) == ["-", "-", "-"]


def test_a_gpu_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="--device cuda .*torch sees no GPU"):
        CliRunner().invoke(app, ["head", "--device", "cuda"], catch_exceptions=False)
