"""`streamgrad bench ...`: options and tables; the measuring is in `streamgrad.bench`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from streamgrad.bench.names import METHODS, REPORT, RESULTS
from streamgrad.cli.check import check_table
from streamgrad.config import StreamConfig, parse_bytes, parse_tokens

# What measures is imported in each command, so that `--help` need not wait for it.
_RESUME = "Leave out what the file has from the same command, on this device, with these versions."

bench = typer.Typer(help="Measure time and memory; each benchmark appends its rows to a file.", no_args_is_help=True)


class Dtype(StrEnum):
    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Flash(StrEnum):
    FA2 = "FA2"
    FA3 = "FA3"
    FA4 = "FA4"


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


@bench.command("linear")
def bench_linear(
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of X.", show_default="4096")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Columns of X; W1 and W2 are square.", show_default="512")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of X, W1 and W2.", show_default="float32")] = None,
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="The paper's shape, 1e6 x 16384 in bfloat16 (a GPU of 80 GB).")] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "linear.jsonl",
) -> None:
    """The paper's linear example, L = sum(X W1 W2): standard backpropagation against 20 to 500 partitions of X's rows.

    **Examples**

    `python -m streamgrad bench linear --rows 4096 --width 512 --device cpu --dtype float32`

    `python -m streamgrad bench linear --paper`
    """
    import torch

    from streamgrad.bench import linear
    from streamgrad.bench.records import append_records
    from streamgrad.cli.device import chosen_device
    from streamgrad.cli.tables import linear_table

    target = chosen_device(device, one_thread=False)
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
    console.print(linear_table(rows_done))
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
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "head.jsonl",
) -> None:
    """Cross entropy and token log-probabilities of a linear head, forward and backward, beside the bare GEMMs.

    **Examples**

    `python -m streamgrad bench head`

    `python -m streamgrad bench head --tokens 16384 --width 2560 --chunk-size 2048`
    """
    import torch

    from streamgrad.bench import head as head_bench
    from streamgrad.bench.records import append_records
    from streamgrad.cli.device import chosen_device
    from streamgrad.cli.tables import head_table

    target = chosen_device(device, one_thread=False)
    on_gpu = target.type == "cuda"
    default = head_bench.GPU_SHAPE if on_gpu else head_bench.CPU_SHAPE
    records = []
    console = Console()
    with console.status("Measuring ..."):
        for record in head_bench.measure_head(
            shape=head_bench.Shape(tokens or default.tokens, width or default.width, vocabulary or default.vocabulary),
            device=target,
            dtype=getattr(torch, dtype or (Dtype.bfloat16 if on_gpu else Dtype.float32)),
            chunk_size=parse_tokens("chunk_size", chunk_size),
            runs=runs,
        ):
            append_records(out, [record])
            records.append(record)
    console.print(head_table(records))
    console.print(f"Records appended to {out}", soft_wrap=True)


@bench.command("step")
def bench_step(
    model: Annotated[str, typer.Option(help="A preset: a published shape, with random weights.")] = "qwen3-4b",
    seq: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "6000,12000,24000,36000",
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(METHODS)}.")] = "hf,streamgrad",
    batch: Annotated[str, typer.Option(help="Sequences of a step, separated by commas.")] = "1",
    chunk_size: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    keep: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    offload: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    attention: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    fused_kernels: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    flash: Annotated[Flash, typer.Option(help="What torch's flash operators run, for all methods; FA2 is its own.")] = Flash.FA2,
    memory_budget: Annotated[
        str | None, typer.Option(help="As for streamgrad.enable; `liger`: at each length what liger took there, by the records.")
    ] = None,
    kernels: Annotated[bool, typer.Option(help="Profile some more steps of streamgrad's: kernel time by kind.")] = False,
    accumulate: Annotated[bool, typer.Option("--accumulate", help="Add to the gradients of the step before.")] = False,
    warm_ups: Annotated[int, typer.Option(min=0, help="Steps before those that are timed: kernels settle in them.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "step.jsonl",
) -> None:
    """Time and memory of one forward and backward in bfloat16 on a GPU, method beside method.

    **Examples**

    `python -m streamgrad bench step --model qwen3-4b --seq 6000,12000 --methods hf,liger,streamgrad`

    `python -m streamgrad bench step --seq 9000 --batch 1,2,4,16 --methods hf,mst,liger,streamgrad`

    `python -m streamgrad bench step --model qwen3-8b --seq 64000 --accumulate --methods streamgrad,streamgrad-zero3`
    """
    from streamgrad.bench.peers import use_flash
    from streamgrad.bench.step import measure_steps, peaks_in
    from streamgrad.cli.cells import run_steps

    use_flash(flash)
    lengths, batches, chosen = _numbers(seq), _numbers(batch), methods.split(",")
    options: dict[str, Any] = {
        "chunk_size": chunk_size,
        "keep": keep,
        "offload": offload,
        "attention": attention,
        "fused_kernels": fused_kernels,
    }
    command = f"python -m streamgrad bench step --model {model} --seq {seq} --methods {methods} --runs {runs}"
    command += "" if batch == "1" else f" --batch {batch}"
    command += "".join(f" --{name.replace('_', '-')} {value}" for name, value in options.items() if value != "auto")
    command += "" if memory_budget is None else f" --memory-budget {memory_budget}"
    command += " --accumulate" if accumulate else ""
    command += "" if flash == Flash.FA2 else f" --flash {flash}"
    command += (" --kernels" if kernels else "") + (f" --warm-ups {warm_ups}" if warm_ups != 4 else "")
    options["chunk_size"] = parse_tokens("chunk_size", chunk_size)
    if memory_budget == "liger" and batches != [1]:
        raise ValueError(f"--batch {batch} has no budget: --memory-budget liger is of records of one sequence. Leave one out.")
    budgets = peaks_in(out, method="liger", model=model, lengths=lengths) if memory_budget == "liger" else None
    config = StreamConfig(**options, memory_budget=None if budgets else memory_budget)
    measure = partial(
        measure_steps, model=model, lengths=lengths, methods=chosen, config=config, runs=runs, command=command,
        batches=batches, kernels=kernels, accumulates=accumulate, warm_ups=warm_ups, budgets=budgets,
    )  # fmt: skip
    run_steps(measure, out, cells=len(chosen) * len(lengths) * len(batches), resume=resume)


def _refuse_unread(context: typer.Context, when: str, *names: str) -> None:
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"--{name.replace('_', '-')} has no effect {when}. Leave one of the two out.")


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{text!r} is not a list of whole numbers from 1 on. Separate them by commas, as in 6000,12000.")
    return numbers


@bench.command("memory")
def bench_memory(
    model: Annotated[str, typer.Option(help="A preset: a published shape, with random weights.")] = "qwen3-8b",
    seq: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "65536,131072,262144",
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(METHODS)}.")] = "streamgrad,liger-offload",
    training: Annotated[str, typer.Option(help="full, or lora of rank 32.")] = "full",
    offload: Annotated[str, typer.Option(help="streamgrad's layer inputs: host, or none for the device.")] = "host",
    chunk_size: Annotated[str, typer.Option(help="As for streamgrad.enable; auto fills the memory that there is.")] = "auto",
    layers: Annotated[int | None, typer.Option(min=1, help="Build only so many layers.", show_default="all")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "memory.jsonl",
) -> None:
    """Device bytes against length, of steps whose layers keep their inputs alone.

    **Examples**

    `python -m streamgrad bench memory --layers 4`

    `python -m streamgrad bench memory --model qwen3-14b --training lora --offload none --seq 8000,16000 --methods hf,streamgrad`
    """
    from streamgrad.bench.lengths import measure_memory, slope_bytes
    from streamgrad.cli.cells import run_steps

    command = f"python -m streamgrad bench memory --model {model} --seq {seq} --methods {methods}"
    command += ("" if training == "full" else f" --training {training}") + ("" if offload == "host" else f" --offload {offload}")
    command += "" if chunk_size == "auto" else f" --chunk-size {chunk_size}"
    command += "" if layers is None else f" --layers {layers}"
    lengths, chosen = _numbers(seq), methods.split(",")
    measure = partial(
        measure_memory, model=model, lengths=lengths, methods=chosen, layers=layers, training=training,
        offload=offload, chunk_size=parse_tokens("chunk_size", chunk_size), command=command,
    )  # fmt: skip
    done = run_steps(measure, out, cells=len(chosen) * len(lengths), resume=resume)
    for method in dict.fromkeys(record.method for record in done):
        slope = slope_bytes([record for record in done if record.method == method])
        if slope is not None:
            Console().print(f"{method}: {slope / 1e3:.1f} KB of device memory a token")


@bench.command("partition")
def bench_partition(
    model: Annotated[str, typer.Option(help="A preset: a published shape, with random weights.")] = "qwen3-4b",
    seq: Annotated[int, typer.Option(min=1, help="Tokens of the sequence.")] = 24_000,
    chunk_sizes: Annotated[
        str, typer.Option(help="Tokens that a layer processes at a time, separated by commas.")
    ] = "500,1000,2000,5000,8000,24000",
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "partition.jsonl",
) -> None:
    """Time and memory of a step against the chunk size; layers keep their inputs, on the device.

    **Examples**

    `python -m streamgrad bench partition --model qwen3-4b --seq 24000 --chunk-sizes 500,1000,2000,8000`
    """
    from streamgrad.bench.lengths import measure_partitions
    from streamgrad.cli.cells import run_steps

    command = f"python -m streamgrad bench partition --model {model} --seq {seq} --chunk-sizes {chunk_sizes} --runs {runs}"
    sizes = _numbers(chunk_sizes)
    measure = partial(measure_partitions, model=model, length=seq, chunk_sizes=sizes, runs=runs, command=command)
    run_steps(measure, out, cells=len(sizes), resume=resume)


@bench.command("max-length")
def bench_max_length(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="A preset. With --seq, of that step; else only its cells; gemma-3-1b has TRL's.")
    ] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of one step of the whole model; everything is auto.")] = None,
    objective: Annotated[str, typer.Option(help="Without --seq: sft, dpo (a pair) or grpo (8 completions).")] = "sft",
    factor: Annotated[float, typer.Option(help="Without --seq: times the longest sequences of the paper.")] = 2.0,
    offload: Annotated[str, typer.Option(help="Without --seq: host or none.")] = "host",
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Without --seq: layers to build; ballast for the rest.", show_default="2; all where that is quick"
        ),
    ] = None,
    card: Annotated[str, typer.Option(help="Without --seq: 80GiB or 24GiB, with the lengths reached there.")] = "80GiB",
    gpu_memory: Annotated[
        str | None, typer.Option(help="Without --seq: what the process may hold.", show_default="79GiB; 23.5GiB of 24GiB")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "max_length.jsonl",
) -> None:
    """Whether a step of a given length fits a card.

    **Examples**

    `python -m streamgrad bench max-length --model qwen3-8b --seq 400000`

    `python -m streamgrad bench max-length --objective dpo --factor 2.0`

    `python -m streamgrad bench max-length --model gemma-3-1b --objective grpo`
    """
    from streamgrad.bench import lengths
    from streamgrad.cli.cells import run_steps

    if seq is not None:
        _refuse_unread(context, "with --seq", "objective", "factor", "offload", "layers", "card", "gpu_memory")
        model = model or "qwen3-8b"
        command = f"python -m streamgrad bench max-length --model {model} --seq {seq}"
        measure = partial(lengths.measure_longest, model=model, length=seq, command=command)
        run_steps(measure, out, cells=1, resume=resume)
        return
    chosen = lengths.cells(objective, model=model, card=card)
    if layers is not None:
        chosen = [replace(cell, layers=layers) for cell in chosen]
    gpu_memory = gpu_memory or lengths.CARDS[card]
    command = f"python -m streamgrad bench max-length --objective {objective} --factor {factor} --offload {offload}"
    command += ("" if model is None else f" --model {model}") + ("" if card == "80GiB" else f" --card {card}")
    command += "" if layers is None else f" --layers {layers}"
    command += f" --gpu-memory {gpu_memory}"
    measure = partial(
        lengths.measure_cells, chosen, factor=factor, offload=offload, card_bytes=parse_bytes(gpu_memory), command=command
    )
    run_steps(measure, out, cells=len(chosen), resume=resume)


@bench.command("predicted")
def bench_predicted(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A preset; one configuration then. Without it, twelve of them.")] = None,
    training: Annotated[str, typer.Option(help="With --model: full or lora.")] = "full",
    offload: Annotated[str, typer.Option(help="With --model: as for streamgrad.enable.")] = "none",
    gpu_memory: Annotated[str, typer.Option(help="With --model: what the process may hold.")] = "24GiB",
    resume: Annotated[bool, typer.Option("--resume", help=_RESUME)] = False,
    out: Annotated[Path, typer.Option(help="The JSON lines file that rows are appended to.")] = RESULTS / "predicted.jsonl",
) -> None:
    """Whether the longest sequence that `streamgrad plan` predicts is the longest that runs: a step below it, and one above.

    **Examples**

    `python -m streamgrad bench predicted`

    `python -m streamgrad bench predicted --model qwen3-4b --training lora --gpu-memory 16GiB`
    """
    from streamgrad.bench.predicted import CONFIGURATIONS, Configuration
    from streamgrad.cli.cells import run_steps

    if model is not None:
        configuration = Configuration(model, training, gpu_memory, offload)
        run_steps(configuration.measure, out, cells=2, resume=resume)
        return
    _refuse_unread(context, "without --model", "training", "offload", "gpu_memory")
    for configuration in CONFIGURATIONS:
        # Each in a process of its own, so that none is measured beside what another has left.
        arguments = [*configuration.command.split()[1:], "--out", str(out), *(["--resume"] if resume else [])]
        status = subprocess.run([sys.executable, *arguments], check=False).returncode
        if status:
            raise typer.Exit(status)


@bench.command("precision")
def bench_precision(
    model: Annotated[str, typer.Option(help="A preset.")] = "qwen3-4b",
    device: Annotated[Device | None, typer.Option(help="Where to run.", show_default="cuda if there is one, else cpu")] = None,
    out: Annotated[Path, typer.Option(help="The JSON lines file that the row is appended to.")] = RESULTS / "precision.jsonl",
) -> None:
    """The paper's table of gradient precision: what `streamgrad check` finds, kept as a record.

    **Examples**

    `python -m streamgrad bench precision --model qwen3-4b --device cpu`
    """
    from streamgrad.bench.precision import precision_record
    from streamgrad.bench.records import append_records
    from streamgrad.cli.device import chosen_device
    from streamgrad.hf.configs import config_of
    from streamgrad.precision import check_precision

    target = chosen_device(device, one_thread=False)
    console = Console()
    with console.status("Measuring ..."):
        outcome = check_precision(config_of(model), device=target)
    append_records(out, [precision_record(model, outcome.to_dict(), target)])
    console.print(check_table(model, outcome))
    console.print(f"Record appended to {out}", soft_wrap=True)


@bench.command("report")
def bench_report(
    results: Annotated[Path, typer.Option(help="The folder that records are in.")] = RESULTS,
    out: Annotated[Path, typer.Option(help="The report; its plots go into a folder beside it.")] = REPORT,
) -> None:
    """Write the report of all records: every table and figure of the paper, ours beside the paper's. Measures nothing.

    **Examples**

    `python -m streamgrad bench report`
    """
    from streamgrad.bench.report import write_report

    for path in write_report(results, out):
        typer.echo(path)
