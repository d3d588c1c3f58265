"""Steps that several methods take in turn: their order, what each finds on the device, and what its record says."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from benchmarks import in_turn, step
from benchmarks.in_turn import measure_in_turn
from benchmarks.names import METHODS
from benchmarks.records import rows_in
from benchmarks.subject import Subject
from streamgrad.hf.patching import InstalledForward

METHODS_IN_TURN = ["hf", "streamgrad", "streamgrad-compile"]


@pytest.fixture
def watched(monkeypatch):
    """What every step finds as it begins: its method, and which methods have gradients. A step `fails` by its number."""
    found, subjects, fails = [], [], set()
    build, step_on = Subject.build.__func__, Subject.step_on

    def building(cls, *args, **options):
        subjects.append(build(cls, *args, **options))
        return subjects[-1]

    def watching(subject, ids_BT, **options):
        run = step_on(subject, ids_BT, **options)

        def watched_step():
            holders = {other.method for other in subjects if any(p.grad is not None for p in other.network.parameters())}
            installed = InstalledForward.on(subject.network.get_decoder())
            found.append(
                SimpleNamespace(
                    method=subject.method, length=ids_BT.shape[1], holders=holders,
                    compiled=installed and installed.stream.config.compile_layers, graphs=torch._dynamo.config.recompile_limit,
                )
            )  # fmt: skip
            run()
            if len(found) in fails:
                raise torch.OutOfMemoryError

        return watched_step

    monkeypatch.setattr(Subject, "build", classmethod(building))
    monkeypatch.setattr(Subject, "step_on", watching)
    return SimpleNamespace(found=found, subjects=subjects, fails=fails)


def test_every_method_warms_up_alone_and_then_they_take_turns(tiny_preset, watched):
    options = tiny_preset | {"methods": ["streamgrad", "hf"], "lengths": [16, 32], "warm_ups": 2, "runs": 3}
    made = list(measure_in_turn(**options))
    assert [(record.seq_len, record.method) for record in made] == list(itertools.product([16, 32], ["hf", "streamgrad"]))
    assert all(record.error is None and record.step_ms > 0 and record.peak_bytes > 0 for record in made)
    # Alone: two steps, one whose time is not read, one whose memory is counted. In turn: one, and one that is timed.
    order = ["hf"] * 4 + ["streamgrad"] * 4 + 3 * (["hf"] * 2 + ["streamgrad"] * 2)
    assert [(run.length, run.method) for run in watched.found] == list(itertools.product([16, 32], order))


def test_the_time_of_a_method_is_the_median_of_its_turns(tiny_preset, monkeypatch):
    times = itertools.count(1.0)
    monkeypatch.setattr(in_turn, "median_ms", lambda *args: next(times))
    made = measure_in_turn(**tiny_preset | {"methods": METHODS_IN_TURN, "runs": 3})
    assert [record.step_ms for record in made] == [4.0, 5.0, 6.0]  # of 1, 4, 7; of 2, 5, 8; of 3, 6, 9


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_timed_step_finds_gradients_of_its_own_method_alone(tiny_preset, watched, accumulates):
    options = tiny_preset | {"methods": METHODS_IN_TURN, "lengths": [16, 32], "runs": 2, "accumulates": accumulates}
    made = list(measure_in_turn(**options))
    assert all(run.holders <= {run.method} for run in watched.found)
    turns = watched.found[6 : len(watched.found) // 2]
    assert [bool(run.holders) for run in turns] == [False, True] * 6
    assert {record.accumulates for record in made} == {accumulates}
    assert not any(p.grad is not None for subject in watched.subjects for p in subject.network.parameters())


def test_each_method_streams_with_its_own_options(tiny_preset, watched):
    made = list(measure_in_turn(**tiny_preset | {"methods": METHODS_IN_TURN}))
    own = {"hf": None, "streamgrad": False, "streamgrad-compile": True}
    assert all(run.compiled is own[run.method] for run in watched.found)
    assert [record.policy.get("compile_layers") for record in made] == list(own.values())
    assert made[1].policy["plan"].startswith("2 x input; chunks of 16 tokens")
    assert not any(InstalledForward.on(subject.network.get_decoder()) for subject in watched.subjects)


def test_every_method_may_have_the_graphs_that_it_has_alone(tiny_preset, watched):
    limit = torch._dynamo.config.recompile_limit
    list(measure_in_turn(**tiny_preset | {"methods": METHODS_IN_TURN}))
    assert {run.graphs for run in watched.found} == {3 * limit} and torch._dynamo.config.recompile_limit == limit


def test_memory_is_measured_without_the_other_models(tiny_preset, watched, monkeypatch):
    """As on a GPU, whose peaks are of all tensors of the process."""

    def allocated(device):
        parameters = [parameter for subject in watched.subjects for parameter in subject.network.parameters()]
        return sum(p.nbytes + (0 if p.grad is None else p.grad.nbytes) for p in parameters)

    stock = step.Timing.of

    def of_all_tensors(timing, *args, **options):
        held = allocated(timing.device)
        measured = stock(timing, *args, **options)
        return measured | dict.fromkeys(("peak_bytes", "reserved_bytes"), measured["peak_bytes"] + held)

    monkeypatch.setattr(in_turn, "allocated_bytes", allocated)
    monkeypatch.setattr(step.Timing, "of", of_all_tensors)
    options = tiny_preset | {"methods": METHODS_IN_TURN, "lengths": [16, 32]}
    together = {(record.method, record.seq_len): record for record in measure_in_turn(**options)}
    weights = allocated(None) // len(METHODS_IN_TURN)
    for method in METHODS_IN_TURN:
        watched.subjects.clear()
        for alone in measure_in_turn(**options | {"methods": [method]}):
            record = together[method, alone.seq_len]
            assert record.peak_bytes == record.reserved_bytes == alone.peak_bytes > weights


@pytest.mark.parametrize("fails_at", [3, 11])  # as streamgrad warms up, and in its second turn
def test_a_method_that_runs_out_of_memory_leaves_the_others_their_turns(tiny_preset, watched, fails_at):
    watched.fails.add(fails_at)
    hf, ours = measure_in_turn(**tiny_preset | {"methods": ["hf", "streamgrad"], "runs": 3})
    assert (hf.error, ours.error, ours.step_ms, ours.peak_bytes) == (None, "out of memory", None, None)
    assert hf.step_ms > 0
    assert [run.method for run in watched.found].count("hf") == 2 + 2 * 3


@pytest.mark.parametrize("method", [name for name in METHODS if "liger" in name or "zero3" in name])
def test_a_method_that_changes_the_process_is_refused(tiny_preset, watched, method):
    with pytest.raises(ValueError, match=f"methods='{method}' cannot be measured with --in-turn: .* process.* Leave it out"):
        list(measure_in_turn(**tiny_preset | {"methods": ["hf", method]}))
    assert not watched.subjects


@pytest.mark.parametrize("budget", ["20GiB", "liger"])
def test_a_budget_for_all_models_together_is_refused(on_cpu, budget):
    result = on_cpu(f"step --model tiny --methods hf,streamgrad --in-turn --memory-budget {budget}")
    assert isinstance(result.exception, ValueError)
    assert f"--memory-budget {budget} would count the models of all methods" in str(result.exception)


def test_turns_from_the_command_line(on_cpu, tmp_path):
    out = tmp_path / "step.jsonl"
    command = f"step --model tiny --seq 16,32 --batch 1,2 --methods hf,streamgrad --in-turn --runs 1 --warm-ups 0 --out {out}"
    result = on_cpu(command)
    assert result.exit_code == 0, result.output
    rows = rows_in(out)
    cells = list(itertools.product([16, 32], [1, 2], ["hf", "streamgrad"]))
    assert [(row["seq_len"], row["batch"], row["method"]) for row in rows] == cells
    assert all("--in-turn" in row["command"] and row["error"] is None and row["step_ms"] > 0 for row in rows)

    out.write_text("".join(out.read_text().splitlines(keepends=True)[:-2]))
    result = on_cpu(command + " --resume")
    assert result.exit_code == 0, result.output
    assert [(row["seq_len"], row["batch"], row["method"]) for row in rows_in(out)] == cells
    assert "All 8 cells" in on_cpu(command + " --resume").output
