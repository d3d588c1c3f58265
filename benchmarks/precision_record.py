"""Keeps a gradient precision check as a record; the comparison itself is `streamgrad.precision`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.names import command_line
from benchmarks.records import versions
from streamgrad.cli.bench_run import device_name


@dataclass(frozen=True, kw_only=True)
class PrecisionRecord:
    """Records errors by group of modules and kind of gradient, against plain fp32. `ratio`: stream16's over base16's, pooled."""

    benchmark: str = "precision"
    model: str
    shape: dict[str, int]
    dtype: str
    ratio: float
    table: dict[str, dict[str, dict[str, float]]]
    failures: list[str]
    device: str
    versions: dict[str, str]
    command: str


def precision_record(model: str, outcome: dict[str, Any], device: torch.device) -> PrecisionRecord:
    """Return the record of an `Outcome.to_dict()`."""
    return PrecisionRecord(
        model=model,
        shape={name: outcome[name] for name in ("layers", "models", "tokens", "chunk_size")},
        dtype=outcome["dtype"],
        ratio=outcome["ratio"],
        table=outcome["table"],
        failures=outcome["failures"],
        device=device_name(device),
        versions=versions("transformers"),
        command=command_line("precision", model=model, device=device.type),
    )
