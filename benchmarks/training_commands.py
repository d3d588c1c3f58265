"""Commands that measure training with its optimizer: runs of many steps, and single steps that fill a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.names import MEASURED, METHODS, RESUME, ROWS_FILE, command_line, run_alone, unless

# What measures is imported in each command, so that `--help` need not wait for it.
_DEVICE = typer.Option(help="cuda or cpu.", show_default="cuda if there is one, else cpu")


def bench_run(
    model: Annotated[
        list[str] | None,
        typer.Option(help="preset:full or preset:lora, several times.", show_default="qwen3-4b:full, qwen3-8b:lora"),
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option(help=f"Some of {', '.join(METHODS)}; several times.", show_default="streamgrad, liger")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of AdamW.")] = 30,
    mean: Annotated[int, typer.Option(min=2, help="Mean tokens of a sequence.")] = 10_000,
    longest: Annotated[int, typer.Option(min=2, help="Longer sequences are cut to this.")] = 48_000,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the models.", show_default="all")] = None,
    device: Annotated[str | None, _DEVICE] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "run.jsonl",
) -> None:
    """Measure a run of training on sequences of ever different lengths: tokens a second, its first step included.

    Every method runs in a process of its own, on the same weights and tokens, with the same fused AdamW.

    **Examples**

    `python -m benchmarks run`

    `python -m benchmarks run --model qwen3-4b:full --method streamgrad --method liger-nockpt --steps 10`
    """
    models, methods = model or ["qwen3-4b:full", "qwen3-8b:lora"], method or ["streamgrad", "liger"]
    for name in models:
        if name.partition(":")[2] not in ("full", "lora"):
            raise ValueError(f"--model must be preset:full or preset:lora, such as qwen3-4b:full, got {name!r}.")
    for name in methods:
        if name not in METHODS:
            raise ValueError(f"--method must be one of {', '.join(METHODS)}, got {name!r}.")
    same = {
        "steps": unless(steps, 30), "mean": unless(mean, 10_000), "longest": unless(longest, 48_000), "layers": layers,
        "device": device,
    }  # fmt: skip
    pairs = [(one, other) for one in models for other in methods]
    if len(pairs) > 1:
        for one, other in pairs:
            run_alone(command_line("run", model=one, method=other, **same), out, resume=resume)
        return
    from benchmarks.records import Session, append_records, rows_in
    from benchmarks.run import lengths_of_run, measure_run
    from streamgrad.cli.chosen_device import chosen_device

    (preset, _, training), console = models[0].partition(":"), Console(highlight=False)
    console.print(f"{models[0]} {methods[0]}", soft_wrap=True)
    record = measure_run(
        model=preset, training=training, method=methods[0], lengths=lengths_of_run(steps, mean, longest), layers=layers,
        device=chosen_device(device, one_thread=False), command=command_line("run", model=models[0], method=methods[0], **same),
        session=Session(rows_in(out) if resume else (), lambda told: console.print(told, soft_wrap=True)),
    )  # fmt: skip
    if record is None:
        console.print("measured before", soft_wrap=True)
        return
    append_records(out, [record])
    console.print(
        f"{models[0]} {methods[0]}: {record.tokens_per_second:,.0f} tokens/s, {record.later_tokens_per_second or 0:,.0f} without "
        f"the first step, {record.out_of_memory} of {steps} steps out of memory, peak {(record.peak_bytes or 0) / 1e9:.1f} GB",
        soft_wrap=True,
    )
