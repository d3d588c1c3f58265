"""`python -m benchmarks`: what its help imports, that no wrong value ends in a traceback, and how earlier commands are read."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command

from benchmarks.__main__ import main
from benchmarks.commands import app
from benchmarks.names import command_line, typed_command, unless
from benchmarks.records import append_records, rows_in

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "step", "memory", "max-length", "head", "linear", "partition", "precision", "predicted", "shared-prompts", "families",
    "run", "train-step", "longest", "report",
}  # fmt: skip


@dataclass
class Row:
    name: str


def test_a_full_disk_leaves_records_as_they_were(tmp_path, monkeypatch):
    """Half a line at the end of the file would make all of it unreadable."""
    path = tmp_path / "step.jsonl"
    append_records(path, [Row("first")])
    append_records(path, [Row("second")])
    stock = Path.write_text

    def full(file, text, *args, **kwargs):
        stock(file, text[: len(text) - 3], *args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=rf"{path}: No space left on device. Those in it are as they were"):
        append_records(path, [Row("third")])
    assert [row["name"] for row in rows_in(path)] == ["first", "second"]
    assert list(tmp_path.iterdir()) == [path]


def test_every_benchmark_is_a_command():
    assert {command.name for command in app.registered_commands} == COMMANDS


@pytest.mark.parametrize("words", [["--help"], ["step", "--help"], ["head", "--help"]], ids=" ".join)
def test_help_needs_neither_torch_nor_transformers(words):
    code = f"""
import atexit, json, sys
from benchmarks.__main__ import main
atexit.register(lambda: print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}}))))
sys.argv = {["benchmarks", *words]!r}
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert not set(json.loads(done.stdout.splitlines()[-1])) & {"torch", "transformers", "matplotlib", "trl", "deepspeed"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "--seq", "0"], "--seq must be whole numbers of at least 1, separated by commas, got '0'"),
        (["step", "--seq", "6000,x"], "--seq must be whole numbers of at least 1, separated by commas, got '6000,x'"),
        (["step", "--batch", "-1"], "--batch must be whole numbers of at least 1, separated by commas, got '-1'"),
        (["step", "--chunk-size", "-1"], "chunk_size=-1 "),
        (["step", "--chunk-size", "1.5"], "chunk_size='1.5' "),
        (["step", "--memory-budget", "80"], "memory_budget: '80' is not an amount of memory"),
        (["step", "--model", "qwen9"], "'qwen9' is not a preset. The presets are qwen3-0.6b"),
        (["head", "--chunk-size", "many"], "chunk_size='many' "),
        (["memory", "--training", "half"], "training='half' is not a choice. Pass full or lora"),
        (["max-length", "--factor", "nan"], "factor=nan gives no length. Pass a finite number above 0"),
        (["max-length", "--factor", "0"], "factor=0 gives no length"),
        (["max-length", "--gpu-memory", "nan"], "'nan' is not an amount of memory"),
        (["max-length", "--seq", "9", "--factor", "2"], "--factor has no effect with --seq. Leave one of the two out"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_benchmarks_that_cannot_be_run(words, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    line = stopped.value.code
    assert line.startswith("streamgrad: ") and said in line and "\n" not in line
    assert not list(tmp_path.iterdir())


def test_a_command_names_what_differs_from_the_default():
    options = {"model": "m", "batch": unless("1", "1"), "memory_budget": None, "kernels": True, "accumulate": False}
    assert command_line("step", **options) == "python -m benchmarks step --model m --kernels"


def test_a_typed_command_leaves_out_where_rows_went(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "families", "experts", "--out", "rows.jsonl", "--runs", "1"])
    assert typed_command() == "python -m benchmarks families experts --runs 1"


def test_a_record_of_an_earlier_command_is_read_under_todays(tmp_path):
    path, old, new = tmp_path / "rows.jsonl", "python -m streamgrad bench step --seq 9", "python -m benchmarks step --seq 9"
    path.write_text("".join(json.dumps({"command": command}) + "\n" for command in (old, new, "another")))
    assert [row["command"] for row in rows_in(path)] == [new, new, "another"]
    assert json.loads(path.read_text().splitlines()[0])["command"] == old


@pytest.mark.parametrize("page", ["README.md", "benchmarks/REPORT.md", "docs/performance.md", "docs/plan.md"])
def test_every_command_that_a_page_shows_can_be_run(page):
    """Its name and its options exist. Some of those in the report are of records that were made before `python -m benchmarks`."""
    shown = re.findall(r"`python -m benchmarks ([^`]+)`", " ".join((ROOT / page).read_text().split()))
    commands = get_command(app).commands
    assert shown
    for name, *words in map(str.split, shown):
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, words
