"""The linear example: streamed gradients equal autograd's, memory falls with the number of partitions, records are valid."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import streamgrad
from benchmarks import linear
from benchmarks.__main__ import main
from benchmarks.commands import app
from benchmarks.linear import standard_linear_gradients, streamed_linear_gradients
from gradients import relative_error
from streamgrad.memory.live_bytes import LiveBytes

ROOT = Path(__file__).parents[2]


def inputs(rows: int, *widths: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m, n, k = widths
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in ((rows, m), (m, n), (n, k)))


@pytest.mark.parametrize("partitions", [1, 2, 3, 16, 46, 47])
@pytest.mark.parametrize("widths", [(31, 3, 123), (5, 7, 1)])
def test_gradients_equal_autograd_in_float64(widths, partitions):
    x, w1, w2 = inputs(47, *widths)
    expected = standard_linear_gradients(x, w1, w2)
    actual = streamed_linear_gradients(x, w1, w2, partitions)
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.dtype == exact.dtype and ours.isfinite().all()
        assert relative_error(ours, exact) <= 1e-12


def test_sums_of_16_bit_terms_are_kept_in_fp32():
    """At one row a partition a bf16 sum would lose most of its digits; ours stays as close to the truth as autograd."""
    x, w1, w2 = inputs(512, 16, 16, 16, dtype=torch.bfloat16)
    truth = standard_linear_gradients(x.double(), w1.double(), w2.double())
    stock = standard_linear_gradients(x, w1, w2)
    streamed = streamed_linear_gradients(x, w1, w2, partitions=512)
    assert streamed.dw1.dtype == torch.bfloat16 and streamed.loss.dtype == torch.float32
    for ours, theirs, exact in zip(streamed[1:], stock[1:], truth[1:], strict=True):
        assert relative_error(ours, exact) <= 1.25 * relative_error(theirs, exact)


@pytest.mark.parametrize(
    ("partitions", "message"), [(0, "partitions=0 .* at least 1"), (8, "partitions=8 is more than the 7 rows .* at most 7")]
)
def test_impossible_partitions_are_refused(partitions, message):
    with pytest.raises(ValueError, match=message):
        streamed_linear_gradients(*inputs(7, 2, 3, 4), partitions)


def test_live_bytes_fall_with_partitions():
    x, w1, w2 = inputs(1200, 16, 16, 16)
    peaks = []
    for partitions in (1, 4, 20, 100):
        with LiveBytes() as live:
            streamed_linear_gradients(x, w1, w2, partitions)
        peaks.append(live.peak_bytes)
    with LiveBytes() as live:
        standard_linear_gradients(x, w1, w2)
    assert peaks == sorted(peaks, reverse=True)
    # Y, Z and dY of one partition, both weight gradients, and a few scalars.
    assert peaks[-1] <= x.nbytes * 3 / 100 + w1.nbytes + w2.nbytes + 64
    assert live.peak_bytes > 8 * peaks[-1]


def test_the_command_appends_valid_records(tmp_path):
    out = tmp_path / "deep" / "linear.jsonl"
    command = ["linear", "--rows", "512", "--width", "24", "--device", "cpu", "--dtype", "float32", "--out", str(out)]
    for _ in range(2):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        assert "standard" in result.output and "paper" not in result.output
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["partitions"] for record in records] == 2 * list(linear.PARTITIONS)
    for record in records:
        assert record["benchmark"] == "linear"
        assert record["method"] == ("standard" if record["partitions"] == 1 else "streamed")
        assert record["shape"] == {"rows": 512, "width": 24} and record["dtype"] == "float32"
        assert record["step_ms"] > 0 and record["peak_bytes"] > 0 and record["error"] is None
        assert record["device"].startswith("cpu")
        assert record["versions"] == {"torch": torch.__version__, "streamgrad": streamgrad.__version__}
        assert record["command"] == "python -m benchmarks linear --rows 512 --width 24 --device cpu --dtype float32"
    peak_bytes = [record["peak_bytes"] for record in records[: len(linear.PARTITIONS)]]
    assert peak_bytes == sorted(peak_bytes, reverse=True)


def test_a_row_that_does_not_fit_says_so(monkeypatch, tmp_path):
    def too_large(*args):
        raise torch.OutOfMemoryError("tried to allocate 33 GB")

    monkeypatch.setattr(linear, "standard_linear_gradients", too_large)
    out = tmp_path / "linear.jsonl"
    result = CliRunner().invoke(app, ["linear", "--rows", "512", "--width", "8", "--device", "cpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "does not fit" in result.output
    first, second, *_ = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["step_ms"], first["peak_bytes"], first["error"]) == (None, None, "out of memory")
    assert second["error"] is None


def test_the_papers_shape_has_the_papers_numbers_beside_ours(monkeypatch, tmp_path):
    asked = {}

    def pretend(**options):
        asked.update(options)
        shape = {"rows": options["rows"], "width": options["width"]}
        for partitions in linear.PARTITIONS:
            yield linear.LinearRecord("linear", "streamed", partitions, shape, "bfloat16", 4e3, 10**9, None, "gpu", {}, "")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(linear, "measure_linear", pretend)
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["linear", "--paper", "--out", str(tmp_path / "linear.jsonl")])
    assert result.exit_code == 0, result.output
    assert asked == {"rows": 10**6, "width": 16384, "device": torch.device("cuda"), "dtype": torch.bfloat16}
    assert "25,150.0 MB" in result.output and "18,420.0 ms" in result.output and "cannot be for the shape" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "30", "--device", "cpu"], "partitions=500 is more than the 30 rows"),
        (["--paper", "--device", "cpu"], "X alone is 32.8 GB"),
        (["--paper", "--rows", "30"], "--paper sets --rows"),
    ],
)
def test_errors_are_one_line(options, message, monkeypatch, tmp_path):
    out = tmp_path / "linear.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "linear", *options, "--out", str(out)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert message in stopped.value.code and "\n" not in stopped.value.code
    assert not out.exists()


def test_the_example_runs():
    example = ROOT / "examples" / "linear_example.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("streamed") == 4
