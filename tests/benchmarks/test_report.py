"""The report of all records: up to date, made of records alone, and README's and the docs' numbers with it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import linear
from benchmarks.commands import app
from benchmarks.figures import draw_plots
from benchmarks.longest import predictions_in
from benchmarks.report import SECTIONS, read_paper, read_records, render, write_report
from benchmarks.report_by_memory import PEERS, README_LENGTHS, our_points, peer_points, speed_table
from benchmarks.selection import (
    automatic_steps,
    card_bytes,
    has_faulty_peak,
    latest,
    measured_beside,
    memory_series,
    paper_longest,
    steps_within_liger,
    token_bytes,
)
from gradients import more

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"


@pytest.fixture
def records():
    return read_records(RESULTS)


def test_the_committed_report_is_that_of_the_records(tmp_path):
    result = CliRunner().invoke(app, ["report", "--results", str(RESULTS), "--out", str(tmp_path / "REPORT.md")])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "REPORT.md").read_text()
    assert text == (ROOT / "benchmarks/REPORT.md").read_text(), "run `python -m benchmarks report`"
    for picture in re.findall(r"\]\((plots/\w+\.png)\)", text):
        assert (tmp_path / picture).stat().st_size > 10_000
        assert (ROOT / "benchmarks" / picture).exists()


@more
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
        assert "Made by `python -m benchmarks" in body or "**Not run:** " in body, title
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


def test_our_steps_stand_beside_the_fastest_peer_in_no_more_memory(records):
    """A peer that keeps everything is the fastest of all, but counts in less memory only where it took no more."""
    others = [record for record in records["step"] if record["seq_len"] != 36_000]
    ours = step_row(records, step_ms=1000.0, peak_bytes=50 * 10**9)
    within = step_row(records, step_ms=1500.0, peak_bytes=20 * 10**9, command="python -m benchmarks step --memory-budget liger")
    within["policy"]["memory_budget"] = 21 * 10**9
    peers = [
        step_row(records, method=method, step_ms=time, peak_bytes=peak * 10**9, policy={})
        for method, time, peak in (("liger", 1800.0, 21), ("liger-nockpt", 900.0, 60), ("hf-compile", 1200.0, 40))
    ]
    graphs = step_row(records, method="streamgrad-compile", step_ms=800.0, peak_bytes=55 * 10**9)
    changed = records | {"step": [*others, ours, within, graphs, *peers]}
    lines = [line for line in speed_table(changed).splitlines() if line.startswith("| 36,000 |")]
    compiled, kept = "transformers compiled, checkpointing: 1,200 ms, 40.0 GB", "Liger kernels, all kept: 900 ms, 60.0 GB"
    liger = "Liger kernels, checkpointing: 1,800 ms, 21.0 GB"
    assert lines == [
        f"| 36,000 | all of the card | **1,000 ms**, 50.0 GB | {compiled} | 1.20x | {kept} | 0.90x |",
        f"| 36,000 | all of the card, compiled | **800 ms**, 55.0 GB | {compiled} | 1.50x | {kept} | 1.12x |",
        f"| 36,000 | 21.0 GB | **1,500 ms**, 20.0 GB | {liger} | 1.20x | - | - |",
    ]
    assert [point.name for point in peer_points(changed)[36_000]] == [PEERS[m] for m in ("liger-nockpt", "hf-compile", "liger")]
    assert [point.record["step_ms"] for point in our_points(changed)[36_000]] == [1000.0, 800.0, 1500.0]
    checkpointing = records | {"step": [*others, ours, peers[0]]}
    assert f"{liger} (of those that checkpoint)" in speed_table(checkpointing)
    assert "| 36,000 | Liger kernels, all kept | 60.0 GB | 900 ms |" in render(changed, read_paper())


@pytest.mark.parametrize("option", [{"memory_budget": "20GiB"}, {"chunk_size": 2048}, {"keep": "input"}, {"offload": "host"}])
def test_a_step_with_an_option_set_is_not_in_the_speed_table(records, option):
    again = copy.deepcopy(automatic_steps(records["step"])["streamgrad", 36_000])
    again["policy"] |= option
    again["step_ms"] = 1.0
    assert speed_table(records | {"step": [*records["step"], again]}) == speed_table(records)


def step_row(records, **changes) -> dict:
    return copy.deepcopy(automatic_steps(records["step"])["streamgrad", 36_000]) | changes


def test_partitions_are_compared(records):
    rows = []
    for size in (5000, 1000):
        row = step_row(records, step_ms=1000.0 + size, benchmark="partition")
        row["policy"] |= {"chunk_size": size, "keep": "input", "offload": "none"}
        rows.append(row)
    text = render(records | {"partition": rows}, read_paper())
    assert "| qwen3-4b | 36,000 | 1,000 | 2,000 ms |" in text
    assert text.index("| qwen3-4b | 36,000 | 1,000 |") < text.index("| qwen3-4b | 36,000 | 5,000 | 6,000 ms |")


def test_batches_are_seconds_a_sample(records):
    rows = [step_row(records, seq_len=9000, batch=batch, method="mst", step_ms=700.0 * batch) for batch in (1, 2, 4)]
    rows.append(step_row(records, seq_len=9000, batch=16, method="mst", step_ms=None, peak_bytes=None, error="out of memory"))
    others = [record for record in records["step"] if record["seq_len"] != 9000]
    changed = records | {"step": [*others, *rows]}
    text = render(changed, read_paper())
    assert "| ours: MsT | 0.700 s | 0.700 s | 0.700 s | out of memory |" in text
    assert "| ours: streamgrad | not run | not run | not run | not run |" in text
    assert speed_table(changed, README_LENGTHS) == speed_table(records, README_LENGTHS)
    assert automatic_steps(changed["step"]).keys() - automatic_steps(others).keys() == {("mst", 9000)}


def test_a_peer_of_the_same_command_stands_beside_our_step(records):
    """A later step of the peer's, of another day, does not."""
    ours = step_row(records, seq_len=36_000, method="streamgrad", step_ms=100.0, command="python -m benchmarks step --one")
    peers = [
        step_row(records, seq_len=36_000, method="liger", step_ms=time, command=f"python -m benchmarks step --{name}")
        for time, name in ((150.0, "one"), (190.0, "another"))
    ]
    table = speed_table(records | {"step": [*records["step"], ours, *peers]})
    assert "**100 ms**" in table and "Liger kernels, checkpointing: 150 ms" in table and "190 ms" not in table


