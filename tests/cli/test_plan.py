"""`streamgrad plan`: its tables, its JSON and its pictures say what `streamgrad.estimate` returns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import streamgrad
from streamgrad.cli.app import app
from streamgrad.hf import shapes
from streamgrad.memory.seconds import Rates


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})


def test_the_table_says_what_the_report_says(tmp_path):
    picture = tmp_path / "plots" / "plan.png"
    result = run("qwen3-8b", "--seq-len", "65536", "--optimizer", "none", "--out", str(picture))
    assert result.exit_code == 0, result.output
    report = streamgrad.estimate("qwen3-8b", 65_536, optimizer="none")
    assert f"{report.streamed.longest_tokens:,}" in result.output and str(report.streamed.plan) in result.output
    for component, count in report.streamed.device_bytes.items():
        if count:
            assert re.search(rf"{component} .*{count / 2**30:,.2f} GiB", result.output), component
    assert all(line in result.output for line in report.assumptions)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen3-4b", "--seq-len", "4000000"], r"4,000,000 tokens do not fit. Up to [\d,]+ tokens would.*Smallest plan: "),
        (["qwen3-8b", "--seq-len", "1000", "--gpu-memory", "24GiB"], "No length fits: weights .* take 45.77 GiB.*--method lora"),
    ],
)
def test_what_does_not_fit_says_what_would(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 0 and re.search(words, " ".join(result.output.split()))


def test_json_is_the_report():
    result = run("qwen3-4b", "--max", "--method", "lora", "--json", "--gpu-memory", "24GiB", "--gemm-tflops", "100")
    row = json.loads(result.output)
    expected = streamgrad.estimate("qwen3-4b", method="lora", gpu_memory="24GiB", rates=Rates(gemm=100e12)).to_dict()
    assert row == json.loads(json.dumps(expected))
    assert row["streamed"]["seconds"]["total"] > 0 and row["streamed"]["plan"].startswith(("36 x", "1", "2", "3"))


def test_a_length_or_the_longest():
    for arguments in ([], ["--max", "--seq-len", "9"]):
        result = run("qwen3-4b", *arguments)
        assert isinstance(result.exception, ValueError) and "--max" in str(result.exception)


def test_the_table_in_the_documentation_is_what_the_command_prints():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    command = re.search(r"^python -m streamgrad plan (.*)$", text, flags=re.MULTILINE)
    shown = re.search(r"^```\n(qwen3-8b.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert command is not None and shown is not None
    result = CliRunner().invoke(app, ["plan", *command[1].split()], env={"COLUMNS": "100"})
    printed = "\n".join(line.rstrip() for line in result.output.splitlines())
    assert printed.startswith(shown[1]), (
        "run the command with COLUMNS=100 and --out docs/images/plan.png, and show what it prints"
    )


def test_several_lengths_are_columns_of_one_table(monkeypatch):
    shapes_made = []
    stock = shapes.shape_of
    monkeypatch.setattr("streamgrad.hf.estimate.shape_of", lambda *args, **kw: shapes_made.append(args) or stock(*args, **kw))
    result = run("qwen3-4b", "--seq-len", "8192, 65536,4000000", "--method", "lora")
    assert result.exit_code == 0 and len(shapes_made) == 1
    reports = [streamgrad.estimate("qwen3-4b", length, method="lora") for length in (8192, 65_536, 4_000_000)]
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in result.output.splitlines() if line[:1] in "│┃"]
    assert rows[0] == ["tokens", "8,192", "65,536", "4,000,000"]
    for row, outlooks in zip(
        [row for row in rows if row[0].endswith(", GPU")],
        ([report.streamed for report in reports], [report.checkpointing for report in reports]),
        strict=True,
    ):
        assert row[1:] == [f"{outlook.peak_bytes / 2**30:,.2f} GiB" for outlook in outlooks]
    assert "4,000,000 tokens do not fit." in result.output
    assert all(f"lan of {report.seq_len:,} tokens: {report.streamed.plan}" in result.output for report in reports)


def test_several_lengths_are_a_list_in_json():
    result = run("qwen3-4b", "--seq-len", "8192,65536", "--json")
    expected = [streamgrad.estimate("qwen3-4b", length).to_dict() for length in (8192, 65_536)]
    assert json.loads(result.output) == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seq-len", "8192,"], "--seq-len must be whole numbers of at least 1, separated by commas, got '8192,'"),
        (["--seq-len", "8192,0"], "--seq-len must be whole numbers"),
        (["--seq-len", "1,2", "--out", "plan.png"], "--out draws one length, got 2: --seq-len 1,2"),
    ],
)
def test_lengths_that_cannot_be_planned(arguments, words):
    result = run("qwen3-4b", *arguments)
    assert isinstance(result.exception, ValueError) and words in str(result.exception)
