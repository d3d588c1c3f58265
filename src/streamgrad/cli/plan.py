"""`streamgrad plan`: options and tables; the arithmetic is in `streamgrad.hf.estimates.estimate`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from streamgrad.cli.outputs import writable_file
from streamgrad.cli.plan_picture import draw
from streamgrad.cli.plan_tables import group_table, lengths_table, plan_table
from streamgrad.config import KEEP_POLICIES, OFFLOAD_PLACES, parse_count
from streamgrad.hf.estimates import options as choice
from streamgrad.hf.estimates.choices import choices
from streamgrad.hf.estimates.estimate import Estimator, estimator_of, reports_of
from streamgrad.hf.estimates.group import GroupReport, estimate_group
from streamgrad.hf.estimates.remedies import as_flags, why_nothing_fits
from streamgrad.hf.estimates.report import Report
from streamgrad.memory.cards import GPUS
from streamgrad.memory.engines import ENGINES
from streamgrad.memory.seconds import Rates
from streamgrad.memory.this_machine import machine


def _one_of(choices: tuple[str, ...], text: str) -> Any:
    return typer.Option(help=f"{text}: {', '.join(choices)}.")


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
    gpu: Annotated[str | None, typer.Option(help=f"The card: {', '.join(GPUS)}.", show_default="this machine's")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory of one GPU: 24, 24G, 24GiB.", show_default="the card's")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory of one machine.", show_default="this machine's, or 256GiB")
    ] = None,
    method: Annotated[str, _one_of(choice.METHODS, "What is trained")] = "full",
    lora_rank: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 16, help="Rank of the adapters on every linear map (lora).", show_default="32"),
    ] = None,
    quantization: Annotated[str, _one_of(choice.QUANTIZATIONS, "What bitsandbytes keeps linear maps in (lora)")] = "none",
    objective: Annotated[str, _one_of(choice.OBJECTIVES, "The loss")] = "sft",
    optimizer: Annotated[
        str, _one_of(choice.OPTIMIZERS, "The optimizer; in-backward: AdamW that frees gradients, host: with them in host memory")
    ] = "adamw",
    weights: Annotated[str, _one_of(choice.WEIGHT_PLACES, "Where the layers' weights wait")] = "device",
    engine: Annotated[str, _one_of(ENGINES, "What holds weights and gradients")] = "none",
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs, with an engine.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1, help="Number of GPUs in one machine.")] = 8,
    sp: Annotated[int, typer.Option(min=1, help="Number of GPUs that share each sequence.")] = 1,
    ring: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many of the --sp GPUs have the same heads, and gather keys.", show_default="as few as work"
        ),
    ] = None,
    master_dtype: Annotated[str, _one_of(choice.MASTER_DTYPES, "Dtype of fsdp2's trained weights; auto: float32")] = "auto",
    dtype: Annotated[str, _one_of(choice.DTYPES, "Dtype of weights and activations")] = "bfloat16",
    keep: Annotated[str, _one_of(KEEP_POLICIES, "As for streamgrad.enable")] = "auto",
    offload: Annotated[str, _one_of(OFFLOAD_PLACES, "As for streamgrad.enable")] = "auto",
    recompute_layers: Annotated[str, typer.Option(help="As for streamgrad.enable: auto, or a number of layers.")] = "auto",
    gemm_tflops: Annotated[float | None, typer.Option(help="Rate of matrix products.", show_default="the card's")] = None,
    attention_tflops: Annotated[
        tuple[float, float] | None,
        typer.Option(help="Rates of attention, forward and backward.", show_default="the card's"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also draw the report into this file.", callback=writable_file)] = None,
) -> None:
    """Show the memory and time that a training step will need, from the configuration alone, without weights or a GPU.

    Exits with 0 whether the step fits or not, and with 1 for a model that cannot be streamed, an option that makes no sense, or
    --max where nothing fits.

    **Examples**

    `python -m streamgrad plan Qwen3-8B --seq-len 65536 --gpu h100 --optimizer in-backward`

    `python -m streamgrad plan qwen3-8b --max --method lora --quantization nf4 --gpu rtx4090 --host-memory 128GiB`

    `python -m streamgrad plan ./my-model --seq-len 32768,65536 --engine zero3 --gpus 8 --json`

    `python -m streamgrad plan qwen3-32b --max --gpu h100 --engine zero3 --gpus 64 --sp 8`

    `python -m streamgrad plan llama-3.1-8b --seq-len 15000000 --gpu h100 --engine fsdp2 --gpus 64 --sp 64 --ring 8`

    `python -m streamgrad plan qwen3-4b --objective grpo --prompt-tokens 16000 --completion-tokens 2000 --group 8`
    """
    place = machine(
        gpu=gpu,
        gpu_bytes=choice.memory_bytes("--gpu-memory", gpu_memory),
        host_bytes=choice.memory_bytes("--host-memory", host_memory),
    )
    place = replace(place, rates=_rates(place.rates, gemm_tflops, attention_tflops))
    options = choice.Options(
        batch=batch, method=method, lora_rank=lora_rank, quantization=quantization, objective=objective, optimizer=optimizer,
        weights=weights, engine=engine, gpus=gpus, gpus_per_node=gpus_per_node, sp=sp, ring=ring, keep=keep,
        offload=offload, recompute_layers=parse_count("--recompute-layers", recompute_layers, "layers"),
        master_dtype=choice.full_dtype(master_dtype), dtype=choice.full_dtype(dtype), machine=place,
    )  # fmt: skip
    if (prompt_tokens, completion_tokens, group) != (None, None, None):
        others = {"--seq-len": seq_len, "--max": longest or None, "--out": out}
        asked = _group(prompt_tokens, completion_tokens, group, others)
        _print_group(estimate_group(model, options=options, **asked), as_json=as_json)
        return
    lengths = _lengths(seq_len, longest=longest, drawn=out is not None)
    with Console(stderr=True).status("Planning; what is not a preset needs torch, which takes seconds to load ..."):
        estimator = estimator_of(model, options)
        reports, saving = reports_of(model, estimator, lengths, as_flags), choices(estimator)
    if out is not None:
        draw(reports[0], out)
    if as_json:
        rows = [report.to_dict() | {"choices": [asdict(each) for each in saving]} for report in reports]
        typer.echo(json.dumps(rows if len(rows) > 1 else rows[0], indent=2))
    else:
        _print(reports, estimator, list(map(str, saving)), out)


def _rates(own: Rates, gemm: float | None, attention: tuple[float, float] | None) -> Rates:
    """Return the card's rates, with those that are given in their place."""
    given: dict[str, float] = {} if gemm is None else {"gemm": 1e12 * gemm}
    if attention is not None:
        given |= {"attention_forward": 1e12 * attention[0], "attention_backward": 1e12 * attention[1]}
    return replace(own, **given)


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


