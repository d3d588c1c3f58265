"""The report of all records: up to date, made of records alone, and README's and the docs' numbers with it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamgrad.bench import linear
from streamgrad.bench.report import SECTIONS, read_paper, read_records, render, speed_table, write_report
from streamgrad.bench.selection import automatic_steps, card_bytes, has_faulty_peak, latest, slopes
from streamgrad.cli.app import app

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture
def records():
    return read_records(RESULTS)


def test_the_committed_report_is_that_of_the_records(tmp_path):
    result = CliRunner().invoke(app, ["bench", "report", "--results", str(RESULTS), "--out", str(tmp_path / "REPORT.md")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "REPORT.md").read_text()
    assert text == (ROOT / "benchmarks/REPORT.md").read_text(), "run `python -m streamgrad bench report`"
    for picture in re.findall(r"\]\((plots/\w+\.png)\)", text):
        assert (tmp_path / picture).stat().st_size > 10_000
        assert (ROOT / "benchmarks" / picture).exists()


def test_the_same_records_give_the_same_bytes(tmp_path):
    once = write_report(RESULTS, tmp_path / "REPORT.md")
    before = [path.read_bytes() for path in once]
    assert write_report(RESULTS, tmp_path / "REPORT.md") == once
    assert [path.read_bytes() for path in once] == before


def test_every_section_has_numbers_or_a_reason(records):
    text = render(records, read_paper())
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert list(sections) == [title for title, _ in SECTIONS]
    for title, body in sections.items():
        assert "Made by `python -m streamgrad bench" in body or "**Not run:** " in body, title
        assert all(cell.strip() for line in body.splitlines() if line.startswith("|") for cell in line.split("|")[1:-1]), title


def test_a_missing_benchmark_is_said_to_be_not_run(records):
    before = render(records, read_paper()).count("**Not run:**")
    text = render(records | {"precision": []}, read_paper())
    assert text.count("**Not run:**") == before + 1
    assert "qwen3-4b: attention" not in text


def test_the_latest_record_counts(records):
    again = copy.deepcopy(automatic_steps(records["step"])["streamgrad", 36_000])
    again["step_ms"] = 1234.4
    changed = records | {"step": [*records["step"], again]}
    assert "**1,234 ms**" in speed_table(changed) and "**1,234 ms**" not in speed_table(records)


@pytest.mark.parametrize("option", [{"memory_budget": "20GiB"}, {"chunk_size": 2048}, {"keep": "input"}, {"offload": "host"}])
def test_a_step_with_an_option_set_is_not_in_the_speed_table(records, option):
    again = copy.deepcopy(automatic_steps(records["step"])["streamgrad", 36_000])
    again["policy"] |= option
    again["step_ms"] = 1.0
    assert speed_table(records | {"step": [*records["step"], again]}) == speed_table(records)


def test_partitions_are_compared_once_two_were_measured(records):
    rows = []
    for size in (1000, 5000):
        row = copy.deepcopy(automatic_steps(records["step"])["streamgrad", 36_000])
        row["policy"] |= {"chunk_size": size, "keep": "input"}
        rows.append(row | {"step_ms": 1000.0 + size})
    text = render(records | {"step": rows}, read_paper())
    assert "| qwen3-4b | 36,000 | input, auto | 1,000 | 2,000 ms |" in text
    assert "| qwen3-4b | 36,000 | input, auto | 5,000 | 6,000 ms |" in text


def test_a_small_card_is_one_by_its_cap(records):
    row = next(r for r in records["max_length"] if (r["model"], r["training"]) == ("qwen3-8b", "lora"))
    capped = row | {"seq_len": 14_240, "command": row["command"].replace("79GiB", "23GiB")}
    text = render(records | {"max_length": [*records["max_length"], capped]}, read_paper())
    assert re.search(r"## A card of 24 GB\n.*?\| qwen3-8b lora \| 14,240 \|[^\n]*\| 23 GiB \|", text, re.DOTALL)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no records"):
        write_report(tmp_path, tmp_path / "REPORT.md")


def test_readmes_speed_table_is_that_of_the_records(records):
    assert speed_table(records) in (ROOT / "README.md").read_text()


def test_readmes_bytes_a_token_are_those_of_the_records(records):
    cost = {method: f"{bytes_a_token / 1e3:.0f} KB" for (_, method), bytes_a_token in slopes(records["memory"]).items()}
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"a token costs (\d+ KB) of device memory .*? Liger with checkpoint offload takes (\d+ KB)", text)
    assert found and found.groups() == (cost["streamgrad"], cost["liger-offload"])


def test_the_performance_notes_have_the_records_steps(records):
    """Each `590 ms, 20.3 GB` of the two tables of steps."""
    steps = automatic_steps(records["step"])
    budgeted = latest((r for r in records["step"] if "--memory-budget liger" in r["command"]), "seq_len")
    text = (ROOT / "docs/performance.md").read_text().partition("### The floor")[0]
    compared = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or not cells[0].replace(",", "").isdecimal():
            continue
        length = int(cells[0].replace(",", ""))
        whole = len(cells) == 6
        expected = (
            [steps[m, length] for m in ("hf", "liger", "streamgrad")] if whole else [steps["liger", length], budgeted[length,]]
        )
        for cell, record in zip(cells[1:], expected, strict=False):
            assert cell == record_cell(record), (length, cell)
            compared += 1
    assert compared == 5 * 3 + 4 * 2


def test_the_performance_notes_have_the_records_lengths(records):
    text = (ROOT / "docs/performance.md").read_text()
    notes = [record for record in records["max_length"] if (record["objective"], card_bytes(record)) == ("sft", 79 * 2**30)]
    notes = [record for record in notes if record["model"].startswith("qwen3")]
    assert len(notes) >= 12
    for record in latest(notes, "model", "training", "seq_len").values():
        assert f"{record['seq_len']:,}: {record['peak_bytes'] / 1e9:.1f} GB" in text


def test_readme_names_the_records_hardware_and_versions(records):
    text = " ".join((ROOT / "README.md").read_text().split())
    for record in automatic_steps(records["step"]).values():
        found = {name: ".".join(version.split(".")[:2]) for name, version in record["versions"].items()}
        liger = record["versions"]["liger-kernel"]
        assert f"{record['device']} (torch {found['torch']}, transformers {found['transformers']}, Liger {liger})" in text


def record_cell(record: dict) -> str:
    if record["step_ms"] is None:
        return record["error"]
    peak = "peak not valid" if has_faulty_peak(record) else f"{record['peak_bytes'] / 1e9:.1f} GB"
    return f"{record['step_ms']:,.0f} ms, {peak}"


def test_the_papers_numbers_are_the_same_everywhere():
    paper = read_paper()
    theirs = paper["linear_example"]
    columns = zip(theirs["partitions"], theirs["intermediate_gb"], theirs["seconds"], strict=True)
    assert {parts: (gigabytes, seconds) for parts, gigabytes, seconds in columns} == linear.PAPER_RESULTS


def test_precision_is_kept_as_a_record(monkeypatch, tmp_path, records):
    import streamgrad.check.precision as precision

    monkeypatch.setattr(precision, "MODELS", 1)
    out = tmp_path / "precision.jsonl"
    result = CliRunner().invoke(app, ["bench", "precision", "--model", "qwen3-4b", "--device", "cpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    (row,) = read_records(tmp_path)["precision"]
    assert row.keys() == records["precision"][0].keys()
    assert row["failures"] == [] or "times as wrong" in row["failures"][0]  # one model alone is a noisy ratio
    assert row["table"]["mlp"]["stream32"]["relative"] < 1e-5
