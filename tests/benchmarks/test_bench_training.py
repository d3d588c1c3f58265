"""`benchmarks run` and `train-step`: training with its optimizer, on a tiny model and a CPU."""

from __future__ import annotations

import gc
import json
import statistics
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import report_training, training_commands
from benchmarks.commands import app
from benchmarks.lengths import cells
from benchmarks.longest import predict, predictions_in
from benchmarks.records import rows_in
from benchmarks.report_training import runs, train_steps
from benchmarks.run import lengths_of_run
from benchmarks.subject import Subject
from benchmarks.train_step import CONFIGURATIONS, TrainingCase
from gradients import more
from streamgrad.config import parse_bytes
from streamgrad.hf.configs import preset_model
from streamgrad.hf.estimates.estimate import Estimator

ROOT = Path(__file__).parents[2]


@pytest.fixture
def invoke(tiny_preset):
    """The command line, with a preset that a CPU can train."""
    return lambda command: CliRunner(env={"COLUMNS": "200"}).invoke(app, command.split())


RUN = "run --model tiny:{} --method {} --steps 4 --mean 20 --longest 48 --device cpu --out {}"


@pytest.mark.parametrize("training", ["full", "lora"])
def test_methods_train_alike_on_the_same_sequences(invoke, tmp_path, training):
    out = tmp_path / "run.jsonl"
    for method in ("streamgrad", "hf"):
        result = invoke(RUN.format(training, method, out))
        assert result.exit_code == 0, result.output
    ours, theirs = rows_in(out)
    assert (ours["method"], theirs["method"], ours["training"], ours["lengths"]) == (
        "streamgrad", "hf", training, lengths_of_run(4, 20, 48),
    )  # fmt: skip
    assert ours["lengths"] == theirs["lengths"] and ours["out_of_memory"] == theirs["out_of_memory"] == 0
    torch.testing.assert_close(torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=0.01, atol=0.0)
    assert ours["tokens_per_second"] == pytest.approx(1e3 * sum(ours["lengths"]) / sum(ours["step_ms"]))
    assert ours["later_tokens_per_second"] == pytest.approx(1e3 * sum(ours["lengths"][1:]) / sum(ours["step_ms"][1:]))
    section = "\n".join(runs({"run": [ours, theirs]}, {}))
    assert f"| tiny {training} | hf | {theirs['tokens_per_second']:,.0f} | " in section and "4 steps of fused AdamW" in section
    assert ours["policy"]["plan"] and "step 4: " in result.output and "tokens/s" in result.output


def test_steps_that_run_out_of_memory_are_counted_and_the_run_goes_on(invoke, tmp_path, monkeypatch):
    out, stock = tmp_path / "run.jsonl", Subject.build
    longest = max(lengths_of_run(4, 20, 48))

    def build(*args, **options):
        subject = stock(*args, **options)

        def fail(module, args, kwargs):
            if kwargs["input_ids"].shape[1] == longest:
                raise torch.OutOfMemoryError("none left")

        subject.network.register_forward_pre_hook(fail, with_kwargs=True)
        return subject

    monkeypatch.setattr(Subject, "build", build)
    assert invoke(RUN.format("full", "hf", out)).exit_code == 0
    (row,) = rows_in(out)
    assert row["out_of_memory"] == 1 and [loss is None for loss in row["losses"]] == [n == longest for n in row["lengths"]]
    assert row["tokens_per_second"] == pytest.approx(1e3 * (sum(row["lengths"]) - longest) / sum(row["step_ms"]))


def test_a_run_that_is_there_is_not_repeated(invoke, tmp_path):
    command = RUN.format("full", "hf", tmp_path / "run.jsonl")
    for _ in range(2):
        result = invoke(command + " --resume")
    assert "measured before" in result.output and len(rows_in(tmp_path / "run.jsonl")) == 1


