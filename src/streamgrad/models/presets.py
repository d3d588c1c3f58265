"""Published shapes of real models, for random-weight runs without a download."""

from __future__ import annotations

import json
from importlib import resources

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

# Long enough for every benchmark; rotary embeddings cost nothing for positions that are not used.
_POSITIONS = 1 << 22


def preset_names() -> list[str]:
    return [name for name in _presets() if name != "note"]


def preset_config(name: str) -> PretrainedConfig:
    if name not in preset_names():
        raise ValueError(f"model={name!r} is not a preset. The presets are {', '.join(preset_names())}.")
    shape = dict(_presets()[name])
    return AutoConfig.for_model(shape.pop("family"), **shape, max_position_embeddings=_POSITIONS, use_cache=False)


def preset_model(
    name: str, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A model of the preset's shape, or of its first `layers` layers, with random weights, on `device`, in training mode."""
    config = preset_config(name)
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return AutoModelForCausalLM.from_config(config).train()
    finally:
        torch.set_default_dtype(previous)


def _presets() -> dict:
    return json.loads((resources.files("streamgrad.models") / "presets.json").read_text())
