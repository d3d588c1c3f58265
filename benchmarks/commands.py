"""Defines the command line of the benchmarks, and its commands that do not measure whole steps."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.names import MEASURED, REPORT, RESULTS, ROWS_FILE, typed_command
from benchmarks.step_commands import bench_max_length, bench_memory, bench_partition, bench_predicted, bench_step
from benchmarks.training_commands import bench_longest, bench_run, bench_train_step
from streamgrad.cli.check import check_table
from streamgrad.config import parse_count

# What measures is imported in each command, so that `--help` need not wait for it.
app = typer.Typer(
    help="Measure the paper's tables and figures; each benchmark appends its rows to a file in out/benchmarks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Examples: `python -m benchmarks linear` or `python -m benchmarks report`",
)
app.command("step")(bench_step)
app.command("memory")(bench_memory)
app.command("max-length")(bench_max_length)
app.command("partition")(bench_partition)
app.command("predicted")(bench_predicted)
app.command("run")(bench_run)
app.command("train-step")(bench_train_step)
app.command("longest")(bench_longest)


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


@app.command("shared-prompts")
def bench_shared_prompts(
    model: Annotated[str, typer.Option(help="A preset.")] = "qwen3-4b",
    shape: Annotated[
        list[str] | None, typer.Option(help="objective:prompt:completion:group, several times.", show_default="a few of each")
    ] = None,
    method: Annotated[list[str] | None, typer.Option(help="shared, separate or trl; several times.", show_default="all")] = None,
    keep: Annotated[str, typer.Option(help="What streamgrad keeps: auto, or input, on the device.")] = "auto",
    limit: Annotated[
        str | None, typer.Option(help="Device memory, such as 79GiB, with ballast for missing --layers.", show_default="all")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model.", show_default="all")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "shared_prompts.jsonl",
) -> None:
    """Measure GRPO and DPO steps whose rows have one prompt: shared, separate, and as TRL's trainers do with Liger's kernels.

    **Examples**

    `python -m benchmarks shared-prompts --shape grpo:16000:2000:8 --shape dpo:12000:2000:2`
    """
    import torch

    from benchmarks.records import append_records
    from benchmarks.shared_prompts import METHODS, OBJECTIVES, measure_shared_prompts
    from streamgrad.config import parse_bytes

    shapes = []
    for text in shape or ["grpo:16000:2000:8", "grpo:4000:4000:8", "dpo:12000:2000:2", "dpo:2000:8000:2"]:
        objective, *counts = text.split(":")
        if objective not in OBJECTIVES or len(counts) != 3 or not all(count.isdigit() and int(count) for count in counts):
            raise ValueError(f"--shape must be objective:prompt:completion:group, such as grpo:16000:2000:8, got {text!r}.")
        prompt, completion, group = map(int, counts)
        shapes.append((objective, prompt, completion, group))
    for name in method or METHODS:
        if name not in METHODS:
            raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {name!r}.")
    if keep not in ("auto", "input"):
        raise ValueError(f"--keep must be auto or input, got {keep!r}.")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for record in measure_shared_prompts(
        model=model, shapes=shapes, methods=method or METHODS, keep=keep, runs=runs, layers=layers, device=chosen,
        limit_bytes=None if limit is None else parse_bytes(limit), command=typed_command(),
    ):  # fmt: skip
        append_records(out, [record])
        measured = record.error or f"{record.step_ms:,.0f} ms, {(record.peak_bytes or 0) / 1e9:.1f} GB"
        shape_text = f"{record.prompt_tokens} + {record.group} x {record.completion_tokens} tokens"
        Console().print(f"{record.objective}  {shape_text:>28}  {record.method:>9}: {measured}", highlight=False)


@app.command("families")
def bench_families(
    case: Annotated[
        str, typer.Argument(help="experts, images, gemma-3-4b, lora-8b, qlora-8b, qlora-32b, qwen3-next or qwen3.5.")
    ],
    seq_len: Annotated[str, typer.Option(help="Tokens of the sequence; several lengths, such as 4096,32768.")] = "4096,16384",
    method: Annotated[
        list[str] | None, typer.Option(help="streamgrad, streamgrad-input, checkpointing or liger.", show_default="all")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="Device memory of the process, such as 24GiB.", show_default="all")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the model.", show_default="all")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    warm_ups: Annotated[int, typer.Option(min=1, help="Steps before those that are timed: kernels settle in them.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "families.jsonl",
) -> None:
    """Measure a step of experts with their balance loss, text with images, a window, adapters, or hybrids.

    **Examples**

    `python -m benchmarks families experts --seq-len 8192,32768`

    `python -m benchmarks families qlora-8b --seq-len 4096,32768 --limit 24GiB`
    """
    import torch

    from benchmarks.families import CASES, METHODS, measure_family
    from benchmarks.records import append_records
    from streamgrad.config import parse_bytes

    for name, given, choices in (("case", [case], CASES), ("--method", method or [], METHODS)):
        for value in given:
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    records = measure_family(
        case=case, lengths=[int(length) for length in seq_len.split(",")], methods=method or METHODS, layers=layers,
        runs=runs, warm_ups=warm_ups,
        limit_bytes=None if limit is None else parse_bytes(limit), device=chosen,
        command=typed_command(),
    )  # fmt: skip
    for record in records:
        append_records(out, [record])
        measured = record.error or f"{record.step_ms:,.0f} ms, {(record.peak_bytes or 0) / 1e9:.1f} GB"
        Console().print(
            f"{record.case}  {record.seq_len:>7} tokens  {record.method:>16}: {measured}  {record.plan}", highlight=False
        )


@app.command("head")
def bench_head(
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows of hidden states.", show_default="8192; 512 on a CPU")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Width of the model.", show_default="4096; 64 on a CPU")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=1, help="Logits a token.", show_default="151936; 4000 on a CPU")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of both operands.", show_default="bfloat16; float32 on a CPU")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    chunk_size: Annotated[str, typer.Option(help="streamgrad's: tokens that have logits at a time, or auto.")] = "auto",
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 10,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "head.jsonl",
) -> None:
    """Measure cross entropy and token log-probabilities of a linear head, forward and backward, beside the bare GEMMs.

    **Examples**

    `python -m benchmarks head`

    `python -m benchmarks head --tokens 16384 --width 2560 --chunk-size 2048`
    """
    import torch

    from benchmarks import head_alone
    from benchmarks.records import append_records
    from benchmarks.tables import head_table
    from streamgrad.cli.chosen_device import chosen_device

    target = chosen_device(device, one_thread=False)
    on_gpu = target.type == "cuda"
    default = head_alone.GPU_SHAPE if on_gpu else head_alone.CPU_SHAPE
    records = []
    console = Console()
    with console.status("Measuring ..."):
        for record in head_alone.measure_head(
            shape=head_alone.Shape(tokens or default.tokens, width or default.width, vocabulary or default.vocabulary),
            device=target,
            dtype=getattr(torch, dtype or (Dtype.bfloat16 if on_gpu else Dtype.float32)),
            chunk_size=parse_count("chunk_size", chunk_size, "tokens"),
            runs=runs,
        ):
            append_records(out, [record])
            records.append(record)
    console.print(head_table(records))
    console.print(f"Records appended to {out}", soft_wrap=True)


@app.command("linear")
def bench_linear(
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of X.", show_default="4096")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Columns of X; W1 and W2 are square.", show_default="512")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Type of X, W1 and W2.", show_default="float32")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's shape, 1e6 x 16384 in bfloat16 (a GPU of 80 GB).")] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "linear.jsonl",
) -> None:
    """Measure the paper's linear example, L = sum(X W1 W2): standard backpropagation against 20 to 500 partitions of X's rows.

    **Examples**

    `python -m benchmarks linear --rows 4096 --width 512 --device cpu --dtype float32`

    `python -m benchmarks linear --paper`
    """
    import torch

    from benchmarks import linear
    from benchmarks.records import append_records
    from benchmarks.tables import linear_table
    from streamgrad.cli.chosen_device import chosen_device

    target = chosen_device(device, one_thread=False)
    if paper:
        if (rows, width, dtype) != (None, None, None):
            raise ValueError("--paper sets --rows, --width and --dtype itself. Leave those out, or leave --paper out.")
        if target.type != "cuda":
            raise ValueError(f"--paper needs a GPU of 80 GB, and this is {target.type}: X alone is 32.8 GB. Leave --paper out.")
        rows, width, dtype = linear.PAPER_ROWS, linear.PAPER_WIDTH, Dtype(linear.PAPER_DTYPE)
    records = linear.measure_linear(
        rows=rows or 4096, width=width or 512, device=target, dtype=getattr(torch, dtype or Dtype.float32)
    )
    console = Console()
    with console.status("Measuring ..."):
        rows_done = list(records)
    append_records(out, rows_done)
    console.print(linear_table(rows_done))
    if paper:
        console.print(linear.PAPER_NOTE)
    console.print(f"Records appended to {out}", soft_wrap=True)


@app.command("precision")
def bench_precision(
    model: Annotated[str, typer.Option(help="A preset.")] = "qwen3-4b",
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "precision.jsonl",
) -> None:
    """Keep what `streamgrad check` finds as a record, for the paper's table of gradient precision.

    **Examples**

    `python -m benchmarks precision --model qwen3-4b --device cpu`
    """
    from benchmarks.precision_record import precision_record
    from benchmarks.records import append_records
    from streamgrad.cli.chosen_device import chosen_device
    from streamgrad.hf.configs import config_of
    from streamgrad.precision import check_precision

    target = chosen_device(device, one_thread=False)
    console = Console()
    with console.status("Measuring ..."):
        outcome = check_precision(config_of(model), device=target)
    append_records(out, [precision_record(model, outcome.to_dict(), target)])
    console.print(check_table(model, outcome))
    console.print(f"Record appended to {out}", soft_wrap=True)


@app.command("report")
def bench_report(
    results: Annotated[Path, typer.Option(help="The folder that records are in.")] = RESULTS,
    out: Annotated[Path, typer.Option(help="The report; its plots go into a folder beside it.")] = REPORT,
) -> None:
    """Write the report of all records: every table and figure of the paper, ours beside the paper's. Measures nothing.

    **Examples**

    `python -m benchmarks report`
    """
    from benchmarks.report import write_report

    for path in write_report(results, out):
        typer.echo(path)
