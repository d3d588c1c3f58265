"""The options of `streamgrad env`. The work is in `env_report`, which takes seconds to import."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console


def env(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False) -> None:
    """Print versions, devices, memory, and which attention kernels work here.

    Each kernel is tried on a small chunk of every kind of batch. Exits with 0.

    **Examples**

    `python -m streamgrad env`

    `python -m streamgrad env --json`
    """
    with Console(stderr=True).status("Loading torch and trying kernels ..."):
        from streamgrad.cli.env_report import environment, print_environment

        found = environment()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        print_environment(found, Console())