def _print(reports: list[Report], estimator: Estimator, saving: list[str], picture: Path | None) -> None:
    """Print the table of one or of several lengths, the plans, what other choices would save, and the assumptions."""
    console = Console()
    console.print(plan_table(reports[0]) if len(reports) == 1 else lengths_table(reports))
    too_long = [report for report in reports if not report.streamed.fits]
    if too_long:
        console.print(_what_would_fit(too_long[0], estimator), style="bold", soft_wrap=True)
    for report in reports:
        name = "Plan" if report.streamed.fits else "Smallest plan"
        tokens = f" of {report.seq_len:,} tokens" if len(reports) > 1 else ""
        console.print(f"{name}{tokens}: {report.streamed.plan}", soft_wrap=True)
    for line in saving:
        console.print(f"  {line}", soft_wrap=True)
    for line in reports[0].assumptions:
        console.print(f"  [dim]- {line}[/dim]", soft_wrap=True)
    if picture is not None:
        console.print(f"Picture: {picture}", soft_wrap=True)


def _what_would_fit(report: Report, estimator: Estimator) -> str:
    longest = report.streamed.longest_tokens
    if not longest:
        return f"{report.seq_len:,} tokens do not fit: {why_nothing_fits(estimator, as_flags)}"
    return f"{report.seq_len:,} tokens do not fit. Up to {longest:,} tokens would, as --max shows."
