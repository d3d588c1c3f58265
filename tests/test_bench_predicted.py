"""`bench predicted`: what it runs, and what its records say about `streamgrad plan`."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from streamgrad.bench import predicted
from streamgrad.bench.predicted import ABOVE, BELOW, CONFIGURATIONS, Configuration, Found, found_in
from streamgrad.bench.records import rows_in

RECORDS = rows_in(Path(__file__).parents[1] / "benchmarks" / "results" / "predicted.jsonl")


def test_a_step_below_and_one_above_under_the_cap(monkeypatch):
    caps, calls = [], []

    @contextmanager
    def capped(limit):
        caps.append(limit)
        yield

    monkeypatch.setattr(predicted, "capped", capped)
    monkeypatch.setattr(predicted, "measure_steps", lambda **options: calls.append(options) or iter(()))
    configuration = Configuration("qwen3-0.6b", "lora", "6GiB")
    assert list(configuration.measure()) == []
    (call,) = calls
    tokens = configuration.longest_tokens()
    assert caps == [6 * 2**30] and call["lengths"] == [int(BELOW * tokens), int(ABOVE * tokens)] and tokens > 10_000
    assert (call["model"], call["training"], call["config"].offload) == ("qwen3-0.6b", "lora", "none")
    assert call["command"] == configuration.command


@pytest.mark.parametrize(
    ("fitted", "failed", "holds"),
    [(96_000, 105_000, True), (96_000, None, False), (None, 96_000, False), (90_000, 105_000, False), (96_000, 106_000, False)],
)
def test_a_prediction_holds_wherever_the_true_length_lies(fitted, failed, holds):
    assert Found(CONFIGURATIONS[0], fitted, failed).holds(100_000) == holds


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_once(tmp_path):
    """From the process of the first configuration; the others are not tried."""
    command = [sys.executable, "-m", "streamgrad", "bench", "predicted", "--out", str(tmp_path / "rows.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("torch sees none") == 1 and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_records_by_configuration():
    first, second = CONFIGURATIONS[:2]
    rows = [
        {"command": first.command, "seq_len": 10, "error": None},
        {"command": first.command, "seq_len": 12, "error": "out of memory"},
        {"command": second.command, "seq_len": 7, "error": "out of memory"},
        {"command": second.command, "seq_len": 6, "error": "something else"},
        {"command": "another", "seq_len": 7, "error": None},
    ]
    assert found_in(rows) == [Found(first, 10, 12), Found(second, None, 7)]


@pytest.mark.parametrize("found", found_in(RECORDS), ids=lambda found: found.configuration.command.partition("--")[2])
def test_predicted_longest_lengths_are_within_5_per_cent(found):
    """Where both ends were found. Where only lengths that fail were, at least not 5 per cent above one of them."""
    predicted = found.configuration.longest_tokens()
    if found.fitted is None:
        assert predicted <= 1.05 * found.failed, found
    else:
        assert found.holds(predicted), found


def test_most_configurations_have_both_ends():
    complete = [found for found in found_in(RECORDS) if found.fitted and found.failed]
    assert len(complete) >= 6