def test_what_new_lengths_cost(invoke, tmp_path, monkeypatch):
    """Lengths are met three times and the last times count, but for the first steps; such a run is not among the others."""
    monkeypatch.setattr(report_training, "_FIRST_STEPS", 1)
    out = tmp_path / "run.jsonl"
    result = invoke(RUN.format("full", "streamgrad", out) + " --settle")
    assert result.exit_code == 0 and result.output.count("step 3:") == 3, (result.output, result.exception)
    (row,) = rows_in(out)
    assert len(row["settled_ms"]) == len(row["step_ms"]) == 4 and row["settled_ms"] != row["step_ms"]
    assert row["command"].endswith("--settle --device cpu")
    row |= {"step_ms": [9e3, 1000.0, 1120.0, 2000.0], "settled_ms": [1e3, 1000.0, 1000.0, 2000.0]}
    text = "\n".join(runs({"run": [row, row | {"settled_ms": None}]}, {}))
    assert "| 3 | 4.1 s | 4.0 s | +3.0% |" in text and text.count("tiny full") == 2


def test_every_method_runs_in_a_process_of_its_own(invoke, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(training_commands, "run_alone", lambda command, out, resume: started.append(command))
    assert invoke(f"run --steps 3 --out {tmp_path / 'run.jsonl'}").exit_code == 0
    assert started == [
        f"python -m benchmarks run --model {model} --method {method} --steps 3"
        for model in ("qwen3-4b:full", "qwen3-8b:lora")
        for method in ("streamgrad", "liger")
    ]


def test_lengths_are_those_of_the_distribution():
    lengths = lengths_of_run(30, 10_000, 48_000)
    assert len(set(lengths)) == 30 and lengths != sorted(lengths) and lengths == lengths_of_run(30, 10_000, 48_000)
    assert 9_000 < statistics.mean(lengths) < 10_500 and 40_000 < max(lengths) <= 48_000
    assert max(lengths_of_run(30, 10_000, 20_000)) == 20_000


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run --model qwen3-4b", "--model must be preset:full or preset:lora, such as qwen3-4b:full, got 'qwen3-4b'"),
        ("run --method magic", "--method must be one of hf, "),
        ("train-step --model qwen3-4b --optimizer lion", "optimizer='lion' is not a choice. Pass one of none, adamw"),
        ("train-step --limit 79GiB", "--limit has no effect without --model"),
    ],
)
def test_what_is_not_known_is_refused(invoke, command, told):
    result = invoke(command)
    assert result.exit_code != 0 and told in str(result.exception)


@pytest.mark.parametrize(("training", "optimizer"), [("full", "in-backward"), ("lora", "adamw")])
def test_a_step_with_its_optimizer(invoke, tmp_path, training, optimizer):
    out = tmp_path / "train_step.jsonl"
    options = f"--model tiny --tokens 33 --training {training} --optimizer {optimizer} --host 1GiB --device cpu"
    result = invoke(f"train-step {options} --out {out}")
    assert result.exit_code == 0, (result.output, result.exception)
    (row,) = rows_in(out)
    assert (row["seq_len"], row["optimizer"], row["training"], row["error"]) == (33, optimizer, training, None)
    assert row["step_ms"] > 0 and row["peak_bytes"] > 0 and row["predicted_bytes"] > 0
    assert row["ballast_bytes"] == row["host_ballast_bytes"] == 0 and "predicted" in result.output
    off = row["predicted_bytes"] / row["peak_bytes"] - 1
    assert f"| tiny {training} | {optimizer} | 33 | 2 of 2 | all | " in (
        text := "\n".join(train_steps({"train_step": rows_in(out)}, {}))
    )
    assert f"| {off:+.1%} |" in text
    invoke(f"train-step {options} --out {out} --resume")
    assert len(rows_in(out)) == 1


def test_nothing_is_left_of_a_case_when_the_next_one_begins(invoke, tmp_path, monkeypatch):
    """Updates in backward are hooks of parameters, which hold the optimizer and so all parameters."""
    stock, built = Subject.build, []

    def build(*args, **options):
        gc.collect()
        assert not [reference for reference in built if reference() is not None]
        subject = stock(*args, **options)
        built.append(weakref.ref(next(subject.network.parameters())))
        return subject

    monkeypatch.setattr(Subject, "build", build)
    out = tmp_path / "train_step.jsonl"
    result = invoke(f"train-step --model tiny --tokens 33,34 --optimizer in-backward --host 1GiB --device cpu --out {out}")
    assert result.exit_code == 0 and len(built) == 2, (result.output, result.exception)


def test_a_model_that_does_not_fit_is_a_record(invoke, tmp_path, monkeypatch):
    def build(*args, **options):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(Subject, "build", build)
    out = tmp_path / "train_step.jsonl"
    result = invoke(f"train-step --model tiny --tokens 33 --host 1GiB --device cpu --out {out}")
    assert result.exit_code == 0 and "out of memory before the step" in result.output, result.exception
    assert rows_in(out)[0]["step_ms"] is None and train_steps({"train_step": rows_in(out)}, {})


