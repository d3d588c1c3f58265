"""Words the report: tables, units, and where a number is from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.names import COMMAND
from benchmarks.selection import FAULT, Record, has_faulty_peak

STEP_METHODS = {
    "hf": "transformers, checkpointing",
    "liger": "Liger kernels, checkpointing",
    "streamgrad": "streamgrad",
}
TIMED_METHODS = {"hf": STEP_METHODS["hf"], "mst": "MsT"} | STEP_METHODS


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(records: Iterable[Record]) -> str:
    """Return hardware, versions and commands of what a table shows."""
    rows = list(records)
    if not rows:
        return not_run("there is no record of it")
    devices = dict.fromkeys(
        f"{row['device']} ({', '.join(f'{name} {version}' for name, version in row['versions'].items() if name != 'streamgrad')})"
        for row in rows
    )
    commands = dict.fromkeys(row["command"] for row in rows)
    return f"*{'; '.join(devices)}.* Made by " + ", ".join(f"`{command}`" for command in commands) + "."


def not_run(reason: str) -> str:
    return f"**Not run:** {reason}."


def no_record(command: str, of: str = "") -> str:
    """Return that something was not run, with the benchmark that would make its record."""
    return not_run(f"there is no record{of} (`{COMMAND} {command}`)")


def picture(name: str, text: str) -> str:
    return f"![{text}](plots/{name}.png)"


def ms(record: Record | None) -> str:
    if record is None:
        return "not run"
    return record["error"] if record["step_ms"] is None else f"{record['step_ms']:,.0f} ms"


def gb(record: Record | None) -> str:
    if record is None:
        return "not run"
    if record["peak_bytes"] is None:
        return record["error"]
    return f"{record['peak_bytes'] / 1e9:.1f} GB" + (" (not valid)" if has_faulty_peak(record) else "")


def fault_note(records: Iterable[Record]) -> list[str]:
    """Return what is said under a table that shows a peak which is known to be wrong."""
    return [f"A peak marked as not valid is too large: {FAULT}."] if any(map(has_faulty_peak, records)) else []


def or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
