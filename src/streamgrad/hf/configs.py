"""Configurations of models: of presets, which need no download, and of models given by path, name or object."""

from __future__ import annotations

import copy
import itertools
import os
import re
import textwrap
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from streamgrad.hf.presets import check_found, check_stored, preset, preset_of

# Long enough for every benchmark; rotary embeddings cost nothing for positions that are not used.
_POSITIONS = 1 << 22
# Characters of an error's message that are shown: some of transformers' list every class there is.
_LONGEST_REASON = 300
# Sizes that must be at least 1, in configurations that have them.
_SIZES = (
    "hidden_size", "intermediate_size", "vocab_size", "head_dim", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
# The largest values, by what their names look like; the first that matches counts.
_LARGEST = {r"(layers?|experts)$": 1 << 12, r"^(num|n|d)_|_(size|dim|rank|heads)$": 1 << 24}


def preset_config(name: str) -> PretrainedConfig:
    sizes = {"max_position_embeddings": _POSITIONS} | preset(name)
    return AutoConfig.for_model(sizes.pop("family"), **sizes, use_cache=False)


def config_of(model: Any) -> PretrainedConfig:
    """Return the configuration of `model`: a preset's name, a directory, a name on the hub, a configuration or a model.

    Raise `ValueError` unless it describes a causal language model whose sizes are at least 1.
    """
    if isinstance(model, PretrainedConfig):
        config = model
    elif isinstance(getattr(model, "config", None), PretrainedConfig):
        config = model.config
    elif not isinstance(model, str | os.PathLike):
        raise TypeError(f"model is a {type(model).__name__}. Pass a preset's name, a path, a configuration or a model.")
    elif (named := preset_of(model)) is not None:
        return preset_config(named)
    else:
        check_found(model)
        config = stored_config(model)
    check_causal(config)
    check_sizes(config)
    _check_limits(config.to_dict())
    return config


def stored_config(
    model: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool | None = None
) -> PretrainedConfig:
    """Load the configuration of a directory or of a name on the hub, and run no code of theirs unless that is trusted.

    None means that whoever asks cannot be told to trust it. Sizes are checked first: some classes make a list of all layers.
    """
    check_stored(model)
    values, _ = _loaded(PretrainedConfig.get_config_dict, model, revision=revision)
    own_class = "AutoConfig" in (values.get("auto_map") or ())
    if own_class and not trust_remote_code and values.get("model_type") not in CONFIG_MAPPING:
        remedy = "Call streamgrad.enable(model) on the model itself to see whether it can be streamed."
        raise ValueError(
            f"model={str(model)!r} has a configuration class of its own (auto_map in config.json), which is not run here, and "
            f"transformers has no model_type {values.get('model_type')!r}. "
            + (remedy if trust_remote_code is None else "Pass --trust_remote_code to run it.")
        )
    _check_limits(values)
    return _loaded(AutoConfig.from_pretrained, model, revision=revision, trust_remote_code=bool(trust_remote_code))


def _loaded(load: Callable[..., Any], model: str | os.PathLike[str], **options: Any) -> Any:
    try:
        return load(model, **options)
    except Exception as error:  # any kind: files, connections and the checks of each class fail in their own ways
        reason, hint = short_reason(error), ". Pass a directory whose config.json was written by save_pretrained."
        if os.path.isfile(os.path.join(model, "adapter_config.json")):
            hint = ". It has adapters alone: pass the model they adapt, or merge them into it (merge_and_unload) and save it."
        raise ValueError(
            f"model={str(model)!r} has no configuration that transformers can load: "
            + (reason.rstrip(".") + hint if os.path.exists(model) else reason)
        ) from error


def _check_limits(values: dict[str, Any]) -> None:
    """Raise for sizes that no model has, in `values` or the dictionaries in it: building one would take all memory or time."""
    for name, value in values.items():
        if isinstance(value, dict):
            _check_limits(value)
        largest = next((largest for pattern, largest in _LARGEST.items() if re.search(pattern, str(name))), None)
        if largest and isinstance(value, int | float) and value > largest:
            raise ValueError(
                f"{name}={value} in config.json is more than any model has: at most {largest:,} can be built. Correct it, or "
                "pass another model."
            )


def short_reason(error: Exception) -> str:
    """Return an error's message as one line of limited length."""
    return textwrap.shorten(str(error), _LONGEST_REASON, placeholder=" ...") or type(error).__name__


def check_causal(config: PretrainedConfig) -> None:
    """Raise unless transformers builds a decoder-only language model from `config`."""
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = f"transformers' AutoModelForCausalLM knows no {type(config).__name__}"
    else:
        return
    raise ValueError(f"a {config.model_type} model is not a causal language model: {reason}. Pass a decoder-only model.")


def layer_configs(text: PretrainedConfig) -> list[PretrainedConfig]:
    """Return the configurations of the layers where these differ (Gemma 4): `text` itself then refuses to be read."""
    if not getattr(text, "is_heterogeneous", False):
        return [text]
    return [text.per_layer_config[index] for index in range(text.num_hidden_layers)]


def check_alike(config: PretrainedConfig, doing: str) -> None:
    """Raise where what one layer is does not tell what the others are, so that `doing` is not possible."""
    text = config.get_text_config(decoder=True)
    if getattr(text, "is_heterogeneous", False) or getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(
            f"a {config.model_type} model cannot be {doing}: its layers differ in their heads or attend to keys of other layers. "
            "Training it is not affected."
        )


def check_sizes(config: PretrainedConfig) -> None:
    """Raise for sizes below 1: transformers builds some of these models, and what divides by their sizes fails later."""
    layers = layer_configs(config.get_text_config(decoder=True))
    for name, text in itertools.product(_SIZES, layers):
        size = getattr(text, name, None)
        if isinstance(size, int) and size < 1:
            raise ValueError(
                f"{name}={size} leaves nothing to train in a {config.model_type} model. Set it to at least 1 in config.json."
            )


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration of the model's first `layers` layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    if layers > text.num_hidden_layers:
        raise ValueError(f"layers={layers}, but the model has only {text.num_hidden_layers}. Pass at most that many.")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return config


def preset_model(
    name: str, *, device: torch.device, dtype: torch.dtype = torch.bfloat16, layers: int | None = None
) -> PreTrainedModel:
    """Build a preset, or its first `layers` layers, with random weights, on `device`, in training mode."""
    config = preset_config(name) if layers is None else with_layers(preset_config(name), layers)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