def test_a_cut_step_holds_ballast_by_the_plan_of_the_whole_model(invoke, tmp_path):
    """Segments of two layers; all inputs on the device."""
    out = tmp_path / "train_step.jsonl"
    options = "--model tiny --tokens 40 --optimizer adamw --offload none --recompute-layers 1 --layers 1 --host 1GiB --device cpu"
    result = invoke(f"train-step {options} --out {out}")
    assert result.exit_code == 0, (result.output, result.exception)
    (row,) = rows_in(out)
    layer = sum(p.nbytes for p in preset_model("tiny", device=torch.device("cpu")).model.layers[0].parameters())
    # Weights, two moments, and the gradients, which are more than the input of 40 tokens.
    assert row["ballast_bytes"] == 4 * layer and row["host_ballast_bytes"] == 0 and row["layers"] == 1
    assert row["policy"]["keep"] == "input" and row["policy"]["plan"].startswith("1 x input;")


@pytest.mark.parametrize(
    ("optimizer", "layers", "states", "host_copies"),
    [("in-backward", 2, 2, 0), ("adamw8bit-in-backward", 2, 1, 0), ("host", 3, 0, 4), ("host", 1, 0, 4)],
)
def test_ballast_of_a_model_that_fills_both_memories(optimizer, layers, states, host_copies):
    case = TrainingCase(model="qwen3-8b", tokens=600_000, optimizer=optimizer, limit="79GiB", host="125GiB", layers=layers)
    cut = preset_model("qwen3-8b", device=torch.device("meta"), layers=layers)
    layer = sum(parameter.nbytes for parameter in cut.model.layers[0].parameters())
    policies, input_bytes, missing = case.outlook.plan.policies, 600_000 * 4096 * 2, 36 - layers
    # At most at a time: what is kept, and what one segment recomputes; without what the layers that are built have themselves.
    segment = 1 + [policy.recomputed for policy in policies[1:]].index(False)
    places = [policy.on_host for policy in policies if not policy.recomputed]
    built = policies[-1].on_host
    on_device = places.count(False) + (segment - 1 if not all(places) else 0) - (0 if built else layers)
    on_host = places.count(True) + (segment - 1 if any(places) else 0) - (layers if built else 0)
    device, host = case.ballast
    assert device == missing * (1 + states) * layer + on_device * input_bytes and on_device >= 0
    assert host == missing * host_copies * layer + on_host * input_bytes and on_host > 0
    config = case.config()
    assert (config.keep, config.recompute_layers) == ("input", layers)
    assert config.offload == ("host" if policies[-1].on_host else "none")


def test_layers_of_two_segments_are_refused():
    case = TrainingCase(model="qwen3-8b", tokens=600_000, limit="79GiB", host="125GiB", layers=3)
    with pytest.raises(ValueError, match="layers=3 of the plan.*Pass 2"):
        case.config()


def test_eleven_configurations_fit_what_they_are_given():
    """As far as arithmetic goes; the report has them as measured."""
    assert len(CONFIGURATIONS) == 11 and {case.optimizer for case in CONFIGURATIONS} >= {"adamw", "adamw8bit", "host"}
    for case in CONFIGURATIONS[:3]:
        assert case.outlook.fits and case.predicted_bytes < parse_bytes(case.limit), case


PREDICTIONS = ROOT / "benchmarks/results/longest.jsonl"


def test_every_cell_of_the_papers_table_has_a_prediction_with_and_without_host_memory():
    predicted = predictions_in(rows_in(PREDICTIONS))
    expected = {
        (cell.model, cell.training, cell.objective, offload)
        for objective in ("sft", "dpo", "grpo")
        for cell in cells(objective)
        for offload in ("none", "auto")
    }
    assert {(each.model, each.training, each.objective, each.offload) for each in predicted} == expected
    assert all(each.confirming >= 0.97 * each.tokens - 1 for each in predicted)


