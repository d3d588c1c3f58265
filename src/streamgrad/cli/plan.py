"""`streamgrad plan`: options and the table; the arithmetic is in `streamgrad.plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from streamgrad.cli.plan_picture import draw
from streamgrad.config import KEEP_POLICIES, OFFLOAD_PLACES
from streamgrad.hf import estimate as estimates
from streamgrad.memory.costs import COMPONENTS
from streamgrad.memory.engines import ENGINES
from streamgrad.memory.seconds import Rates


def _one_of(choices: tuple[str, ...], text: str) -> Any:
    return typer.Option(help=f"{text}: {', '.join(choices)}.")


_RATES = Rates()


def plan(
    model: Annotated[str, typer.Argument(help="A preset (qwen3-8b), a directory with a config.json, or a name on the hub.")],
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens of each sequence.")] = None,
    longest: Annotated[bool, typer.Option("--max", help="Instead of --seq-len: the longest sequence that fits.")] = False,
    batch: Annotated[int, typer.Option(min=1, help="On each GPU: sequences, pairs (dpo) or completions (grpo).")] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Of one GPU.")] = "80GiB",
    host_memory: Annotated[str, typer.Option(help="Of the machine that all GPUs are in.")] = "256GiB",
    method: Annotated[str, _one_of(estimates.METHODS, "What is trained")] = "full",
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 16, help="With --method lora: of adapters on every linear map.", show_default="32"),
    ] = None,
    objective: Annotated[str, _one_of(estimates.OBJECTIVES, "The loss")] = "sft",
    optimizer: Annotated[str, _one_of(estimates.OPTIMIZERS, "Whose state is on the GPU")] = "adamw",
    engine: Annotated[str, _one_of(ENGINES, "What holds weights and gradients")] = "none",
    gpus: Annotated[int, typer.Option(min=1, help="With an engine.")] = 1,
    dtype: Annotated[str, _one_of(estimates.DTYPES, "Of weights and activations")] = "bfloat16",
    keep: Annotated[str, _one_of(KEEP_POLICIES, "As for streamgrad.enable")] = "auto",
    offload: Annotated[str, _one_of(OFFLOAD_PLACES, "As for streamgrad.enable")] = "auto",
    gemm_tflops: Annotated[float, typer.Option(help="Rate of matrix products.")] = _RATES.gemm / 1e12,
    attention_tflops: Annotated[tuple[float, float], typer.Option(help="Rates of attention, forward and backward.")] = (
        _RATES.attention_forward / 1e12,
        _RATES.attention_backward / 1e12,
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also draw the report into this file.")] = None,
) -> None:
    """What a training step will hold and take, before it is run: from the configuration alone, without weights or a GPU.

    Exits with 0 whether the step fits or not, and with 1 for a model that cannot be streamed.

    **Examples**

    `python -m streamgrad plan qwen3-8b --seq-len 65536 --gpu-memory 80GiB --optimizer none`

    `python -m streamgrad plan qwen3-8b --max --method lora --gpu-memory 24GiB --host-memory 128GiB`

    `python -m streamgrad plan ./my-model --seq-len 32768 --engine zero3 --gpus 8 --json`
    """
    if longest == (seq_len is not None):
        raise ValueError("pass either --seq-len with a number of tokens, or --max for the longest sequence that fits.")
    report = estimates.estimate(
        model,
        seq_len,
        batch=batch,
        method=method,
        lora_rank=lora_rank,
        objective=objective,
        optimizer=optimizer,
        engine=engine,
        gpus=gpus,
        dtype=dtype,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        keep=keep,
        offload=offload,
        rates=Rates(1e12 * gemm_tflops, 1e12 * attention_tflops[0], 1e12 * attention_tflops[1]),
    )
    if out is not None:
        draw(report, out)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
        return
    console = Console()
    console.print(plan_table(report))
    if not report.streamed.fits:
        console.print(_what_would_fit(report), style="bold", soft_wrap=True)
    if report.streamed.plan is not None:
        console.print(f"{'Plan' if report.streamed.fits else 'Smallest plan'}: {report.streamed.plan}", soft_wrap=True)
    for line in report.assumptions:
        console.print(f"  [dim]- {line}[/dim]", soft_wrap=True)
    if out is not None:
        console.print(f"Picture: {out}", soft_wrap=True)


def plan_table(report: estimates.Report) -> Table:
    """A row per component that is there, then totals, time and the longest sequence."""
    streamed, plain = report.streamed, report.checkpointing
    table = Table(title=f"{report.title}, at the worst moment", title_justify="left")
    table.add_column("")
    columns = (streamed.device_bytes, streamed.host_bytes, plain.device_bytes)
    for name in ("streamgrad, GPU", "streamgrad, host", "checkpointing, GPU"):
        table.add_column(name, justify="right")
    for component in COMPONENTS:
        counts = [column.get(component, 0.0) for column in columns]
        if any(counts):
            table.add_row(component, *(_gib(count) for count in counts))
    table.add_section()
    table.add_row("in all", *(_gib(sum(column.values())) for column in columns), style="bold")
    table.add_row("worst moment", streamed.moment, "", plain.moment)
    table.add_row(f"fits {_gib(report.gpu_memory)}", _yes(streamed.fits), "", _yes(plain.fits))
    table.add_row("longest sequence", f"{streamed.longest_tokens:,}", "", f"{plain.longest_tokens:,}")
    table.add_row("step, at least", f"{streamed.seconds.total:,.1f} s", "", f"{plain.seconds.total:,.1f} s")
    return table


def _what_would_fit(report: estimates.Report) -> str:
    longest, parts = report.streamed.longest_tokens, report.streamed.device_bytes
    if longest:
        return f"This does not fit. Up to {longest:,} tokens would, as --max shows."
    fixed = sum(parts.get(name, 0.0) for name in ("weights", "optimizer state"))
    ways = ["a smaller --lora-rank" if "lora" in report.method else "--method lora"]
    ways += ["--optimizer adamw8bit"] if report.optimizer == "adamw" else []
    ways += ["a smaller --batch"] if report.batch > 1 else []
    ways += ["--engine zero3 with several --gpus" if report.gpus == 1 else "more --gpus", "a larger GPU"]
    return (
        f"No length fits: weights and optimizer state alone take {_gib(fixed)} on each GPU. "
        f"Try {', '.join(ways[:-1])} or {ways[-1]}."
    )


def _gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count else "-"


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"
