"""Write src/streamgrad/models/shapes.json, what `streamgrad plan` knows of each preset: `python docs/generate_shapes.py`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from streamgrad.models import names, shape
from streamgrad.models.dry_run import model_shape
from streamgrad.models.presets import preset_config, preset_names
from streamgrad.models.recognised import WITHOUT_A_PART
from streamgrad.models.remembered import entry_name

FILE = Path(shape.__file__).parent / "shapes.json"
# Those that `plan` has by default: dtype, and rank of adapters.
KINDS = (("bfloat16", None), ("bfloat16", 32))


def shapes(preset: str) -> dict[str, Any]:
    """What the dry run measures of a preset, by the names of its entries."""
    measured = {
        entry_name(dtype, rank): model_shape(preset_config(preset), dtype=getattr(torch, dtype), lora_rank=rank)
        for dtype, rank in KINDS
    }
    # As it would stand in a file, where a list is what a tuple was.
    complete = json.loads(preset_config(preset).to_json_string(use_diff=False))
    configuration = {key: value for key, value in complete.items() if key not in WITHOUT_A_PART}
    return {name: dataclasses.asdict(each) for name, each in measured.items()} | {
        "configuration": configuration,
        "stated": stated(preset),
    }


def stated(preset: str) -> list[str]:
    """What the preset's configuration must say: transformers would take something else for it."""
    family, row = names.preset(preset)["family"], {key: value for key, value in names.preset(preset).items() if key != "family"}
    without = {key: AutoConfig.for_model(family, **{other: row[other] for other in row if other != key}) for key in row}
    # Under the name that it has in a file.
    in_file = {key: preset_config(preset).attribute_map.get(key, key) for key in row}
    needed = [key for key in row if getattr(without[key], key, None) != row[key]]
    alone, whole = (AutoConfig.for_model(family, **{key: row[key] for key in keys}).to_dict() for keys in (needed, row))
    assert alone == whole, "what follows from the rest one by one does not follow together"
    return ["model_type", *(in_file[key] for key in needed)]


if __name__ == "__main__":
    note = "written by docs/generate_shapes.py: what models.dry_run measures of each preset"
    FILE.write_text(json.dumps({"note": note} | {name: shapes(name) for name in preset_names()}, indent=1) + "\n")
