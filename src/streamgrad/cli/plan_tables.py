"""The tables of `streamgrad plan`: of one length, of several, and of a group of completions."""

from __future__ import annotations

from rich.table import Table

from streamgrad.hf.estimates.group import GroupReport
from streamgrad.hf.estimates.report import COLUMNS, Report, gib, yes
from streamgrad.memory.costs import COMPONENTS


def plan_table(report: Report) -> Table:
    """Return a row for each component that is there, then totals, time and the longest sequence."""
    table = Table(title=f"{report.title}, in the largest phase", title_justify="left")
    for name in ("", *COLUMNS):
        table.add_column(name, justify="right" if name else "left")
    for section in report.sections():
        table.add_section()
        for row in section:
            table.add_row(*row, style="bold" if row[0] == "in all" else None)
    return table


def lengths_table(reports: list[Report]) -> Table:
    """Return a column for each length, with totals of both ways to compute the step."""
    first = reports[0]
    table = Table(title=f"{first.setup}, batch {first.batch}", title_justify="left")
    table.add_column("tokens", no_wrap=True)
    for report in reports:
        table.add_column(f"{report.seq_len:,}", justify="right")
    for name, outlooks in (
        ("streamgrad", [report.streamed for report in reports]),
        ("checkpointing", [report.checkpointing for report in reports]),
    ):
        table.add_section()
        table.add_row(f"{name}, GPU", *(gib(outlook.peak_bytes) for outlook in outlooks), style="bold")
        if any(outlook.host_bytes for outlook in outlooks):
            table.add_row(f"{name}, host", *(gib(sum(outlook.host_bytes.values())) for outlook in outlooks))
        table.add_row(f"fits {gib(first.gpu_memory)}", *(yes(outlook.fits) for outlook in outlooks))
        table.add_row("longest sequence", *(f"{outlook.longest_tokens:,}" for outlook in outlooks))
        table.add_row("step, at least", *(f"{outlook.seconds.total:,.1f} s" for outlook in outlooks))
    return table


def group_table(report: GroupReport) -> Table:
    """Return a column for prompts that are computed once, and one for prompts in every row."""
    both = (report.shared, report.separate)
    table = Table(title=f"{report.title}, in the largest phase", title_justify="left")
    for name in ("", "prompts once", "prompts in every row"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("tokens", f"{report.shared_tokens:,}", f"{report.separate_tokens:,}")
    table.add_section()
    for component in COMPONENTS:
        counts = [outlook.device_bytes.get(component, 0.0) for outlook in both]
        if any(counts):
            table.add_row(component, *map(gib, counts))
    table.add_section()
    table.add_row("in all", *(gib(outlook.peak_bytes) for outlook in both), style="bold")
    table.add_row("on the host", *(gib(sum(outlook.host_bytes.values())) for outlook in both))
    table.add_row(f"fits {gib(report.gpu_memory)}", *(yes(outlook.fits) for outlook in both))
    table.add_row("longest prompt", *(f"{outlook.longest_tokens:,}" for outlook in both))
    table.add_row("step, at least", *(f"{outlook.seconds.total:,.1f} s" for outlook in both))
    return table
