"""The list of commands. Each is in `streamgrad.cli.<name>`, which is imported when the command runs."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import streamgrad

# What `--help` says about each command, whose own `--help` begins with the same line.
COMMANDS = {
    "plan": "Show the memory and time that a training step will need, from the configuration alone, without weights or a GPU.",
    "check": "Check that gradients are exact for this class of model on this machine: the paper's table of gradient precision.",
    "train": "Train with TRL's trainers, streamed; flags and YAML are those of TRL's command line.",
    "profile": "Show where the memory of a training step goes, with gradient checkpointing and with streaming.",
    "bench": "Time a training step of your model on this machine: gradient checkpointing and streaming side by side.",
    "demo": "Train a small model twice, with ordinary backpropagation and streamed, and compare gradients, losses and memory.",
    "env": "Print versions, devices, memory, and which attention kernels work here.",
}

app = typer.Typer(
    help="Exact gradients of causal language models at sequence lengths that ordinary backpropagation cannot hold.\n\n"
    "Exits with 0 when a command has done its work, with 1 and one line that says why when it cannot or when a check fails, and "
    "with 2 for options that do not exist or cannot be read.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Examples: `python -m streamgrad demo` or `python -m streamgrad plan qwen3-8b --max`",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"streamgrad {streamgrad.__version__} (torch {metadata.version('torch')})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions.")] = False,
) -> None:
    pass


class _Later(TyperCommand):
    """A stand-in for a command that takes seconds to import, which it imports when the command runs."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        assert self.name is not None
        return loaded(self.name).make_context(info_name, args, parent=parent, **extra)


for _name, _help in COMMANDS.items():
    app.command(_name, cls=_Later, help=_help)(lambda: None)


def loaded(name: str) -> Any:
    """Return the command `streamgrad.cli.<name>.<name>`, which is a function, or a Typer with commands of its own."""
    found = getattr(importlib.import_module(f"streamgrad.cli.{name}"), name)
    whole = typer.Typer(rich_markup_mode=app.rich_markup_mode)
    whole.callback()(options)  # makes it a group, even of one command
    if isinstance(found, typer.Typer):
        whole.add_typer(found, name=name)
    else:
        whole.command(name)(found)
    return typer.main.get_group(whole).commands[name]
