"""Published shapes of real models, for random-weight runs without a download."""

from __future__ import annotations

import copy
import json
import os
from importlib import resources
from typing import Any

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


def config_of(model: Any) -> PretrainedConfig:
    """Of a preset's name, a directory with a `config.json`, a name on the hub, a configuration or a model."""
    if isinstance(model, PretrainedConfig):
        return model
    if isinstance(getattr(model, "config", None), PretrainedConfig):
        return model.config
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model is a {type(model).__name__}. Pass a preset's name, a path, a configuration or a model.")
    if model in preset_names():
        return preset_config(str(model))
    if "/" not in str(model) and not os.path.isdir(model):
        raise ValueError(
            f"model={str(model)!r} is neither a directory nor a preset. The presets are {', '.join(preset_names())}; a name on "
            "the hub has its owner in front, as in Qwen/Qwen3-8B."
        )
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model={str(model)!r} has no configuration that transformers can load: {reason}") from error


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The configuration of the model's first `layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def preset_model(
    name: str, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A model of the preset's shape, or of its first `layers` layers, with random weights, on `device`, in training mode."""
    config = preset_config(name) if layers is None else with_layers(preset_config(name), layers)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return AutoModelForCausalLM.from_config(config).train()
    finally:
        torch.set_default_dtype(previous)


def _presets() -> dict:
    return json.loads((resources.files("streamgrad.models") / "presets.json").read_text())
