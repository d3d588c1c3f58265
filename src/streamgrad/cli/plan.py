"""`streamgrad plan`: options and tables; the arithmetic is in `streamgrad.hf.estimate`."""

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
from streamgrad.hf.estimate_group import GroupReport, estimate_group
from streamgrad.memory.costs import COMPONENTS
from streamgrad.memory.engines import ENGINES
from streamgrad.memory.seconds import Rates


def _one_of(choices: tuple[str, ...], text: str) -> Any:
    return typer.Option(help=f"{text}: {', '.join(choices)}.")


_RATES = Rates()


def plan(
    model: Annotated[str, typer.Argument(help="A preset (qwen3-8b), a directory with a config.json, or a name on the hub.")],
    seq_len: Annotated[
        str | None, typer.Option(help="Tokens of each sequence; several lengths, such as 32768,65536, give one table.")
    ] = None,
    longest: Annotated[bool, typer.Option("--max", help="Plan the longest sequence that fits, instead of --seq-len.")] = False,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt, instead of --seq-len (dpo, grpo).")] = None,
    completion_tokens: Annotated[int | None, typer.Option(help="Tokens of each completion of the prompt.")] = None,
    group: Annotated[int | None, typer.Option(help="Completions of each prompt.", show_default="2 for dpo, 8 for grpo")] = None,
    batch: Annotated[
        int,
        typer.Option(min=1, help="Sequences, pairs (dpo) or completions (grpo) on each GPU; with --prompt-tokens, prompts."),
    ] = 1,
    gpu_memory: Annotated[str, typer.Option(help="Memory of one GPU.")] = "80GiB",
    host_memory: Annotated[str, typer.Option(help="Memory of the machine that all GPUs are in.")] = "256GiB",
    method: Annotated[str, _one_of(estimates.METHODS, "What is trained")] = "full",
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 16, help="Rank of the adapters on every linear map (lora).", show_default="32"),
    ] = None,
    quantization: Annotated[str, _one_of(estimates.QUANTIZATIONS, "What bitsandbytes keeps linear maps in (lora)")] = "none",
    objective: Annotated[str, _one_of(estimates.OBJECTIVES, "The loss")] = "sft",
    optimizer: Annotated[str, _one_of(estimates.OPTIMIZERS, "The optimizer whose state is on the GPU")] = "adamw",
    engine: Annotated[str, _one_of(ENGINES, "What holds weights and gradients")] = "none",
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs, with an engine.")] = 1,
    dtype: Annotated[str, _one_of(estimates.DTYPES, "Dtype of weights and activations")] = "bfloat16",
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
    """Show what a training step will hold and take, from the configuration alone, without weights or a GPU.

    Exits with 0 whether the step fits or not, and with 1 for a model that cannot be streamed.

    **Examples**

    `python -m streamgrad plan qwen3-8b --seq-len 65536 --gpu-memory 80GiB --optimizer none`

    `python -m streamgrad plan qwen3-8b --max --method lora --quantization nf4 --gpu-memory 24GiB --host-memory 128GiB`

    `python -m streamgrad plan ./my-model --seq-len 32768,65536 --engine zero3 --gpus 8 --json`

    `python -m streamgrad plan qwen3-4b --objective grpo --prompt-tokens 16000 --completion-tokens 2000 --group 8`
    """
    options = estimates.Options(
        batch=batch, method=method, lora_rank=lora_rank, quantization=quantization, objective=objective, optimizer=optimizer,
        engine=engine, gpus=gpus, dtype=dtype, gpu_memory=gpu_memory, host_memory=host_memory, keep=keep, offload=offload,
        rates=Rates(1e12 * gemm_tflops, 1e12 * attention_tflops[0], 1e12 * attention_tflops[1]),
    )  # fmt: skip
    if (prompt_tokens, completion_tokens, group) != (None, None, None):
        lengths = {"--seq-len": seq_len, "--max": longest or None, "--out": out}
        asked = _group(prompt_tokens, completion_tokens, group, lengths)
        _print_group(estimate_group(model, options=options, **asked), as_json=as_json)
        return
    reports = estimates.estimate_lengths(model, _lengths(seq_len, longest=longest, drawn=out is not None), options)
    if out is not None:
        draw(reports[0], out)
    if as_json:
        rows = [report.to_dict() for report in reports]
        typer.echo(json.dumps(rows if len(rows) > 1 else rows[0], indent=2))
    else:
        _print(reports, out)


def _group(prompt: int | None, completion: int | None, group: int | None, others: dict[str, Any]) -> dict[str, Any]:
    """Return the group that was asked for."""
    if prompt is None or completion is None:
        given = f"--prompt-tokens {prompt}" if completion is None else f"--completion-tokens {completion}"
        given = f"--group {group}" if (prompt, completion) == (None, None) else given
        raise ValueError(f"{given} describes a part of a group. Pass both --prompt-tokens and --completion-tokens.")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} is for sequences of one length, and --prompt-tokens plans a group. Leave one of them out.")
    return {"prompt": prompt, "completion": completion, "group": group}


