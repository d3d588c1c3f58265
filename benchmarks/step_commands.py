"""Commands that measure whole training steps, one cell after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.names import (
    MEASURED,
    METHODS,
    RESUME,
    ROWS_FILE,
    WITH_FLASH,
    Flash,
    command_line,
    refuse_unread,
    run_alone,
    unless,
)
from streamgrad.cli.bench import numbers_in
from streamgrad.config import StreamConfig, parse_bytes, parse_count

# What measures is imported in each command, so that `--help` need not wait for it.


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
    flash: Annotated[Flash, WITH_FLASH] = Flash.FA2,
    memory_budget: Annotated[
        str | None, typer.Option(help="As for streamgrad.enable; `liger`: at each length what liger took there, by the records.")
    ] = None,
    kernels: Annotated[bool, typer.Option(help="Profile some more steps of streamgrad's: kernel time by kind.")] = False,
    accumulate: Annotated[bool, typer.Option("--accumulate", help="Add to the gradients of the step before.")] = False,
    in_turn: Annotated[
        bool, typer.Option("--in-turn", help="Time a step of each method in turn, with all models on the GPU.")
    ] = False,
    warm_ups: Annotated[int, typer.Option(min=0, help="Steps before those that are timed: kernels settle in them.")] = 4,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "step.jsonl",
) -> None:
    """Measure time and memory of one forward and backward in bfloat16 on a GPU, method beside method.

    **Examples**

    `python -m benchmarks step --model qwen3-4b --seq 6000,12000 --methods hf,liger,streamgrad`

    `python -m benchmarks step --seq 9000 --batch 1,2,4,16 --methods hf,mst,liger,streamgrad`

    `python -m benchmarks step --model qwen3-8b --seq 64000 --accumulate --methods streamgrad,streamgrad-zero3`

    `python -m benchmarks step --seq 500,1000,2000,4000 --methods hf-compile-nockpt,streamgrad-compile --in-turn --runs 20`
    """
    from benchmarks.cells import run_steps
    from benchmarks.in_turn import measure_in_turn
    from benchmarks.peers import use_flash
    from benchmarks.step import measure_steps, peaks_in

    use_flash(flash)
    lengths, batches, chosen = numbers_in("--seq", seq), numbers_in("--batch", batch), methods.split(",")
    options: dict[str, Any] = {
        "chunk_size": chunk_size, "keep": keep, "offload": offload, "attention": attention, "fused_kernels": fused_kernels,
    }  # fmt: skip
    command = command_line(
        "step", model=model, seq=seq, methods=methods, runs=runs, batch=unless(batch, "1"),
        **{name: unless(value, "auto") for name, value in options.items()},
        memory_budget=memory_budget, accumulate=accumulate, flash=unless(flash, Flash.FA2), kernels=kernels,
        in_turn=in_turn, warm_ups=unless(warm_ups, 4),
    )  # fmt: skip
    options["chunk_size"] = parse_count("chunk_size", chunk_size, "tokens")
    if in_turn and memory_budget is not None:
        raise ValueError(
            f"--memory-budget {memory_budget} would count the models of all methods, which --in-turn keeps on the GPU. Leave one "
            "of the two out."
        )
    if memory_budget == "liger" and batches != [1]:
        raise ValueError(f"--batch {batch} has no budget: --memory-budget liger is of records of one sequence. Leave one out.")
    budgets = peaks_in(out, method="liger", model=model, lengths=lengths) if memory_budget == "liger" else None
    config = StreamConfig(**options, memory_budget=None if budgets else memory_budget)
    manner = measure_in_turn if in_turn else partial(measure_steps, budgets=budgets)
    measure = partial(
        manner, model=model, lengths=lengths, methods=chosen, config=config, runs=runs, command=command,
        batches=batches, kernels=kernels, accumulates=accumulate, warm_ups=warm_ups,
    )  # fmt: skip
    run_steps(measure, out, cells=len(chosen) * len(lengths) * len(batches), resume=resume)


def bench_memory(
    model: Annotated[str, typer.Option(help="A preset: a published shape, with random weights.")] = "qwen3-8b",
    seq: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "65536,131072,262144",
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(METHODS)}.")] = "streamgrad,liger-offload",
    training: Annotated[str, typer.Option(help="full, or lora of rank 32.")] = "full",
    offload: Annotated[str, typer.Option(help="streamgrad's layer inputs: host, or none for the device.")] = "host",
    chunk_size: Annotated[str, typer.Option(help="As for streamgrad.enable; auto fills the memory that there is.")] = "auto",
    layers: Annotated[int | None, typer.Option(min=1, help="Build only so many layers.", show_default="all")] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "memory.jsonl",
) -> None:
    """Measure device bytes against length, of steps whose layers keep their inputs alone.

    **Examples**

    `python -m benchmarks memory --layers 4`

    `python -m benchmarks memory --model qwen3-14b --training lora --offload none --seq 8000,16000 --methods hf,streamgrad`
    """
    from benchmarks.cells import run_steps
    from benchmarks.lengths import measure_memory, slope_bytes

    command = command_line(
        "memory", model=model, seq=seq, methods=methods, training=unless(training, "full"), offload=unless(offload, "host"),
        chunk_size=unless(chunk_size, "auto"), layers=layers,
    )  # fmt: skip
    lengths, chosen = numbers_in("--seq", seq), methods.split(",")
    measure = partial(
        measure_memory, model=model, lengths=lengths, methods=chosen, layers=layers, training=training,
        offload=offload, chunk_size=parse_count("chunk_size", chunk_size, "tokens"), command=command,
    )  # fmt: skip
    done = run_steps(measure, out, cells=len(chosen) * len(lengths), resume=resume)
    for method in dict.fromkeys(record.method for record in done):
        slope = slope_bytes([record for record in done if record.method == method])
        if slope is not None:
            Console().print(f"{method}: {slope / 1e3:.1f} KB of device memory a token")


def bench_partition(
    model: Annotated[str, typer.Option(help="A preset: a published shape, with random weights.")] = "qwen3-4b",
    seq: Annotated[int, typer.Option(min=1, help="Tokens of the sequence.")] = 24_000,
    chunk_sizes: Annotated[
        str, typer.Option(help="Tokens that a layer processes at a time, separated by commas.")
    ] = "500,1000,2000,5000,8000,24000",
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "partition.jsonl",
) -> None:
    """Measure time and memory of a step against the chunk size; layers keep their inputs, on the device.

    **Examples**

    `python -m benchmarks partition --model qwen3-4b --seq 24000 --chunk-sizes 500,1000,2000,8000`
    """
    from benchmarks.cells import run_steps
    from benchmarks.lengths import measure_partitions

    command = command_line("partition", model=model, seq=seq, chunk_sizes=chunk_sizes, runs=runs)
    sizes = numbers_in("--chunk-sizes", chunk_sizes)
    measure = partial(measure_partitions, model=model, length=seq, chunk_sizes=sizes, runs=runs, command=command)
    run_steps(measure, out, cells=len(sizes), resume=resume)


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
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "max_length.jsonl",
) -> None:
    """Run a step of a given length and say whether it fits a card.

    **Examples**

    `python -m benchmarks max-length --model qwen3-8b --seq 400000`

    `python -m benchmarks max-length --objective dpo --factor 2.0`

    `python -m benchmarks max-length --model gemma-3-1b --objective grpo`
    """
    from benchmarks import lengths
    from benchmarks.cells import run_steps

    if seq is not None:
        refuse_unread(context, "with --seq", "objective", "factor", "offload", "layers", "card", "gpu_memory")
        model = model or "qwen3-8b"
        command = command_line("max-length", model=model, seq=seq)
        measure = partial(lengths.measure_longest, model=model, length=seq, command=command)
        run_steps(measure, out, cells=1, resume=resume)
        return
    chosen = lengths.cells(objective, model=model, card=card)
    if layers is not None:
        chosen = [replace(cell, layers=layers) for cell in chosen]
    gpu_memory = gpu_memory or lengths.CARDS[card]
    command = command_line(
        "max-length", objective=objective, factor=factor, offload=offload, model=model, card=unless(card, "80GiB"), layers=layers,
        gpu_memory=gpu_memory,
    )  # fmt: skip
    measure = partial(
        lengths.measure_cells, chosen, factor=factor, offload=offload, card_bytes=parse_bytes(gpu_memory), command=command
    )
    run_steps(measure, out, cells=len(chosen), resume=resume)


def bench_predicted(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A preset; one configuration then. Without it, twelve of them.")] = None,
    training: Annotated[str, typer.Option(help="With --model: full or lora.")] = "full",
    offload: Annotated[str, typer.Option(help="With --model: as for streamgrad.enable.")] = "none",
    gpu_memory: Annotated[str, typer.Option(help="With --model: what the process may hold.")] = "24GiB",
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "predicted.jsonl",
) -> None:
    """Run a step below the longest sequence that `streamgrad plan` predicts, and one above, and say whether it is the longest.

    **Examples**

    `python -m benchmarks predicted`

    `python -m benchmarks predicted --model qwen3-4b --training lora --gpu-memory 16GiB`
    """
    from benchmarks.cells import run_steps
    from benchmarks.predicted import CONFIGURATIONS, Configuration

    if model is not None:
        configuration = Configuration(model, training, gpu_memory, offload)
        run_steps(configuration.measure, out, cells=2, resume=resume)
        return
    refuse_unread(context, "without --model", "training", "offload", "gpu_memory")
    for configuration in CONFIGURATIONS:
        run_alone(configuration.command, out, resume=resume)