def test_steps_with_flash_attention_4_stand_beside_the_usual_ones(records):
    others = [record for record in records["step"] if record["flash"] == "FA2"]
    rows = [
        step_row(records, seq_len=36_000, method=method, step_ms=time, flash="FA4")
        for method, time in (("hf", 5.0), ("streamgrad", 3.0))
    ]
    changed = records | {"step": [*others, *rows]}
    usual = automatic_steps(others)
    liger = usual["liger", 36_000]["step_ms"]
    expected = f"| 36,000 | {usual['hf', 36_000]['step_ms']:,.0f} ms | 5 ms | {liger:,.0f} ms | not run | "
    assert expected in render(changed, read_paper())
    assert speed_table(changed) == speed_table(records)


@pytest.mark.parametrize(("objective", "rows", "tokens"), [("dpo", 2, 121_800), ("grpo", 8, 33_000)])
def test_lengths_are_compared_by_objective(records, objective, rows, tokens):
    row = next(r for r in records["max_length"] if (r["model"], r["training"]) == ("qwen3-8b", "lora"))
    row = row | {"objective": objective, "batch": rows, "seq_len": tokens}
    failed = row | {"model": "qwen3-14b", "step_ms": None, "peak_bytes": None, "error": "out of memory"}
    text = render(records | {"max_length": [*records["max_length"], row, failed]}, read_paper())
    section = text.partition(f"### {objective.upper()}")[2].partition("###")[0]
    assert f"| qwen3-8b lora | {rows} x {tokens:,} | 2.00x | on the host | 2 of 36 |" in section
    assert re.search(r"\| qwen3-14b lora \|.*\| out of memory \|", section)
    assert "**Not run:**" not in section


def test_lengths_are_compared_with_trls(records):
    row = records["max_length"][0] | {"model": "gemma-3-1b", "seq_len": 215_040, "layers": 26, "step_ms": 1500.0}
    text = render(records | {"max_length": [*records["max_length"], row]}, read_paper())
    assert re.search(r"\| SFT \| gemma-3-1b full \| 215,040 \| 2.00x \|.*\| 26 of 26 \|.*\| 1,500 ms \|", text)


def test_a_small_card_is_one_by_its_cap(records):
    row = next(r for r in records["max_length"] if (r["model"], r["training"]) == ("qwen3-8b", "lora"))
    capped = row | {"seq_len": 30_000, "layers": 36, "command": row["command"].replace("79GiB", "23.5GiB")}
    text = render(records | {"max_length": [*records["max_length"], capped]}, read_paper())
    assert text.count("| qwen3-8b lora | 30,000 |") == 1
    assert re.search(r"## A card of 24 GB\n.*?\| qwen3-8b lora \| 30,000 \| 2.00x \|[^\n]*\| 23.5 GiB \|", text, re.DOTALL)


