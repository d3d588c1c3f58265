"""Which model is meant: published shapes of real models, for runs without a download, and configurations by path or name."""

from __future__ import annotations

import copy
import os
import textwrap
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from streamgrad.hf.presets import check_found, check_stored, preset, preset_names

# Long enough for every benchmark; rotary embeddings cost nothing for positions that are not used.
_POSITIONS = 1 << 22
# In characters: some of transformers' messages list every class there is.
_LONGEST_REASON = 300
# Where a configuration has them as numbers.
_SIZES = (
    "hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip


def preset_config(name: str) -> PretrainedConfig:
    shape = dict(preset(name))
    return AutoConfig.for_model(shape.pop("family"), **shape, max_position_embeddings=_POSITIONS, use_cache=False)


def config_of(model: Any) -> PretrainedConfig:
    """Of a preset's name, a directory with a `config.json`, a name on the hub, a configuration or a model.

    It is that of a causal language model, with something in it; another one is a ValueError.
    """
    if isinstance(model, PretrainedConfig):
        config = model
    elif isinstance(getattr(model, "config", None), PretrainedConfig):
        config = model.config
    elif not isinstance(model, str | os.PathLike):
        raise TypeError(f"model is a {type(model).__name__}. Pass a preset's name, a path, a configuration or a model.")
    elif model in preset_names():
        return preset_config(str(model))
    else:
        check_found(model)
        config = stored_config(model)
    check_causal(config)
    check_sizes(config)
    return config


def stored_config(model: str | os.PathLike, **options: Any) -> PretrainedConfig:
    """Of a directory with a `config.json` or a name on the hub; `options` are those of `AutoConfig.from_pretrained`."""
    check_stored(model)
    try:
        return AutoConfig.from_pretrained(model, **options)
    except Exception as error:  # of any kind: files, connections and the checks of each configuration fail in their own ways
        reason, hint = short_reason(error), ". Pass one whose config.json save_pretrained has written."
        raise ValueError(
            f"model={str(model)!r} has no configuration that transformers can load: "
            + (reason.rstrip(".") + hint if os.path.exists(model) else reason)
        ) from error


def short_reason(error: Exception) -> str:
    """What it says, in one line that is not too long."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...") or type(error).__name__


def check_causal(config: PretrainedConfig) -> None:
    """Whether transformers builds a decoder-only language model from it."""
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers' AutoModelForCausalLM knows no {type(config).__name__}"
    else:
        return
    raise ValueError(f"a {config.model_type} model is not a causal language model: {reason}. Pass a decoder-only model.")


def check_sizes(config: PretrainedConfig) -> None:
    """Raise for a model with nothing in it: transformers builds some, and whatever divides by their sizes fails later."""
    text = config.get_text_config(decoder=True)
    for name in _SIZES:
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise ValueError(
                f"a {config.model_type} model of {name}={size} has nothing to train. Sizes in a config.json start at 1."
            )


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """The configuration of the model's first `layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if layers > text.num_hidden_layers:
        raise ValueError(f"layers={layers}, and the model has {text.num_hidden_layers}. Pass at most that many.")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def preset_model(
    name: str, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """A model of the preset's shape, or of its first `layers` layers, with random weights, on `device`, in training mode."""
    config = preset_config(name) if layers is None else with_layers(preset_config(name), layers)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
