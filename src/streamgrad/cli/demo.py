"""The options of `streamgrad demo`. The work is in `demo_run`, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from streamgrad.cli.outputs import writable_file


def demo(
    out: Annotated[Path, typer.Option(help="Path of the plot.", callback=writable_file)] = Path("out/demo.png"),
    memory_image: Annotated[
        Path | None, typer.Option(help="Also save the memory half of the plot alone.", callback=writable_file)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take ten seconds: fewer steps, shorter sequences.")] = False,
) -> None:
    """Train a small model twice, with ordinary backpropagation and streamed, and compare gradients, losses and memory.

    Needs no download and no GPU. Exits with 1 if the gradients differ.

    **Examples**

    `python -m streamgrad demo`

    `python -m streamgrad demo --quick --out /tmp/demo.png`
    """
    console = Console()
    with console.status("Loading torch and transformers ..."):
        from streamgrad.cli.demo_run import FULL, QUICK, run

    run(QUICK if quick else FULL, out=out, memory_image=memory_image, console=console)
