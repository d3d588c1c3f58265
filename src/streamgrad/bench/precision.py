"""The record of a gradient precision check; the comparison itself is `streamgrad.check`'s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from streamgrad.bench.records import device_name, versions


@dataclass(frozen=True, kw_only=True)
class PrecisionRecord:
    """Errors by group of modules and kind of gradient, against plain fp32; `ratio` is stream16's over base16's, pooled."""

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
    """Of `Outcome.to_dict()`."""
    return PrecisionRecord(
        model=model,
        shape={name: outcome[name] for name in ("layers", "models", "tokens", "chunk_size")},
        dtype=outcome["dtype"],
        ratio=outcome["ratio"],
        table=outcome["table"],
        failures=outcome["failures"],
        device=device_name(device),
        versions=versions("transformers"),
        command=f"python -m streamgrad bench precision --model {model} --device {device.type}",
    )
