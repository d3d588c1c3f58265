"""`benchmarks shared-prompts` and `benchmarks families` on a tiny model: what they measure, record and refuse."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import families, shared_prompts
from benchmarks.commands import app
from benchmarks.report_objectives import families as families_section
from benchmarks.report_objectives import shared_prompts as section
from gradients import assert_same_step, run_step
from tiny import tiny_model, tokens


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(shared_prompts, "preset_model", lambda *args, **options: tiny_model("qwen3"))


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_a_row_for_each_method_and_shape(tiny, tmp_path):
    out = tmp_path / "rows.jsonl"
    shapes = ("--shape", "grpo:12:5:3", "--shape", "dpo:9:4:2")
    methods = ("--method", "shared", "--method", "separate")
    result = run("shared-prompts", *shapes, *methods, "--runs", "1", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["objective"], row["tokens"]) for row in rows] == [
        ("shared", "grpo", 27), ("shared", "dpo", 17), ("separate", "grpo", 51), ("separate", "dpo", 26),
    ]  # fmt: skip
    assert all(row["step_ms"] > 0 and row["error"] is None for row in rows)
    assert "12 + 3 x 5" in "\n".join(section({"shared_prompts": rows}, {}))


def test_a_row_for_each_method_of_a_family(monkeypatch, tmp_path):
    out = tmp_path / "rows.jsonl"
    batch = {"input_ids": tokens(1, 9), "labels": tokens(1, 9)}
    monkeypatch.setitem(families.CASES, "lora-8b", lambda layers, device: (tiny_model("qwen3"), lambda length: batch))
    methods = ("--method", "streamgrad", "--method", "checkpointing")
    result = run("families", "lora-8b", "--seq-len", "9", *methods, "--runs", "1", "--device", "cpu", "--out", str(out))
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["method"], row["seq_len"]) for row in rows] == [("streamgrad", 9), ("checkpointing", 9)]
    assert all(row["step_ms"] > 0 and row["error"] is None for row in rows)
    assert "Qwen3-8B, LoRA" in "\n".join(families_section({"families": rows}, {}))


@pytest.mark.parametrize("objective", ["grpo", "dpo"])
def test_methods_take_the_same_step(objective):
    """So that their times compare."""
    policy, reference = tiny_model("qwen3"), tiny_model("qwen3", seed=1).requires_grad_(False)
    ids, found = tokens(1, 9).repeat(2, 1), {}
    ids[1, 6:] = tokens(1, 3, seed=4)
    for method in ("trl", "shared", "separate"):  # the first without Liger's kernels
        for network in (policy, reference):
            shared_prompts._prepare(method, network, "auto")
        step = shared_prompts._step(method, objective, policy, reference if objective == "dpo" else None, ids, 6)

        def forward(model, batch, step=step):
            step()
            return sum(parameter.sum() * 0 for parameter in model.parameters())

        found[method] = run_step(policy, {}, forward=forward)
    assert_same_step(found["shared"], found["trl"], 1e-6)
    assert_same_step(found["separate"], found["trl"], 1e-6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("shared-prompts", "--shape", "grpo:12"), "--shape must be objective:prompt:completion:group"),
        (("shared-prompts", "--method", "fast"), "--method must be one of shared, separate, trl, got 'fast'"),
        (("shared-prompts", "--keep", "all"), "--keep must be auto or input, got 'all'"),
        (
            ("families", "vision"),
            "case must be one of experts, images, gemma-3-4b, lora-8b,",
        ),
    ],
)
def test_what_is_not_known_is_refused(arguments, told):
    result = run(*arguments)
    assert result.exit_code != 0
    assert told in str(result.exception)


def test_the_report_says_what_was_not_run():
    assert "Not run" in section({"shared_prompts": []}, {})[0]
    assert "Not run" in families_section({"families": []}, {})[0]


@pytest.mark.parametrize("case", ["experts", "images", "gemma-3-4b"])
def test_liger_is_told_the_type_of_the_model_that_is_built(case):
    """Its kernels for images leave the loss of a text model as it is."""
    model, _ = families.CASES[case](1, torch.device("meta"))
    assert families._inner(model).config.model_type == families._TYPES[case]
    assert families._TYPES.keys() == families.CASES.keys()