def whole_model_rows(records) -> list[dict]:
    """Return what `python -m benchmarks memory` makes, for three models and three methods."""
    row = records["memory"][0]
    rows = []
    for model, layers, gigabytes in (("qwen3-8b", 36, 17), ("qwen3-14b", 40, 30), ("qwen3-32b", 64, 66)):
        for method, offload, cost in (
            ("hf", None, 1.9),
            ("mst", None, 0.9),
            ("streamgrad", "none", 0.5),
            ("streamgrad", "host", 0.1),
        ):
            for length in (8_000, 16_000, 32_000):
                peak = int(1e9 * (gigabytes + cost * length / 1e3))
                policy = {} if offload is None else {"offload": offload}
                changes = {"model": model, "layers": layers, "method": method, "seq_len": length, "policy": policy}
                rows.append(row | changes | {"training": "lora", "peak_bytes": peak, "step_ms": 1.0, "error": None})
    return rows


def test_whole_models_are_drawn_and_compared_with_mini_sequences(records, tmp_path):
    changed = records | {"memory": [*records["memory"], *whole_model_rows(records)]}
    text = render(changed, read_paper())
    assert "| qwen3-32b lora | 64 | 16,000 | streamgrad, inputs on the host | 67.6 GB | 1.1 GB | 100.0 KB |" in text
    section = text.partition("## Mini-sequences")[2].partition("\n## ")[0]
    assert "| qwen3-8b lora | 36 | 8,000 | mst | 24.2 GB |" in section and "| hf |" not in section
    drawn = {path.stem for path in draw_plots(changed, read_paper(), tmp_path)}
    assert "memory_models" in drawn and set(re.findall(r"plots/(\w+)\.png", text)) <= drawn


def test_the_cut_model_keeps_its_cost_beside_whole_ones(records):
    changed = records["memory"] + whole_model_rows(records)
    found = {series: token_bytes(rows) for series, rows in memory_series(changed).items() if not series.is_whole}
    before = memory_series(records["memory"])
    assert found == {series: token_bytes(rows) for series, rows in before.items() if not series.is_whole}


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="has no records"):
        write_report(tmp_path, tmp_path / "REPORT.md")


def test_readmes_speed_table_is_that_of_the_records(records):
    assert speed_table(records, README_LENGTHS) in (ROOT / "README.md").read_text()


def test_readmes_runs_are_those_of_the_records(records):
    text = " ".join((ROOT / "README.md").read_text().split())
    found = latest((run for run in records["run"] if not run.get("settled_ms")), "model", "training", "method")
    said = re.search(
        r"sequences of (.*?) to (.*?) tokens, .*? through (.*?) tokens a second, (.*?) times as .*? through (.*?), (.*?) times",
        text,
    )
    lengths, expected = found["qwen3-4b", "full", "streamgrad"]["lengths"], []
    for shape in (("qwen3-4b", "full"), ("qwen3-8b", "lora")):
        ours, liger = (found[(*shape, method)]["tokens_per_second"] for method in ("streamgrad", "liger"))
        expected += [f"{ours:,.0f}", f"{ours / liger:.2f}"]
    assert said and said.groups() == (f"{min(lengths):,}", f"{max(lengths):,}", *expected)


def test_readmes_bytes_a_token_are_those_of_the_records(records):
    cut = {s.method: rows for s, rows in memory_series(records["memory"]).items() if (s.model, s.layers) == ("qwen3-8b", 2)}
    cost = {method: f"{token_bytes(rows) / 1e3:.0f} KB" for method, rows in cut.items()}
    text = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(
        r"each further token of Qwen3-8B takes (\d+ KB) of device memory .*? With Liger .*? it takes (\d+ KB)", text
    )
    assert found and found.groups() == (cost["streamgrad"], cost["liger-offload"])


def test_readmes_whole_training_is_that_of_the_records(records):
    """Seconds of steps of all layers, and the peaks of long ones."""
    found = {(record["optimizer"], record["seq_len"], record["layers"]): record for record in records["train_step"]}
    long, longer, longest, small = (
        found[key]
        for key in (
            ("in-backward", 200_000, 36),
            ("in-backward", 600_000, 2),
            ("in-backward", 1_200_000, 2),
            ("host", 64_000, 36),
        )
    )
    text = " ".join((ROOT / "README.md").read_text().split())
    pattern = (
        r"200,000 tokens, .*? takes (\S+) s and (\S+) GiB .*? At 600,000 tokens it takes (\S+) GiB, .*? at 1,200,000, "
        r".*? (\S+) GiB\. .*? 64,000 tokens in (\S+) s"
    )
    said = re.search(pattern, text)
    peaks = [record["peak_bytes"] / 2**30 for record in (long, longer, longest)]
    expected = [long["step_ms"] / 1e3, *peaks, small["step_ms"] / 1e3]
    assert said and list(said.groups()) == [f"{number:.1f}" for number in expected]
    assert {record["model"] for record in (long, longer, longest, small)} == {"qwen3-8b"}
    assert small["peak_bytes"] < small["limit_bytes"] == 23.5 * 2**30


