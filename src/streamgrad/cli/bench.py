"""Holds the options and the table of `streamgrad bench`; the measuring is in `bench_run`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from streamgrad.hf.presets import check_found

if TYPE_CHECKING:
    from streamgrad.cli.bench_run import Cell


def bench(
    model: Annotated[str, typer.Argument(help="A preset (qwen3-8b), a directory with a config.json, or a name on the hub.")],
    seq_len: Annotated[str, typer.Option(help="Tokens of the one sequence; several lengths are separated by commas.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Run only the model's first layers.", show_default="all")] = None,
    runs: Annotated[int, typer.Option(min=1, help="Timed steps after the warm-up; the median counts.")] = 3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda if there is one, else cpu")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON instead of a table.")] = False,
) -> None:
    """Time a training step of your model on this machine: gradient checkpointing and streaming side by side.

    A step is one forward and backward on random tokens, in bfloat16 on a GPU and in float32 on a CPU. Weights are those of the
    directory, or random ones where only a configuration is there; nothing but that is downloaded. Writes no file. A step that
    runs out of memory says so in its cell. Exits with 0.

    **Examples**

    `python -m streamgrad bench qwen3-8b --seq-len 8192,32768`

    `python -m streamgrad bench ./my-model --seq-len 1024,4096 --layers 2 --device cpu --json`
    """
    lengths = numbers_in("--seq-len", seq_len, least=2)
    check_found(model)
    # Here, so that `--help` and a wrong name need not wait for them.
    with Console(stderr=True).status("Loading torch and transformers ..."):
        from streamgrad.cli.bench_run import device_name, has_weights, measured_model, steps_of
        from streamgrad.cli.chosen_device import chosen_device
        from streamgrad.hf.status import show_messages

    show_messages()  # the plan of each length
    target = chosen_device(device, one_thread=False)
    with Console(stderr=True).status("Building the model ...") as status:
        subject = measured_model(model, layers, target)
        cells: list[Cell] = []
        for length in lengths:
            status.update(f"Measuring {length:,} tokens ...")
            cells += steps_of(subject, length, runs, target)
    facts = {
        "model": model,
        "layers": subject.config.get_text_config(decoder=True).num_hidden_layers,
        "weights": "stored" if has_weights(model) else "random",
        "dtype": str(subject.dtype).removeprefix("torch."),
        "device": device_name(target),
        "runs": runs,
    }
    if as_json:
        typer.echo(json.dumps(facts | {"cells": [asdict(cell) for cell in cells]}, indent=2))
        return
    console = Console()
    title = "Forward + backward: {model}, {weights} weights, layers: {layers}, {dtype}, {device}".format(**facts)
    console.print(title, soft_wrap=True)
    console.print(bench_table(cells))
    console.print("Peaks are counted above the weights; gradients are among them.", soft_wrap=True)


def numbers_in(option: str, text: str, *, least: int = 1) -> list[int]:
    """Return the whole numbers of `6000,12000`."""
    try:
        numbers = [int(number) for number in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ValueError(
            f"{option} must be whole numbers of at least {least}, separated by commas, got {text!r}. Pass some as in 6000,12000."
        )
    return numbers


def bench_table(cells: list[Cell]) -> Table:
    """Return a row per length: the time of each method, then its peak bytes."""
    methods = dict.fromkeys(cell.method for cell in cells)
    table = Table()
    for name in ("tokens", *(f"{method},\n{what}" for what in ("time", "peak") for method in methods)):
        table.add_column(name, justify="right")
    for length in dict.fromkeys(cell.seq_len for cell in cells):
        row = [cell for cell in cells if cell.seq_len == length]
        times = [cell.error or f"{cell.step_ms:,.1f} ms" for cell in row]
        table.add_row(f"{length:,}", *times, *(_mebibytes(cell.peak_bytes) for cell in row))
    return table


def _mebibytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.1f} MiB"
