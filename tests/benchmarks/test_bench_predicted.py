"""`python -m benchmarks predicted`: what it runs, and what its records say about `streamgrad plan`."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import streamgrad
from benchmarks import predicted
from benchmarks.predicted import (
    ABOVE,
    ALLOCATOR,
    BELOW,
    CONFIGURATIONS,
    FAR_ABOVE,
    FAR_BELOW,
    Configuration,
    Found,
    found_in,
    with_growing_segments,
)
from benchmarks.records import Session, rows_in

ROOT = Path(__file__).parents[2]
RECORDS = rows_in(ROOT / "benchmarks" / "results" / "predicted.jsonl")


@pytest.mark.parametrize(
    ("longest", "shares"), [(1.0, [BELOW, ABOVE]), (1.05, [BELOW, ABOVE, FAR_ABOVE]), (0.95, [BELOW, ABOVE, FAR_BELOW])]
)
@pytest.mark.parametrize("resumed", [False, True])
def test_steps_on_both_sides_of_the_longest_under_the_cap(longest, shares, resumed, monkeypatch):
    """Where the longest step that fits is `longest` times the prediction; `resumed`: the first step was measured before."""
    caps, calls = [], []
    configuration = Configuration("qwen3-0.6b", "lora", "6GiB")
    tokens = configuration.longest_tokens()

    @contextmanager
    def capped(limit):
        caps.append(limit)
        yield

    monkeypatch.setattr(predicted, "capped", capped)

    def error(length):
        return None if length <= longest * tokens else "out of memory"

    before = [{"command": configuration.command, "seq_len": int(BELOW * tokens), "error": error(int(BELOW * tokens))}]
    session = Session(before if resumed else [])

    def measure_steps(**options):
        calls.append(options)
        done = {row["seq_len"] for row in options["session"].rows}
        return (SimpleNamespace(seq_len=length, error=error(length)) for length in options["lengths"] if length not in done)

    monkeypatch.setattr(predicted, "measure_steps", measure_steps)
    measured = [record.seq_len for record in configuration.measure(session)]
    assert measured == [int(share * tokens) for share in shares][int(resumed) :] and tokens > 10_000
    assert set(caps) == {6 * 2**30} and all(call["command"] == configuration.command for call in calls)
    assert all((call["model"], call["training"], call["config"].offload) == ("qwen3-0.6b", "lora", "none") for call in calls)


@pytest.mark.parametrize(
    ("fitted", "failed", "holds"),
    [(96_000, 105_000, True), (96_000, None, False), (None, 96_000, False), (90_000, 105_000, False), (96_000, 106_000, False)],
)
def test_a_prediction_holds_wherever_the_true_length_lies(fitted, failed, holds):
    assert Found(CONFIGURATIONS[0], fitted, failed).holds(100_000) == holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_once(tmp_path):
    """From the process of the first configuration; the others are not tried."""
    command = [sys.executable, "-m", "benchmarks", "predicted", "--out", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.count("torch sees none") == 1 and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_records_by_configuration():
    first, second = CONFIGURATIONS[:2]
    rows = [
        {"command": first.command, "seq_len": 10, "error": None},
        {"command": first.command, "seq_len": 12, "error": "out of memory"},
        {"command": first.command, "seq_len": 9, "error": "out of memory", "allocator": "another"},
        {"command": second.command, "seq_len": 7, "error": "out of memory"},
        {"command": second.command, "seq_len": 6, "error": "something else"},
        {"command": "another", "seq_len": 7, "error": None},
    ]
    rows = [{"allocator": ALLOCATOR} | row for row in rows]
    assert found_in(rows) == [Found(first, 10, 12), Found(second, None, 7)]


@pytest.mark.parametrize("found", found_in(RECORDS), ids=lambda found: found.configuration.command.partition("--")[2])
def test_predicted_longest_lengths_are_within_5_per_cent(found):
    """Where both ends were found. Where only lengths that fit were, at least not 5 per cent below one of them."""
    predicted = found.configuration.longest_tokens()
    if found.failed is None:
        assert 1.05 * predicted >= found.fitted, found
    else:
        assert found.holds(predicted), found


def test_twelve_configurations_have_both_ends():
    complete = [found for found in found_in(RECORDS) if found.fitted and found.failed]
    assert len(complete) >= 12


def was_largest_at_embeddings(record: dict) -> bool:
    """Whether it was made when tied embeddings had a gradient beside the head's, the most that such a step held at a time."""
    return (record["model"], record["training"], record["policy"]["offload"]) == ("gemma-3-1b", "full", "auto")


@pytest.mark.parametrize(
    "record",
    [each for each in with_growing_segments(RECORDS) if each["error"] is None and not was_largest_at_embeddings(each)],
    ids=lambda record: f"{record['model']} {record['training']} {record['seq_len']}",
)
def test_the_peak_of_a_step_that_fills_a_card(record):
    """By the configuration, the length and the card alone: the smallest chunks that there were, and the bytes."""
    cap = re.search(r"--gpu-memory (\S+)", record["command"])[1]
    streamed = streamgrad.estimate(
        record["model"], record["seq_len"], method=record["training"], optimizer="none", offload=record["policy"]["offload"],
        recompute_layers=1, gpu_memory=cap, host_memory="100GiB",
    ).streamed  # fmt: skip
    assert streamed.fits or record["seq_len"] > streamed.longest_tokens
    assert min(streamed.plan.chunk_sizes) == min(record["policy"]["chunk_sizes"])
    # Gemma 3 has two tables of rotary angles, one of which is gone when backward reaches the first layers.
    bound = 0.035 if (record["model"], record["policy"]["offload"]) == ("gemma-3-1b", "auto") else 0.02
    assert streamed.peak_bytes == pytest.approx(record["peak_bytes"], rel=bound)
