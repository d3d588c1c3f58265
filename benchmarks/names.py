"""What the command line needs before anything is measured: names of methods and files, and commands as text and as processes."""

from __future__ import annotations

import subprocess
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from streamgrad.cli.outputs import writable_file

# In the order in which they run: Liger patches transformers for the whole process, so its kernels come after everything else, and
# its fused loss last. "nockpt" keeps everything, "compile" compiles layers one by one, "sac" checkpoints selectively, "host"
# keeps weights on the host.
METHODS = (
    "hf", "hf-nockpt", "hf-compile", "hf-compile-nockpt", "hf-sac", "mst",
    "streamgrad", "streamgrad-compile", "streamgrad-fsdp2", "streamgrad-fsdp2-host", "streamgrad-zero3",
    "streamgrad-liger",
    "liger", "liger-offload", "liger-nockpt",
)  # fmt: skip


class Flash(StrEnum):
    """What torch's flash operators run."""

    FA2 = "FA2"
    FA3 = "FA3"
    FA4 = "FA4"


WITH_FLASH = typer.Option(help="What torch's flash operators run, for all methods; FA2 is its own.")

RESULTS = Path("benchmarks/results")
# Where rows go unless --out says otherwise: the published records are under version control.
MEASURED = Path("out/benchmarks")
ROWS_FILE = typer.Option(
    help="The JSON lines file that rows are appended to; benchmarks/results has the published ones.", callback=writable_file
)
REPORT = Path("benchmarks/REPORT.md")
RESUME = "Leave out what the file has from the same command, on this device, with these versions."

COMMAND = "python -m benchmarks"
# What the same commands were called when the first records were made.
EARLIER_COMMAND = "python -m streamgrad bench"


def command_line(name: str, **options: Any) -> str:
    """Return the command that makes a record again: `python -m benchmarks step --model qwen3-4b --kernels`.

    An option that is None or False is left out. One that is True has no value.
    """
    words = [COMMAND, name]
    for option, value in options.items():
        if value is not None and value is not False:
            words.append(f"--{option.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return " ".join(words)


def typed_command() -> str:
    """Return the command as it was typed, without the file that rows went to."""
    words = [COMMAND, *sys.argv[1:]]
    if "--out" in words:
        place = words.index("--out")
        words = words[:place] + words[place + 2 :]
    return " ".join(words)


def unless(value: Any, default: Any) -> Any:
    """Return None for a value that is the default's, so that `command_line` leaves it out."""
    return None if value == default else value


def run_alone(command: str, out: Path, *, resume: bool) -> None:
    """Run a benchmark in a process of its own, so that it is not measured beside what another has left; end if it fails."""
    arguments = [*command.split()[1:], "--out", str(out), *(["--resume"] if resume else [])]
    status = subprocess.run([sys.executable, *arguments], check=False).returncode
    if status:
        raise typer.Exit(status)


def refuse_unread(context: typer.Context, when: str, *names: str) -> None:
    """Raise for an option that was given and is not read."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise ValueError(f"--{name.replace('_', '-')} has no effect {when}. Leave one of the two out.")
