"""Reads records back and chooses those that the report and its pictures are made from.

A record is a row of `benchmarks/results/*.jsonl`, as a dictionary. Where a cell was measured more than once, the last row counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from benchmarks.lengths import slope_bytes
from benchmarks.records import rows_in
from streamgrad.config import parse_bytes
from streamgrad.hf.configs import preset_config

Record = dict[str, Any]
Records = dict[str, list[Record]]  # by the name of their file

STEP_FILES = ("step", "memory", "max_length", "partition", "predicted")
FILES = (*STEP_FILES, "linear", "precision", "head", "shared_prompts", "families", "run", "train_step", "longest")
SMALL_CARD = 24 * 2**30
_AUTOMATIC = ("chunk_size", "keep", "offload")

# Peaks, by their exact number of bytes, that held more than their step. The loop over methods kept the model of the method before
# (streamgrad's, weights and gradients) on the device until the first length of the next method was done.
_FAULTY_PEAKS = {33_347_017_728: "liger at 6,000 tokens", 20_560_861_184: "liger-offload at 65,536 tokens"}
# What the first records of steps do not say: there was nothing else yet.
_EARLIER = {"objective": "sft", "batch": 1, "training": "full", "accumulates": False, "flash": "FA2"}
FAULT = "the model measured before was still on the device"


def read_records(results: Path) -> Records:
    """Return records by benchmark, in the order in which they were measured; a file that is not there has none."""
    found: Records = {}
    for name in FILES:
        unsaid = _EARLIER if name in STEP_FILES else {}
        found[name] = [unsaid | row for row in rows_in(results / f"{name}.jsonl")]
    if not any(found.values()):
        raise ValueError(f"{results} has no records. Pass the folder that `python -m benchmarks` appends to, with --results.")
    return found


def latest(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], Record]:
    """Return the last record of each combination of the named fields."""
    return {tuple(record.get(name) for name in names): record for record in records}


def automatic_steps(records: Sequence[Record], *, batch: int = 1, flash: str = "FA2") -> dict[tuple[str, int], Record]:
    """Return whole steps of Qwen3-4B with all of the card's memory and no option set, by method and length."""
    chosen = [
        record
        for record in records
        if (record["model"], record["training"], record["batch"], record["flash"]) == ("qwen3-4b", "full", batch, flash)
        and not record["accumulates"]
        and record["policy"].get("memory_budget") is None
        and all(record["policy"].get(name, "auto") == "auto" for name in _AUTOMATIC)
    ]
    return latest(chosen, "method", "seq_len")


def measured_beside(records: Sequence[Record], ours: Record, peer: Record) -> Record:
    """Return a peer's step of the command that measured `ours`, where there is one: hosts and days differ. Else `peer`."""
    shape = ("command", "model", "seq_len", "batch", "flash")
    same = [record for record in records if record["method"] == peer["method"] and all(record[k] == ours[k] for k in shape)]
    return same[-1] if same else peer


def steps_within_liger(records: Sequence[Record]) -> dict[int, tuple[Record, Record]]:
    """Return the last step of streamgrad's whose budget was what Liger took, and that step of Liger's, by length."""
    within = latest((record for record in records if "--memory-budget liger" in record["command"]), "seq_len")
    took = latest((record for record in records if record["method"] == "liger"), "seq_len", "peak_bytes")
    return {length: (record, took[length, record["policy"]["memory_budget"]]) for (length,), record in sorted(within.items())}


def has_faulty_peak(record: Record) -> bool:
    return record["peak_bytes"] in _FAULTY_PEAKS


class Series(NamedTuple):
    """Names records of one method that differ in length alone; `on_host`: streamgrad's layer inputs are in host memory."""

    model: str
    training: str
    layers: int
    method: str
    on_host: bool

    @property
    def name(self) -> str:
        return f"{self.method}, inputs on the host" if self.on_host else self.method

    @property
    def is_whole(self) -> bool:
        return self.layers == preset_config(self.model).num_hidden_layers


def memory_series(records: Iterable[Record]) -> dict[Series, dict[int, Record]]:
    """Return the records of the memory benchmark, by length."""
    found: dict[Series, dict[int, Record]] = {}
    for record in records:
        on_host = record["policy"].get("offload") == "host"
        series = Series(record["model"], record["training"], record["layers"], record["method"], on_host)
        found.setdefault(series, {})[record["seq_len"]] = record
    return {series: dict(sorted(rows.items())) for series, rows in sorted(found.items())}


def token_bytes(rows: dict[int, Record]) -> float | None:
    """Return device bytes a token between the shortest and the longest record of a series with a valid peak."""
    return slope_bytes([SimpleNamespace(**record) for record in rows.values() if not has_faulty_peak(record)])


def partition_records(records: Records) -> dict[tuple[str, int], dict[int, Record]]:
    """Return the records of the partition benchmark, by model and length, then by chunk size."""
    found: dict[tuple[str, int], dict[int, Record]] = {}
    for record in records["partition"]:
        found.setdefault((record["model"], record["seq_len"]), {})[record["policy"]["chunk_size"]] = record
    return {key: dict(sorted(sizes.items())) for key, sizes in sorted(found.items())}


def card_bytes(record: Record) -> int | None:
    """Return what the process was allowed to hold, where its command set that."""
    cap = re.search(r"--gpu-memory (\S+)", record["command"])
    return parse_bytes(cap[1]) if cap else None


def is_small_card(record: Record) -> bool:
    return (card_bytes(record) or SMALL_CARD + 1) <= SMALL_CARD


def is_papers_card(record: Record) -> bool:
    """Return whether there was a cap, of the paper's 80 GB at most: a step on the whole of a larger card cannot be compared."""
    return card_bytes(record) is not None and not is_small_card(record)


def paper_longest(record: Record, table: dict[str, Any]) -> float | None:
    """Return tokens of the paper's StreamBP for a record's model, training and objective, where its table has them."""
    size = record["model"].removeprefix("qwen3-").upper()
    column = f"{size} {'LoRA' if record['training'] == 'lora' else 'full'}"
    longest = table[record["objective"]]["streambp"][table["columns"].index(column)] if column in table["columns"] else None
    return None if longest is None else 1e3 * longest
