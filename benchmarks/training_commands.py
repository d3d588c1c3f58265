"""Commands that measure training with its optimizer: runs of many steps, and single steps that fill a card."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks.names import (
    MEASURED,
    METHODS,
    RESULTS,
    RESUME,
    ROWS_FILE,
    WITH_FLASH,
    Flash,
    command_line,
    refuse_unread,
    run_alone,
    unless,
)

if TYPE_CHECKING:
    from benchmarks.train_step import TrainingCase, TrainStepRecord

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
    settle: Annotated[
        bool, typer.Option("--settle", help="Run all steps twice more, and record the last time of each: what new lengths cost.")
    ] = False,
    flash: Annotated[Flash, WITH_FLASH] = Flash.FA2,
    device: Annotated[str | None, _DEVICE] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "run.jsonl",
) -> None:
    """Measure a run of training on sequences of ever different lengths: tokens a second, its first step included.

    Every method runs in a process of its own, on the same weights and tokens, with the same fused AdamW.

    **Examples**

    `python -m benchmarks run`

    `python -m benchmarks run --model qwen3-4b:full --method streamgrad --method liger-nockpt --steps 10`

    `python -m benchmarks run --model qwen3-4b:full --method streamgrad --steps 60 --settle`
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
        "settle": settle, "flash": unless(flash, Flash.FA2), "device": device,
    }  # fmt: skip
    pairs = [(one, other) for one in models for other in methods]
    if len(pairs) > 1:
        for one, other in pairs:
            run_alone(command_line("run", model=one, method=other, **same), out, resume=resume)
        return
    from benchmarks.peers import use_flash
    from benchmarks.records import Session, append_records, rows_in
    from benchmarks.run import lengths_of_run, measure_run
    from streamgrad.cli.chosen_device import chosen_device

    use_flash(flash)
    (preset, _, training), console = models[0].partition(":"), Console(highlight=False)
    console.print(f"{models[0]} {methods[0]}", soft_wrap=True)
    record = measure_run(
        model=preset, training=training, method=methods[0], lengths=lengths_of_run(steps, mean, longest), layers=layers,
        settles=settle,
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


def bench_train_step(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help="A preset. Without it, eleven small configurations.")] = None,
    tokens: Annotated[str, typer.Option(help="Tokens of the sequence; several lengths are separated by commas.")] = "32768",
    optimizer: Annotated[
        str, typer.Option(help="none, adamw, adamw8bit, in-backward, adamw8bit-in-backward, or host.")
    ] = "in-backward",
    training: Annotated[str, typer.Option(help="full, or lora of rank 32.")] = "full",
    objective: Annotated[str, typer.Option(help="sft, dpo (a pair) or grpo (8 completions).")] = "sft",
    limit: Annotated[str | None, typer.Option(help="Device memory of the process, such as 79GiB.", show_default="all")] = None,
    host: Annotated[str | None, typer.Option(help="Host memory to plan with.", show_default="what is free")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Build only the last layers, with ballast for the others.", show_default="all")
    ] = None,
    keep: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    offload: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    recompute_layers: Annotated[str, typer.Option(help="As for streamgrad.enable.")] = "auto",
    device: Annotated[str | None, _DEVICE] = None,
    resume: Annotated[bool, typer.Option("--resume", help=RESUME)] = False,
    out: Annotated[Path, ROWS_FILE] = MEASURED / "train_step.jsonl",
) -> None:
    """Measure a step with its optimizer, and print the predicted peak beside the measured one.

    A short step comes first, in which the optimizer makes its states; then one step is timed.

    **Examples**

    `python -m benchmarks train-step`

    `python -m benchmarks train-step --model qwen3-8b --tokens 200000 --limit 79GiB`

    `python -m benchmarks train-step --model qwen3-8b --tokens 600000 --limit 79GiB --layers 2`
    """
    from benchmarks.train_step import CONFIGURATIONS, TrainingCase
    from streamgrad.cli.bench import numbers_in
    from streamgrad.config import parse_count

    choices = {
        "optimizer": optimizer, "training": training, "objective": objective, "limit": limit, "host": host, "layers": layers,
        "keep": keep, "offload": offload, "recompute_layers": recompute_layers,
    }  # fmt: skip
    cases = list(CONFIGURATIONS)
    if model is None:
        refuse_unread(context, "without --model", "tokens", *choices)
    else:
        changed = choices | {"recompute_layers": parse_count("recompute_layers", recompute_layers, "layers")}
        cases = [TrainingCase(model=model, tokens=count, **changed) for count in numbers_in("--tokens", tokens)]
    given = {name: value for name, value in choices.items() if context.get_parameter_source(name).name != "DEFAULT"}
    command = command_line("train-step", model=model, tokens=tokens if model else None, **given)
    _run_cases(cases, command, out, device=device, resume=resume)