@pytest.mark.parametrize("objective", ["sft", pytest.param("dpo", marks=more), pytest.param("grpo", marks=more)])
@pytest.mark.parametrize("offload", ["none", pytest.param("auto", marks=more)])
def test_predictions_are_those_of_the_planner_now(objective, offload):
    kept = {(each.model, each.training): each for each in predictions_in(rows_in(PREDICTIONS))
            if (each.objective, each.offload) == (objective, offload)}  # fmt: skip
    for made in predict(cells(objective)[-1:], offload, ""):
        assert replace(made, command="", versions={}) == replace(kept[made.model, made.training], command="", versions={})


@pytest.mark.parametrize("objective", ["sft", pytest.param("dpo", marks=more), pytest.param("grpo", marks=more)])
def test_a_cut_step_beside_its_ballast_holds_what_the_whole_one_does(objective):
    """By the planner, which is told of the ballast as of other memory that is taken."""
    cases = [each.case() for each in predictions_in(rows_in(PREDICTIONS)) if each.objective == objective]
    if objective == "sft":  # whole, it is largest at the head; its last layer alone, where it has other chunks, in that layer
        cases.append(
            TrainingCase(
                model="qwen3-14b", tokens=581_068, optimizer="adamw8bit-in-backward", limit="79GiB", host="125GiB", layers=1
            )
        )
    for case in cases:
        (on_device, on_host), whole, config = case.ballast, case.estimator(), case.config()
        shape = replace(whole.shape, layers=case.layers, full_attention_layers=case.layers)
        beside = on_device + case._unplanned(Estimator(shape, whole.options).state.device)  # of GRPO's reference, what is built
        place = replace(
            whole.options.machine, gpu_bytes=int(parse_bytes(case.limit) - beside), host_bytes=parse_bytes(case.host) - on_host
        )
        options = replace(whole.options, offload=config.offload, recompute_layers=config.recompute_layers, machine=place)
        outlook = Estimator(shape, options).streamed(Estimator(shape, options).load(case.tokens), longest=0)
        assert outlook.fits, case
        # A single layer may get other chunks than the same layer among many, and their peaks are up to 1.6 per cent apart.
        assert outlook.peak_bytes + beside == pytest.approx(case.predicted_bytes, rel=0.02), case


def test_a_prediction_is_confirmed_by_a_step_that_has_not_run(invoke, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(training_commands, "_run_cases", lambda cases, command, out, **options: started.append((cases, command)))
    alone = tmp_path / "longest.jsonl"
    alone.write_text(PREDICTIONS.read_text())
    expected = [each for each in predictions_in(rows_in(alone)) if each.seconds <= 15 and each.offload == "none"]
    done, failed = ({"model": each.model, "training": each.training, "objective": each.objective, "seq_len": each.confirming,
                     "limit_bytes": parse_bytes(each.limit), "optimizer": "none"} for each in expected[:2])  # fmt: skip
    rows = [done | {"error": None}, done | {"error": None, "optimizer": "adamw"}, failed | {"error": "out of memory"}]
    (tmp_path / "train_step.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert invoke(f"longest --confirm 15 --offload none --predictions {alone}").exit_code == 0
    ((cases, command),) = started
    assert command == "python -m benchmarks longest --confirm 15 --offload none"
    assert cases == [each.case() for each in expected[1:]] and len(cases) >= 2
    assert all((case.limit, case.optimizer, case.host) == ("79GiB", "none", "125GiB") and case.layers for case in cases)


STEPS = [row for row in rows_in(ROOT / "benchmarks/results/train_step.jsonl") if row["error"] is None]


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['model']} {row['optimizer']} {row['seq_len']} {row['layers']}")
def test_predicted_peaks_with_optimizers_are_within_5_per_cent(row):
    """By the configuration and the memory alone. Ballast of a cut model stands for layers that the prediction counts."""
    options = {name: row["policy"][name] for name in ("keep", "offload", "recompute_layers")}
    if row["ballast_bytes"]:  # then its options are those of the layers that were built
        options = {"layers": row["layers"], "offload": "auto" if row["host_ballast_bytes"] else "none"}
    limit = "139GiB" if row["limit_bytes"] is None else f"{row['limit_bytes'] / 2**30:g}GiB"
    case = TrainingCase(
        model=row["model"], training=row["training"], objective=row["objective"], optimizer=row["optimizer"],
        tokens=row["seq_len"], limit=limit, host="125GiB", **options,
    )  # fmt: skip
    assert case.predicted_bytes == pytest.approx(row["peak_bytes"], rel=0.05)
