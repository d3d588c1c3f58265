"""A model's shape, from one of two places.

    preset_shapes.json    presets in bfloat16, in full training and with adapters of rank 32; it needs no torch
    dry_run               everything else; it needs torch and transformers, and takes seconds

docs/generate_preset_shapes.py writes the table by dry runs, and tests/hf/test_preset_shapes.py makes them again.
"""

from __future__ import annotations

import os
from typing import Any

from streamgrad.hf.presets import check_found, packaged, preset_of
from streamgrad.memory.costs import ModelShape

TABLE = "preset_shapes.json"
TABLE_DTYPE = "bfloat16"
# The rank of adapters in the table, which is also the one that `estimate` takes by default.
TABLE_RANK = 32


def shape_of(model: Any, *, dtype: str = TABLE_DTYPE, lora_rank: int | None = None) -> ModelShape:
    """Return the shape of a preset, a directory, a name on the hub, a configuration or a model; with a rank, with adapters."""
    if not isinstance(model, str | os.PathLike):
        return _measured(model, dtype, lora_rank)
    check_found(model)
    if dtype == TABLE_DTYPE and lora_rank in (None, TABLE_RANK):
        preset = packaged(TABLE)["presets"].get(preset_of(model))
        if preset is not None:
            return ModelShape.from_dict(preset["full" if lora_rank is None else "lora"])
    return _measured(model, dtype, lora_rank)


def _measured(model: Any, dtype: str, lora_rank: int | None) -> ModelShape:
    import torch

    from streamgrad.hf.configs import config_of
    from streamgrad.hf.estimates.dry_run import model_shape

    return model_shape(config_of(model), dtype=getattr(torch, dtype), lora_rank=lora_rank)