def test_the_performance_notes_have_the_records_steps(records):
    """Each `590 ms, 20.3 GB` of the two tables of steps."""
    steps = automatic_steps(records["step"])
    within = steps_within_liger(records["step"])
    text = (ROOT / "docs/performance.md").read_text().partition("### The floor")[0]
    compared = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or not cells[0].replace(",", "").isdecimal():
            continue
        length = int(cells[0].replace(",", ""))
        whole = len(cells) == 6
        ours = steps["streamgrad", length]
        peers = [measured_beside(records["step"], ours, steps[method, length]) for method in ("hf", "liger")]
        expected = [*peers, ours] if whole else within[length][::-1]
        for cell, record in zip(cells[1:], expected, strict=False):
            assert cell == record_cell(record), (length, cell)
            compared += 1
    assert compared == 5 * 3 + 5 * 2


def test_the_performance_notes_have_the_records_lengths(records):
    text = (ROOT / "docs/performance.md").read_text()
    notes = [record for record in records["max_length"] if (record["objective"], card_bytes(record)) == ("sft", 79 * 2**30)]
    notes = [record for record in notes if record["model"].startswith("qwen3")]
    assert len(notes) >= 12
    for record in latest(notes, "model", "training", "seq_len").values():
        assert f"{record['seq_len']:,}: {record['peak_bytes'] / 1e9:.1f} GB" in text


def test_the_longest_sequences_are_confirmed_and_as_long_as_is_said(records):
    """By a step for each cell of the paper's table; README and the notes have the smallest and largest share."""
    longest, shares = read_paper()["max_sequence_length_thousands"], {"none": [], "auto": []}
    for prediction in predictions_in(records["longest"]):
        step = prediction.confirmed_by(records["train_step"])
        assert step and step["seq_len"] >= 0.97 * prediction.tokens - 1 and step["peak_bytes"] <= 79 * 2**30, prediction
        shares[prediction.offload].append(prediction.tokens / paper_longest(vars(prediction), longest))
    expected = [f"{end(shares[offload]):.1f}" for offload in ("none", "auto") for end in (min, max)]
    for page in ("README.md", "docs/performance.md"):
        text = " ".join((ROOT / page).read_text().split())
        said = re.search(r"79 GiB.{0,90}? ([\d.]+) to ([\d.]+) times .{0,120}? ([\d.]+) to ([\d.]+) times", text)
        assert said and list(said.groups()) == expected, page


def test_readme_names_the_records_hardware_and_versions(records):
    text = " ".join((ROOT / "README.md").read_text().split())
    for record in automatic_steps(records["step"]).values():
        found = {name: ".".join(version.split(".")[:2]) for name, version in record["versions"].items()}
        liger = record["versions"]["liger-kernel"]
        assert f"{record['device']} (torch {found['torch']}, transformers {found['transformers']}, Liger {liger})" in text


def record_cell(record: dict) -> str:
    if record["step_ms"] is None:
        return record["error"].split(" (")[0]
    peak = "peak not valid" if has_faulty_peak(record) else f"{record['peak_bytes'] / 1e9:.1f} GB"
    return f"{record['step_ms']:,.0f} ms, {peak}"


def test_the_papers_numbers_are_the_same_everywhere():
    paper = read_paper()
    theirs = paper["linear_example"]
    columns = zip(theirs["partitions"], theirs["intermediate_gb"], theirs["seconds"], strict=True)
    assert {parts: (gigabytes, seconds) for parts, gigabytes, seconds in columns} == linear.PAPER_RESULTS


def test_precision_is_kept_as_a_record(monkeypatch, tmp_path, records):
    import streamgrad.precision as precision

    monkeypatch.setattr(precision, "MODELS", 1)
    out = tmp_path / "precision.jsonl"
    result = CliRunner().invoke(app, ["precision", "--model", "qwen3-4b", "--device", "cpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    (row,) = read_records(tmp_path)["precision"]
    assert row.keys() == records["precision"][0].keys()
    assert row["failures"] == [] or "times as wrong" in row["failures"][0]  # one model alone is a noisy ratio
    assert row["table"]["mlp"]["stream32"]["relative"] < precision.LARGEST_ERROR


def test_a_step_on_a_whole_card_is_not_set_beside_the_papers(records):
    """It has more memory than the paper's card; its own table names the card."""
    (whole,) = [record for record in records["max_length"] if "--gpu-memory" not in record["command"]]
    text = render(records, read_paper())
    compared, _, rest = text.partition("### A whole card")
    row = f"| {whole['model']} {whole['training']} | {whole['seq_len']:,} | "
    assert row not in compared and f"{row}{whole['device']} |" in rest