def _run_cases(cases: Sequence[TrainingCase], command: str, out: Path, *, device: str | None, resume: bool) -> None:
    """Measure cases, keep each record as it comes, and print how far a case is, with the seconds since the start."""
    from benchmarks.records import Session, append_records, rows_in
    from benchmarks.train_step import measure_cases
    from streamgrad.cli.chosen_device import chosen_device

    console, start = Console(highlight=False), time.monotonic()

    def tell(stage: str) -> None:
        console.print(f"  {time.monotonic() - start:5.0f} s: {stage}", soft_wrap=True)

    session = Session(rows_in(out) if resume else (), tell)
    for record in measure_cases(cases, command=command, device=chosen_device(device, one_thread=False), session=session):
        append_records(out, [record])
        console.print(_train_step_line(record), soft_wrap=True)
    console.print(f"Records appended to {out}", soft_wrap=True)


def _train_step_line(record: TrainStepRecord) -> str:
    name = f"{record.model} {record.training} {record.objective} {record.optimizer}, {record.layers} layers, {record.seq_len:,}"
    if record.step_ms is None or record.peak_bytes is None:
        return f"{name}: {record.error}; predicted {record.predicted_bytes / 2**30:.2f} GiB"
    return (
        f"{name}: {record.step_ms / 1e3:,.1f} s, peak {record.peak_bytes / 2**30:.2f} GiB, predicted "
        f"{record.predicted_bytes / 2**30:.2f} ({record.predicted_bytes / record.peak_bytes - 1:+.1%}), ballast "
        f"{record.ballast_bytes / 2**30:.1f} and {record.host_ballast_bytes / 2**30:.1f} on the host, where streamgrad has "
        f"{record.host_bytes / 2**30:.1f}; {record.policy['plan'].partition('; about')[0]}"
    )


def bench_longest(
    confirm: Annotated[
        float | None, typer.Option(help="Run steps at 97 % of predictions that no record confirms, of at most so many seconds.")
    ] = None,
    predictions: Annotated[Path, typer.Option(help="With --confirm: the file of predictions.")] = RESULTS / "longest.jsonl",
    objective: Annotated[str | None, typer.Option(help="sft, dpo or grpo.", show_default="all")] = None,
    offload: Annotated[str | None, typer.Option(help="none or auto, with host memory.", show_default="both")] = None,
    device: Annotated[str | None, _DEVICE] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --confirm: " + RESUME)] = False,
    out: Annotated[Path | None, ROWS_FILE] = None,
) -> None:
    """Predict the longest sequences of the paper's table, in 79 GiB, which needs no GPU; or confirm predictions by steps.

    **Examples**

    `python -m benchmarks longest --objective sft --offload none`

    `python -m benchmarks longest --confirm 60`
    """
    from benchmarks.lengths import cells
    from benchmarks.longest import predict, predictions_in
    from benchmarks.records import append_records, rows_in

    console = Console(highlight=False)
    objectives = [objective] if objective else ["sft", "dpo", "grpo"]
    places = [offload] if offload else ["none", "auto"]
    if confirm is None:
        for name, place in ((name, place) for name in objectives for place in places):
            for record in predict(cells(name), place, command_line("longest", objective=name, offload=place)):
                append_records(out or MEASURED / "longest.jsonl", [record])
                console.print(
                    f"{name} {place} {record.model} {record.training}: {record.tokens:,} tokens; a step at 97 % with "
                    f"{record.layers} layers takes {record.seconds:,.0f} s; {record.plan}", soft_wrap=True,
                )  # fmt: skip
        return
    rows = [row for row in rows_in(predictions) if row["objective"] in objectives and row["offload"] in places]
    steps = rows_in(predictions.with_name("train_step.jsonl"))
    chosen = [each.case() for each in predictions_in(rows) if each.seconds <= confirm and each.confirmed_by(steps) is None]
    if not chosen:
        console.print(f"Records confirm every prediction whose step takes at most {confirm:g} s.", soft_wrap=True)
        return
    command = command_line("longest", confirm=f"{confirm:g}", objective=objective, offload=offload)
    _run_cases(chosen, command, out or MEASURED / "train_step.jsonl", device=device, resume=resume)
