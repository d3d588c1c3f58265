"""Shows benchmark records as tables in a terminal."""

from __future__ import annotations

from rich.table import Table

from benchmarks import head_alone, linear
from benchmarks.step import StepRecord
from streamgrad.hf.configs import preset_config


def head_table(records: list[head_alone.HeadRecord]) -> Table:
    """Return a row per objective and method, with the time relative to the bare GEMMs' and to plain torch's."""
    first = records[0]
    shape = "[{tokens} x {width}] x {vocabulary}".format(**first.shape)
    table = Table(title=f"Head {shape}, {first.dtype}, forward + backward, {first.device}", title_justify="left")
    for name in ("objective", "method", "step", "above inputs and gradients", "against bare GEMMs", "against torch"):
        table.add_column(name, justify="left" if name in ("objective", "method") else "right")
    times = {(record.objective, record.method): record.step_ms for record in records}
    for record in records:
        if record.step_ms is None or record.peak_bytes is None:
            table.add_row(record.objective, record.method, record.error, "-", "-", "-")
            continue
        ratios = []
        for base in (head_alone.GEMMS, "torch"):
            base_ms = times[record.objective, base]
            ratios.append("-" if base_ms is None else f"{record.step_ms / base_ms:.2f}x")
        peak = f"{record.peak_bytes / 2**30:.2f} GiB" if record.peak_bytes >= 2**28 else f"{record.peak_bytes / 2**20:.2f} MiB"
        table.add_row(record.objective, record.method, f"{record.step_ms:,.2f} ms", peak, *ratios)
    return table


def step_table(records: list[StepRecord]) -> Table:
    """Return a row per shape and method, with the time relative to the first method's."""
    table = Table(title=f"forward + backward, {records[0].device}", title_justify="left")
    for name in ("model", "tokens", "method", "step", "peak", "host", "time against " + records[0].method):
        table.add_column(name, justify="left" if name in ("model", "method") else "right")
    base = {(record.batch, record.seq_len): record.step_ms for record in records if record.method == records[0].method}
    for record in sorted(records, key=lambda record: (record.batch, record.seq_len)):
        if record.step_ms is None or record.peak_bytes is None:
            table.add_row(_model_cell(record), tokens_of(record), record.method, record.error, "-", "-", "-")
            continue
        reference = base.get((record.batch, record.seq_len))
        table.add_row(
            _model_cell(record),
            tokens_of(record),
            record.method,
            f"{record.step_ms:,.0f} ms",
            f"{record.peak_bytes / 1e9:.1f} GB",
            f"{record.host_bytes / 1e9:.1f} GB",
            f"{record.step_ms / reference:.2f}x" if reference else "-",
        )
    return table


def tokens_of(record: StepRecord) -> str:
    """Return `9,000`, or `4 x 9,000`."""
    return f"{record.seq_len:,}" if record.batch == 1 else f"{record.batch} x {record.seq_len:,}"


def _model_cell(record: StepRecord) -> str:
    """Return `qwen3-8b lora dpo, 2 layers + ballast`, as far as it applies."""
    name = record.model if record.training == "full" else f"{record.model} {record.training}"
    name += "" if record.objective == "sft" else f" {record.objective}"
    if record.layers == preset_config(record.model).num_hidden_layers:
        return name
    return f"{name}, {record.layers} layers" + (" + ballast" if record.ballast_bytes else "")


def linear_table(records: list[linear.LinearRecord]) -> Table:
    """Return our numbers, and the paper's beside them where the shape is the paper's."""
    first = records[0]
    is_paper_shape = first.shape == {"rows": linear.PAPER_ROWS, "width": linear.PAPER_WIDTH}
    title = f"L = sum(X W1 W2), X {first.shape['rows']} x {first.shape['width']}, {first.dtype}, {first.device}"
    table = Table(title=title, title_justify="left")
    table.add_column("method")
    for name in ("partitions", "peak above inputs", "step"):
        table.add_column(name, justify="right")
    if is_paper_shape:
        table.add_column("paper: intermediate", justify="right")
        table.add_column("paper: step", justify="right")
    for record in records:
        if record.step_ms is None or record.peak_bytes is None:
            measured = [f"does not fit ({record.error})", "-"]
        else:
            measured = [f"{record.peak_bytes / 1e6:,.1f} MB", f"{record.step_ms:,.1f} ms"]
        cells = [record.method, str(record.partitions), *measured]
        if is_paper_shape:
            gigabytes, seconds = linear.PAPER_RESULTS[record.partitions]
            cells += [f"{1e3 * gigabytes:,.1f} MB", f"{1e3 * seconds:,.1f} ms"]
        table.add_row(*cells)
    return table
