"""Runs steps cell after cell, with a bar for progress, a record kept for each, and a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.records import Session, append_records, rows_in
from benchmarks.step import StepRecord
from benchmarks.tables import step_table, tokens_of


def run_steps(measure: Callable[..., Iterator[StepRecord]], out: Path, *, cells: int, resume: bool) -> list[StepRecord]:
    """Measure, keep each record as it comes, and print the table. An interrupted cell leaves no record."""
    done: list[StepRecord] = []
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar, before = progress.add_task("", total=cells), itertools.count()

        def tell(cell: str) -> None:
            progress.update(bar, description=cell, completed=next(before))

        for record in measure(session=Session(rows_in(out) if resume else (), tell)):
            append_records(out, [record])
            done.append(record)
            outcome = record.error or f"{record.step_ms:,.0f} ms"
            console.print(f"{record.model} {record.method} at {tokens_of(record)}: {outcome}", soft_wrap=True)
    if not done:
        console.print(f"All {cells} cells are in {out}: nothing was measured.", soft_wrap=True)
        return done
    console.print(step_table(done))
    console.print(f"Records appended to {out}", soft_wrap=True)
    return done
