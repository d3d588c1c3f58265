"""A model's shape without measuring it twice.

What `hf.dry_run` finds depends on nothing but the configuration, the dtype, the adapters' rank and the code. So
    presets and configurations of well-known families    have theirs by formulas (`hf.families`)
    any other directory's configuration                  has it in the user's cache, under a name made of all of these
and neither needs torch or transformers, whose import takes seconds.

The cache is a folder of small files: `$STREAMGRAD_CACHE`, or `streamgrad` in `$XDG_CACHE_HOME` or in `~/.cache`. Where it cannot
be read or written, shapes are measured; with `STREAMGRAD_CACHE=off` always.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from streamgrad.hf.families import known_shape
from streamgrad.hf.presets import check_found, presets
from streamgrad.memory.model_shape import ModelShape

_MEASURED_BY = ("streamgrad", "torch", "transformers", "peft")


def shape_of(model: Any, *, dtype: str, lora_rank: int | None) -> ModelShape:
    """`hf.dry_run.model_shape` of whatever `hf.configs.config_of` takes."""
    if isinstance(model, str | os.PathLike):
        check_found(model)
    configuration = _configuration(model)
    # Who has imported transformers may have changed its code, as Liger's patches do: what is measured there is true there only.
    as_it_was = "transformers" not in sys.modules
    if as_it_was or (isinstance(model, str) and model in presets()):
        known = known_shape(configuration, dtype=dtype, lora_rank=lora_rank)
        if known is not None:
            return known
    file = _file_for(configuration, dtype, lora_rank) if as_it_was else None
    shape = None if file is None else _read(file)
    if shape is None:
        shape = _measured(model, dtype, lora_rank)
        if file is not None:
            _write(file, shape)
    return shape


def _measured(model: Any, dtype: str, lora_rank: int | None) -> ModelShape:
    import torch

    from streamgrad.hf.configs import config_of
    from streamgrad.hf.dry_run import model_shape

    return model_shape(config_of(model), dtype=getattr(torch, dtype), lora_rank=lora_rank)


def _file_for(configuration: Any, dtype: str, lora_rank: int | None) -> Path | None:
    """Where its shape is or will be; None where all that it depends on cannot be named here."""
    folder = _folder()
    if folder is None or configuration is None:
        return None
    key = hashlib.sha256(json.dumps([configuration, dtype, lora_rank, _versions()]).encode())
    try:
        for source in sorted(Path(__file__).parents[1].rglob("*.py")):
            key.update(source.read_bytes())  # a version is the same for many states of the code while it is worked on
    except OSError:
        return None
    return folder / f"{key.hexdigest()}.json"


def _folder() -> Path | None:
    own = os.environ.get("STREAMGRAD_CACHE")
    if own == "off":
        return None
    folder = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "streamgrad"
    return folder if own or folder.is_absolute() else None  # without a home, `~` stays as it is


def _configuration(model: Any) -> Any:
    """All that transformers makes the configuration from, or None if that is elsewhere too: code, other files, the hub."""
    if isinstance(model, str) and model in presets():
        row = dict(presets()[model])
        return {"model_type": row.pop("family"), **row}
    if not isinstance(model, str | os.PathLike):
        return None
    try:
        read = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    # A directory's name decides where there is no model type.
    whole = isinstance(read, dict) and "model_type" in read and not {"auto_map", "configuration_files"} & read.keys()
    return read if whole else None


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(_MEASURED_BY)
    for package in _MEASURED_BY:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _read(file: Path) -> ModelShape | None:
    """What `_write` wrote, if the file is there and is all that was written."""
    try:
        digest, _, text = file.read_text().partition("\n")
    except (OSError, ValueError):
        return None
    return ModelShape.from_dict(json.loads(text)) if digest == _digest(text) else None


def _write(file: Path, shape: ModelShape) -> None:
    """In one step, so that nobody reads half of it; or not at all, which is no error."""
    text, beside = json.dumps(dataclasses.asdict(shape)), file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(f"{_digest(text)}\n{text}")
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
