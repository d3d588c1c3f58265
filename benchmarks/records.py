"""Keeps records as JSON lines, reads them back, and knows which of them need not be measured again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import streamgrad
from benchmarks.names import COMMAND, EARLIER_COMMAND


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of torch, streamgrad and those of `packages` that are installed."""
    found = {"torch": torch.__version__, "streamgrad": streamgrad.__version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def append_records(path: Path, records: Iterable[Any]) -> None:
    """Append a JSON line per dataclass in `records` to what the file already holds, or leave the file as it is and raise."""
    text = "".join(json.dumps(asdict(record)) + "\n" for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text((path.read_text() if path.exists() else "") + text)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(
            f"new records could not be written to {path}: {error.strerror or error}. Those in it are as they were. Free some "
            "space, then run the command again."
        ) from error


def rows_in(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, in their order; of one that is not there, none.

    Commands in the first records have the name that they had then. They are read under today's, by which they can be run.
    """
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for row in rows:
        if row.get("command", "").startswith(EARLIER_COMMAND):
            row["command"] = COMMAND + row["command"].removeprefix(EARLIER_COMMAND)
    return rows


@dataclass(frozen=True)
class Session:
    """Knows cells that need not be measured, as earlier `rows` have them, and whom to tell which cell comes next."""

    rows: Sequence[dict[str, Any]] = ()
    tell: Callable[[str], None] = lambda cell: None

    def has(self, cell: dict[str, Any], options: dict[str, Any]) -> bool:
        """Return whether a row has these fields, and these options in its policy."""
        return any(
            all(row.get(name) == value for name, value in cell.items())
            and all(row["policy"].get(name) == value for name, value in options.items())
            for row in self.rows
        )


EVERYTHING = Session()
