"""Writes the report's sections on training with an optimizer: runs of many steps, and single steps beside their predictions."""

from __future__ import annotations

from typing import Any

from benchmarks.names import COMMAND
from benchmarks.selection import Record, Records, latest
from benchmarks.words import gb, markdown_table, ms, no_record, or_dash, origin
from streamgrad.hf.configs import preset_config

# Steps that confirm predicted lengths stand beside those.
CONFIRMING = f"{COMMAND} longest"
# Steps in which a run meets its kernels for the first time.
_FIRST_STEPS = 10
_RUN_NAMES = {"streamgrad": "streamgrad", "liger": "Liger kernels, checkpointing", "liger-nockpt": "Liger kernels, all kept"}


def runs(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return tokens a second of runs on sequences of different lengths, each beside streamgrad's."""
    usual = (record for record in records["run"] if not record.get("settled_ms") and record.get("flash", "FA2") == "FA2")
    found = latest(usual, "model", "training", "method")
    if not found:
        return [no_record("run")]
    rows = []
    for (model, training, method), record in found.items():
        ours = found.get((model, training, "streamgrad"), record)
        gains = [_gain(ours, record, name) for name in ("tokens_per_second", "later_tokens_per_second")]
        apart = max(
            (abs(a - b) for a, b in zip(ours["losses"], record["losses"], strict=False) if a is not None and b is not None),
            default=None,
        )
        same = method == "streamgrad"
        rows.append([
            f"{model} {training}", _RUN_NAMES.get(method, method), f"{record['tokens_per_second']:,.0f}",
            "-" if same else or_dash(gains[0], "{:.2f}x"), or_dash(record["later_tokens_per_second"], "{:,.0f}"),
            "-" if same else or_dash(gains[1], "{:.2f}x"), str(record["out_of_memory"]), gb(record | {"error": "-"}),
            "-" if same else or_dash(apart, "{:.3f}"),
        ])  # fmt: skip
    lengths = next(iter(found.values()))["lengths"]
    header = [
        "model", "method", "tokens a second", "streamgrad's over it", "without the first step", "streamgrad's over it",
        "steps out of memory", "peak", "losses differ by at most",
    ]  # fmt: skip
    return [
        f"{len(lengths)} steps of fused AdamW (states in bf16) on one sequence each, {min(lengths):,} to {max(lengths):,} tokens "
        f"long, {sum(lengths) / len(lengths):,.0f} in the mean: quantiles of a lognormal distribution in a shuffled order. All "
        "methods have the same weights, tokens and optimizer, and a process of their own. Nothing warms up: the first step "
        "compiles what it needs, and every length is new.",
        markdown_table(header, rows),
        origin(found.values()),
        *_new_lengths(records),
    ]


def _new_lengths(records: Records) -> list[str]:
    """Return what it costs that every length is new, after the first ten steps."""
    # The first records do not name the kernel, which was torch's own.
    longer = ({"flash": "FA2"} | record for record in records["run"] if len(record.get("settled_ms") or ()) > _FIRST_STEPS)
    found = latest(longer, "model", "training", "method", "flash")
    rows = []
    for (model, training, method, flash), record in found.items():
        new, settled = (sum(record[name][_FIRST_STEPS:]) for name in ("step_ms", "settled_ms"))
        steps = len(record["lengths"]) - _FIRST_STEPS
        cells = [
            f"{model} {training}",
            _RUN_NAMES.get(method, method) + (f", {flash}" if flash != "FA2" else ""),
            str(steps),
            f"{new / 1e3:.1f} s",
            f"{settled / 1e3:.1f} s",
        ]
        rows.append([*cells, f"{new / settled - 1:+.1%}"])
    if not rows:
        return []
    header = ["model", "method", "steps", "of new lengths", "of the same lengths, met twice before", "what new lengths cost"]
    return [
        f"What it costs that every length is new, after the first {_FIRST_STEPS} steps: kernels that libraries prepare for a "
        "shape, and plans. The same steps are run twice more, and the last time counts.",
        markdown_table(header, rows),
        origin(found.values()),
    ]


def _gain(ours: Record, theirs: Record, name: str) -> float | None:
    return ours[name] / theirs[name] if ours[name] and theirs[name] else None


def train_steps(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return steps with an optimizer: what was predicted, what was measured, and the longest."""
    steps = [record for record in records["train_step"] if not record["command"].startswith(CONFIRMING)]
    found = latest(steps, "model", "training", "objective", "optimizer", "seq_len", "layers", "limit_bytes", "command")
    if not found:
        return [no_record("train-step")]
    whole = [record for record in found.values() if not record["ballast_bytes"]]
    cut = [record for record in found.values() if record["ballast_bytes"]]
    said = [
        "One step with its optimizer, after a short one in which the optimizer made its states: time, peak and pinned host "
        "memory, beside the peak that `streamgrad plan` predicts for it. `in-backward` is AdamW with its states on the device, "
        "whose gradients are freed one by one (`streamgrad.optimizer_in_backward`), `host` is torchao's `CPUOffloadOptimizer`. "
        "The time is that of a first step at its length, in which pinned memory is taken.",
        _table(whole),
    ]
    if cut:
        said += [
            "Here only the last layers were built, at full width and length. Ballast stands for what the others would hold by "
            "the plan of the whole model: weights, optimizer states and kept inputs on the device, kept inputs and copies on the "
            "host. Memory is real, time is not that of the whole model.",
            _table(cut),
        ]
    return [*said, origin(found.values())]


def _table(records: list[Record]) -> str:
    rows = []
    for record in records:
        off = record["predicted_bytes"] / record["peak_bytes"] - 1 if record["peak_bytes"] else None
        limit = record["limit_bytes"]
        rows.append([
            f"{record['model']} {record['training']}", record["optimizer"], f"{record['seq_len']:,}",
            f"{record['layers']} of {preset_config(record['model']).num_hidden_layers}",
            "all" if limit is None else f"{limit / 2**30:g} GiB", ms(record), gb(record),
            f"{record['predicted_bytes'] / 1e9:.1f} GB", or_dash(off, "{:+.1%}"), f"{record['host_bytes'] / 1e9:.1f} GB",
            f"{record['ballast_bytes'] / 1e9:.1f} + {record['host_ballast_bytes'] / 1e9:.1f} GB",
        ])  # fmt: skip
    header = [
        "model", "optimizer", "tokens", "layers built", "limit", "step", "peak", "predicted", "off by", "pinned by streamgrad",
        "ballast, device + host",
    ]  # fmt: skip
    return markdown_table(header, rows)
