"""Looks a model's name up in the presets, without importing transformers, which takes seconds."""

from __future__ import annotations

import functools
import json
import os
import re
from importlib import resources
from typing import Any


def packaged(name: str) -> dict[str, Any]:
    """Return the contents of a JSON file beside this module, without its note."""
    return {key: value for key, value in json.loads((resources.files(__package__) / name).read_text()).items() if key != "note"}


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the published sizes of real models, by name."""
    return packaged("presets.json")


def preset_names() -> list[str]:
    return list(presets())


def preset(name: str) -> dict[str, Any]:
    """Return the arguments of a preset's configuration, its family among them."""
    if name not in preset_names():
        raise ValueError(f"model={name!r} is not a preset. The presets are {', '.join(preset_names())}.")
    return {key: value for key, value in presets()[name].items() if key != "hub"}


# Parts of names under which the same sizes are published again: tuned, and dated.
_SAME_SIZES = re.compile(r"-(base|instruct|thinking|it|pt)(?=-|$)|-2507$|(?<=/)meta-(?=llama-)", re.IGNORECASE)


def preset_of(model: Any) -> str | None:
    """Return the preset that a name stands for, if there is one: `qwen3-8b`, `Qwen3-8B`, `Qwen/Qwen3-8B`, `Qwen3-8B-Base`.

    A directory of that name comes first, unless it is spelled exactly as the preset.
    """
    if not isinstance(model, str):
        return None
    if model in preset_names():
        return model
    return None if os.path.exists(model) else _spellings().get(_plain(model))


def _plain(name: str) -> str:
    return _SAME_SIZES.sub("", name).lower()


@functools.cache
def _spellings() -> dict[str, str]:
    """Return the preset of each name on the hub, with and without its owner, and of each preset's own name."""
    known: dict[str, str] = {}
    for name, sizes in presets().items():
        hub = _plain(sizes.get("hub", name))
        known |= {_plain(name): name, hub: name, hub.partition("/")[2]: name}
    return known


def may_be_on_hub(name: str) -> bool:
    """Return whether `name` is one word, or an owner and a word; a path begins otherwise or has more parts."""
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None


def check_stored(model: str | os.PathLike[str]) -> None:
    """Raise for what is no path and cannot be a name on the hub."""
    if not os.path.exists(model) and not may_be_on_hub(str(model)):
        raise ValueError(
            f"model={str(model)!r}: there is no such directory. Pass one, or a name on the hub such as Qwen/Qwen3-8B."
        )


def check_found(model: str | os.PathLike[str]) -> None:
    """Raise for what is neither a preset nor a path, and cannot be a name on the hub."""
    name = str(model)
    if preset_of(model) is None and not os.path.exists(model) and not ("/" in name and may_be_on_hub(name)):
        raise ValueError(
            f"model={name!r} is neither a directory that exists nor a preset. The presets are {', '.join(preset_names())}; "
            "a name on the hub has its owner in front, as in Qwen/Qwen3-8B."
        )