def _print_group(report: GroupReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
        return
    console = Console()
    console.print(group_table(report))
    for name, outlook in (("prompts once", report.shared), ("prompts in every row", report.separate)):
        console.print(f"{'Plan' if outlook.fits else 'Smallest plan'}, {name}: {outlook.plan}", soft_wrap=True)
    if not report.shared.fits:
        console.print(
            f"It does not fit. Prompts of up to {report.shared.longest_tokens:,} tokens would.", style="bold", soft_wrap=True
        )
    for line in report.assumptions:
        console.print(f"  [dim]- {line}[/dim]", soft_wrap=True)


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
            table.add_row(component, *map(_gib, counts))
    table.add_section()
    table.add_row("in all", *(_gib(outlook.peak_bytes) for outlook in both), style="bold")
    table.add_row("on the host", *(_gib(sum(outlook.host_bytes.values())) for outlook in both))
    table.add_row(f"fits {_gib(report.gpu_memory)}", *(_yes(outlook.fits) for outlook in both))
    table.add_row("longest prompt", *(f"{outlook.longest_tokens:,}" for outlook in both))
    table.add_row("step, at least", *(f"{outlook.seconds.total:,.1f} s" for outlook in both))
    return table


def _lengths(text: str | None, *, longest: bool, drawn: bool) -> list[int | None]:
    """Return the lengths that were asked for; None stands for the longest that fits."""
    if longest == (text is not None):
        raise ValueError("pass either --seq-len with a number of tokens, or --max for the longest sequence that fits.")
    if text is None:
        return [None]
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise ValueError(f"--seq-len must be whole numbers of at least 1, separated by commas, got {text!r}.")
    if drawn and len(words) > 1:
        raise ValueError(f"--out draws one length, got {len(words)}: --seq-len {text}. Leave out --out, or all lengths but one.")
    return [int(word) for word in words]


def _print(reports: list[estimates.Report], picture: Path | None) -> None:
    """Print the table of one or of several lengths, the plans, and the assumptions."""
    console = Console()
    console.print(plan_table(reports[0]) if len(reports) == 1 else lengths_table(reports))
    too_long = [report for report in reports if not report.streamed.fits]
    if too_long:
        console.print(_what_would_fit(too_long[0]), style="bold", soft_wrap=True)
    for report in reports:
        name = "Plan" if report.streamed.fits else "Smallest plan"
        tokens = f" of {report.seq_len:,} tokens" if len(reports) > 1 else ""
        console.print(f"{name}{tokens}: {report.streamed.plan}", soft_wrap=True)
    for line in reports[0].assumptions:
        console.print(f"  [dim]- {line}[/dim]", soft_wrap=True)
    if picture is not None:
        console.print(f"Picture: {picture}", soft_wrap=True)


def plan_table(report: estimates.Report) -> Table:
    """Return a row for each component that is there, then totals, time and the longest sequence."""
    streamed, plain = report.streamed, report.checkpointing
    table = Table(title=f"{report.title}, in the largest phase", title_justify="left")
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
    table.add_row("largest phase", streamed.phase, "", plain.phase)
    table.add_row(f"fits {_gib(report.gpu_memory)}", _yes(streamed.fits), "", _yes(plain.fits))
    table.add_row("longest sequence", f"{streamed.longest_tokens:,}", "", f"{plain.longest_tokens:,}")
    table.add_row("step, at least", f"{streamed.seconds.total:,.1f} s", "", f"{plain.seconds.total:,.1f} s")
    return table


def lengths_table(reports: list[estimates.Report]) -> Table:
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
        table.add_row(f"{name}, GPU", *(_gib(outlook.peak_bytes) for outlook in outlooks), style="bold")
        if any(outlook.host_bytes for outlook in outlooks):
            table.add_row(f"{name}, host", *(_gib(sum(outlook.host_bytes.values())) for outlook in outlooks))
        table.add_row(f"fits {_gib(first.gpu_memory)}", *(_yes(outlook.fits) for outlook in outlooks))
        table.add_row("longest sequence", *(f"{outlook.longest_tokens:,}" for outlook in outlooks))
        table.add_row("step, at least", *(f"{outlook.seconds.total:,.1f} s" for outlook in outlooks))
    return table


def _what_would_fit(report: estimates.Report) -> str:
    longest, parts = report.streamed.longest_tokens, report.streamed.device_bytes
    if longest:
        return f"{report.seq_len:,} tokens do not fit. Up to {longest:,} tokens would, as --max shows."
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
