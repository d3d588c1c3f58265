"""The commands and their options; what they do is in the modules they call."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import streamgrad
from streamgrad.bench import head as head_bench
from streamgrad.bench import linear
from streamgrad.bench import step as step_bench
from streamgrad.bench.records import RESULTS, append_records
from streamgrad.cli import demo as demo_command
from streamgrad.cli.train import train

app = typer.Typer(
    help="Exact gradients of causal language models at sequence lengths that ordinary backpropagation cannot hold.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Examples: `python -m streamgrad demo` or `python -m streamgrad bench linear`",
)
bench = typer.Typer(help="Measure time and memory; each benchmark appends its rows to a file.", no_args_is_help=True)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"streamgrad {streamgrad.__version__} (torch {torch.__version__})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions.")] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the plot goes.")] = Path("out/demo.png"),
    memory_image: Annotated[Path | None, typer.Option(help="Also save the memory half of the plot alone.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few seconds: fewer steps, shorter sequences.")] = False,
) -> None:
    """Train a small model twice, with ordinary backpropagation and streamed, and compare gradients, losses and memory.

    Needs no download and no GPU. Exits with 1 if the gradients differ.

    **Examples**

    `python -m streamgrad demo`

    `python -m streamgrad demo --quick --out /tmp/demo.png`
    """
    demo_command.run(demo_command.QUICK if quick else demo_command.FULL, out=out, memory_image=memory_image, console=Console())


@bench.command("linear")
def bench_linear(
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of X.", show_default="4096")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Columns of X; W1 and W2 are square.", show_default="512")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of X, W1 and W2.", show_default="float32")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's shape, 1e6 x 16384 in bfloat16 (a GPU of 80 GB).")] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = linear.RESULTS,
) -> None:
    """The paper's linear example, L = sum(X W1 W2): standard backpropagation against 20 to 500 partitions of X's rows.

    **Examples**

    `python -m streamgrad bench linear --rows 4096 --width 512 --device cpu --dtype float32`

    `python -m streamgrad bench linear --paper`
    """
    target = _device(device)
    if paper:
        if (rows, width, dtype) != (None, None, None):
            raise ValueError("--paper sets --rows, --width and --dtype itself. Leave those out, or leave --paper out.")
        if target.type != "cuda":
            raise ValueError(f"--paper on {target.type} will not do: X alone is 32.8 GB. Run it on a GPU of 80 GB or more.")
        rows, width, dtype = linear.PAPER_ROWS, linear.PAPER_WIDTH, Dtype(linear.PAPER_DTYPE)
    records = linear.measure_linear(
        rows=rows or 4096, width=width or 512, device=target, dtype=getattr(torch, dtype or Dtype.float32)
    )
    console = Console()
    with console.status("Measuring ..."):
        rows_done = list(records)
    append_records(out, rows_done)
    console.print(_linear_table(rows_done))
    if paper:
        console.print(linear.PAPER_NOTE)
    console.print(f"Records appended to {out}", soft_wrap=True)


@bench.command("head")
def bench_head(
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows of hidden states.", show_default="8192; 512 on a CPU")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Of the model.", show_default="4096; 64 on a CPU")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Logits a token.", show_default="151936; 4000 on a CPU")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of both operands.", show_default="bfloat16; float32 on a CPU")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    chunk_size: Annotated[str, typer.Option(help="streamgrad's: tokens that have logits at a time, or auto.")] = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 10,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = head_bench.RESULTS,
) -> None:
    """Cross entropy and token log-probabilities of a linear head, forward and backward, beside the bare GEMMs.

    **Examples**

    `python -m streamgrad bench head`

    `python -m streamgrad bench head --tokens 16384 --width 2560 --chunk-size 2048`
    """
    target = _device(device)
    on_gpu = target.type == "cuda"
    default = head_bench.GPU_SHAPE if on_gpu else head_bench.CPU_SHAPE
    records = []
    console = Console()
    with console.status("Measuring ..."):
        for record in head_bench.measure_head(
            shape=head_bench.Shape(tokens or default.tokens, width or default.width, vocabulary or default.vocabulary),
            device=target,
            dtype=getattr(torch, dtype or (Dtype.bfloat16 if on_gpu else Dtype.float32)),
            chunk_size=int(chunk_size) if chunk_size.isdecimal() else chunk_size,
            runs=runs,
        ):
            append_records(out, [record])
            records.append(record)
    console.print(_head_table(records))
    console.print(f"Records appended to {out}", soft_wrap=True)


@bench.command("step")
def bench_step(
    model: Annotated[str, typer.Option(help="A preset: a published shape, with random weights.")] = "qwen3-4b",
    seq: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "6000,12000,24000,36000",
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(step_bench.METHODS)}.")] = "hf,streamgrad",
    chunk_size: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    keep: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    offload: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    attention: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    compile: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    memory_budget: Annotated[str | None, typer.Option(help="As for streamgrad.enable.")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "step.jsonl",
) -> None:
    """Time and memory of one forward and backward in bfloat16 on a GPU, method beside method.

    **Examples**

    `python -m streamgrad bench step --model qwen3-4b --seq 6000,12000 --methods hf,liger,streamgrad`
    """
    lengths = [int(length) for length in seq.split(",")]
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "keep": keep,
        "offload": offload,
        "attention": attention,
        "compile": compile,
    }
    command = f"python -m streamgrad bench step --model {model} --seq {seq} --methods {methods} --runs {runs}"
    command += "".join(f" --{name.replace('_', '-')} {value}" for name, value in options.items() if value != "auto")
    command += "" if memory_budget is None else f" --memory-budget {memory_budget}"
    config = streamgrad.StreamConfig(
        **options | {"chunk_size": int(chunk_size) if chunk_size.isdecimal() else chunk_size}, memory_budget=memory_budget
    )
    records = []
    console = Console()
    for record in step_bench.measure_steps(
        model=model, lengths=lengths, methods=methods.split(","), config=config, runs=runs, command=command
    ):
        append_records(out, [record])
        records.append(record)
        console.print(f"{record.method} at {record.seq_len:,}: {record.error or f'{record.step_ms:,.0f} ms'}")
    console.print(_step_table(records))
    console.print(f"Records appended to {out}", soft_wrap=True)


def _device(asked: Device | None) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if asked == Device.cuda and not has_cuda:
        raise ValueError("--device cuda needs a GPU that torch can see, and it sees none. Pass --device cpu.")
    return torch.device(asked or ("cuda" if has_cuda else "cpu"))


def _head_table(records: list[head_bench.HeadRecord]) -> Table:
    """A row per objective and method, with the time relative to the bare GEMMs' and to plain torch's."""
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
        for base in (head_bench.GEMMS, "torch"):
            base_ms = times[record.objective, base]
            ratios.append("-" if base_ms is None else f"{record.step_ms / base_ms:.2f}x")
        peak = f"{record.peak_bytes / 2**30:.2f} GiB" if record.peak_bytes >= 2**28 else f"{record.peak_bytes / 2**20:.2f} MiB"
        table.add_row(record.objective, record.method, f"{record.step_ms:,.2f} ms", peak, *ratios)
    return table


def _step_table(records: list[step_bench.StepRecord]) -> Table:
    """A row per length and method, with the time relative to the first method's."""
    table = Table(title=f"{records[0].model}, forward + backward, {records[0].device}", title_justify="left")
    for name in ("tokens", "method", "step", "peak", "host", "time against " + records[0].method):
        table.add_column(name, justify="left" if name == "method" else "right")
    base = {record.seq_len: record.step_ms for record in records if record.method == records[0].method}
    for record in sorted(records, key=lambda record: record.seq_len):
        if record.step_ms is None or record.peak_bytes is None:
            table.add_row(f"{record.seq_len:,}", record.method, record.error, "-", "-", "-")
            continue
        reference = base[record.seq_len]
        table.add_row(
            f"{record.seq_len:,}",
            record.method,
            f"{record.step_ms:,.0f} ms",
            f"{record.peak_bytes / 1e9:.1f} GB",
            f"{record.host_bytes / 1e9:.1f} GB",
            f"{record.step_ms / reference:.2f}x" if reference else "-",
        )
    return table


def _linear_table(records: list[linear.LinearRecord]) -> Table:
    """Our numbers, and the paper's beside them where the shape is the paper's."""
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
