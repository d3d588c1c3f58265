"""Write src/streamgrad/hf/preset_shapes.json, the dry runs of all presets: `python docs/generate_preset_shapes.py`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import transformers

from streamgrad.hf.configs import preset_config
from streamgrad.hf.estimates import shapes
from streamgrad.hf.presets import preset_names

FILE = Path(shapes.__file__).parent / shapes.TABLE


def preset_shapes(name: str) -> dict[str, dict]:
    """Return the table's entry for a preset. A configuration is always measured."""
    config = preset_config(name)
    ranks = {"full": None, "lora": shapes.TABLE_RANK}
    return {method: asdict(shapes.shape_of(config, dtype=shapes.TABLE_DTYPE, lora_rank=rank)) for method, rank in ranks.items()}


def table() -> str:
    """Return the file's text, with one line for each preset and method."""
    note = "written by docs/generate_preset_shapes.py: the shapes of presets in bfloat16, full and with adapters of rank 32"
    entries = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f'    "{method}": {json.dumps(shape)}' for method, shape in preset_shapes(name).items())
        + "\n  }"
        for name in preset_names()
    ]
    head = f'{{\n "note": {json.dumps(note)},\n "transformers": {json.dumps(transformers.__version__)},\n "presets": {{\n'
    return head + ",\n".join(entries) + "\n }\n}\n"


if __name__ == "__main__":
    FILE.write_text(table())
