"""The commands and their options; what they do is in the modules they call."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

import streamgrad
from streamgrad.cli import demo as demo_command
from streamgrad.cli import env as env_command
from streamgrad.cli.bench import bench
from streamgrad.cli.check import check
from streamgrad.cli.plan import plan
from streamgrad.cli.profile import profile
from streamgrad.cli.train import train

app = typer.Typer(
    help="Exact gradients of causal language models at sequence lengths that ordinary backpropagation cannot hold.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Examples: `python -m streamgrad demo` or `python -m streamgrad bench linear`",
)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.command()(plan)
app.command()(check)
app.command()(profile)


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


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="The same as one JSON object.")] = False) -> None:
    """Versions, devices, memory, and which attention kernels work here; each is tried on a small chunk of every kind of batch.

    **Examples**

    `python -m streamgrad env`

    `python -m streamgrad env --json`
    """
    found = env_command.environment()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        env_command.print_environment(found, Console())
