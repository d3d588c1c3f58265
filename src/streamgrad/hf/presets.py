"""What can be said of a model's name before transformers is imported, which takes seconds."""

from __future__ import annotations

import json
import os
import re
from importlib import resources
from typing import Any


def packaged(name: str) -> dict[str, Any]:
    """Return the contents of a JSON file beside this module, without its note."""
    return {key: value for key, value in json.loads((resources.files(__package__) / name).read_text()).items() if key != "note"}


def presets() -> dict[str, dict[str, Any]]:
    """Return the published shapes of real models, by name."""
    return packaged("presets.json")


def preset_names() -> list[str]:
    return list(presets())


def preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise ValueError(f"model={name!r} is not a preset. The presets are {', '.join(preset_names())}.")
    return presets()[name]


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
    if model not in preset_names() and not os.path.exists(model) and not ("/" in name and may_be_on_hub(name)):
        raise ValueError(
            f"model={name!r} is neither a directory that exists nor a preset. The presets are {', '.join(preset_names())}; "
            "a name on the hub has its owner in front, as in Qwen/Qwen3-8B."
        )
