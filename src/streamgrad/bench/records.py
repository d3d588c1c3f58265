"""What all benchmarks share: how a step is timed, what names a machine, and the JSON lines that results are kept in."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import streamgrad


def median_ms(step: Callable[[], object], device: torch.device, runs: int) -> float:
    """Median wall time of `runs` steps, each waited for; the caller warms up."""
    times_ms = []
    for _ in range(runs):
        wait_for(device)
        start = time.perf_counter()
        step()
        wait_for(device)
        times_ms.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times_ms)


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"


def versions(*packages: str) -> dict[str, str]:
    """torch, streamgrad and those of `packages` that are installed."""
    found = {"torch": torch.__version__, "streamgrad": streamgrad.__version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def append_records(path: Path, records: Iterable[Any]) -> None:
    """One JSON line per dataclass in `records`, after what the file already holds."""
    text = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The records of a file, in their order; of one that is not there, none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True)
class Session:
    """Cells that need not be measured, as earlier `rows` have them, and whom to tell which cell comes next."""

    rows: Sequence[dict[str, Any]] = ()
    tell: Callable[[str], None] = lambda cell: None

    def has(self, cell: dict[str, Any], options: dict[str, Any]) -> bool:
        """Whether a row has these fields, and these options in its policy."""
        return any(
            all(row.get(name) == value for name, value in cell.items())
            and all(row["policy"].get(name) == value for name, value in options.items())
            for row in self.rows
        )


EVERYTHING = Session()
