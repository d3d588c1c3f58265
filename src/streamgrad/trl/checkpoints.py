"""Checkpoints of a trainer: which of them are whole, and from which a run goes on.

The Trainer writes a checkpoint file by file, its own state last. A run that is killed, or whose disk is full, leaves part of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from streamgrad.hf.configs import short_reason


def checkpoint_at(output_dir: str, step: int) -> Path:
    return Path(output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def begin_checkpoint(path: Path) -> None:
    """Remove the state of an older checkpoint in the same place, by which a part of the new one would pass for whole."""
    (path / TRAINER_STATE_NAME).unlink(missing_ok=True)


def missing_from(checkpoint: Path, processes: int) -> str | None:
    """Return the name of a file without which `processes` cannot go on exactly from this checkpoint, or None."""
    ranks = [""] if processes == 1 else [f"_{rank}" for rank in range(processes)]
    for name in (f"rng_state{rank}.pth" for rank in ranks):
        if not (checkpoint / name).is_file():
            return name
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return TRAINER_STATE_NAME
    return None


def last_checkpoint(output_dir: str, processes: int) -> Path | None:
    """Return the whole checkpoint with the most steps."""
    found = {path.name.rpartition("-")[2]: path for path in Path(output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")}
    whole = {int(step): path for step, path in found.items() if step.isdecimal() and missing_from(path, processes) is None}
    return whole[max(whole)] if whole else None


def checkpoint_to_resume(name: str | bool | None, output_dir: str, processes: int) -> str | None:
    """Return the checkpoint that `--resume_from_checkpoint` names: `last`, a directory, or None. Raise if it is not whole."""
    if not name:
        return None
    if str(name).lower() in ("last", "true"):  # True in Python, and what some pass on a command line
        last = last_checkpoint(output_dir, processes)
        if last is None:
            raise ValueError(
                f"--resume_from_checkpoint last: there is no whole checkpoint in output_dir={output_dir!r} that {processes} "
                "process(es) wrote. Pass the --output_dir of the run to go on with, or leave the option out to begin anew."
            )
        return str(last)
    missing = missing_from(Path(str(name)), processes)
    if missing is not None:
        why = f"{missing} cannot be read there, so {processes} process(es) cannot go on from it exactly"
        why = why if Path(str(name)).is_dir() else "there is no such directory"
        remedy = "Pass last, or a checkpoint that was written to its end by as many processes."
        raise ValueError(f"--resume_from_checkpoint {name}: {why}. {remedy}")
    return str(name)


def refuse_other_states(checkpoint: str, *, by_bitsandbytes: bool) -> None:
    """Raise if the optimizer's states in a checkpoint are of another kind than this run's, which would fail at its first step."""
    path = Path(checkpoint) / OPTIMIZER_NAME
    if not path.is_file():
        return  # an engine has files of its own
    states = torch.load(path, map_location="cpu", weights_only=True, mmap=True).get("state", {})
    names = list(next(iter(states.values()), {}))
    if names and ("state1" in names) != by_bitsandbytes:
        here, there = ("", " not") if by_bitsandbytes else (" not", "")
        raise ValueError(
            f"--resume_from_checkpoint {checkpoint}: the optimizer of that run was{there} one of bitsandbytes', and this run's is"
            f"{here}, so its states cannot be used. Pass --optimizer or --optim as that run did, or begin anew with its weights: "
            f"--model_name_or_path {checkpoint}"
        )


@contextmanager
def named_if_it_fails(path: Path, output_dir: str, processes: int) -> Iterator[None]:
    """Let an error while `path` is written say so, and say which checkpoint is whole."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        last = last_checkpoint(output_dir, processes)
        safe = f"The last whole checkpoint is {last}; resume from it." if last else "There is no whole checkpoint before it."
        raise OSError(f"{path} could not be written: {short_reason(error).rstrip('.')}. {safe}") from error
