"""What a decoder call asks for that a streamed one cannot give: attention weights, and keys and values from or for a cache."""

from __future__ import annotations

import warnings
from typing import Any


def refuse_what_needs_whole_layers(decoder: Any, arguments: dict[str, Any]) -> None:
    """Raise for attention weights, and for a cache that holds keys already."""
    asked = arguments.get("output_attentions")
    if asked if asked is not None else getattr(decoder.config, "output_attentions", False):
        raise ValueError(
            "output_attentions=True cannot be streamed: attention weights are (T x T) and never exist while streaming. Pass "
            "output_attentions=False, or call streamgrad.disable(model)."
        )
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        is_trained = any(getattr(getattr(layer, "keys", None), "requires_grad", False) for layer in getattr(cache, "layers", ()))
        remedy = (
            "They are trained themselves, as by PEFT's prefix tuning. Train with prompt tuning, P-tuning or LoRA, or call "
            "streamgrad.disable(model)."
            if is_trained
            else "Pass the whole sequence without a cache, or call under torch.no_grad()."
        )
        raise ValueError(
            f"past_key_values holds {cache.get_seq_length()} tokens, and gradients through cached keys cannot be streamed. "
            f"{remedy}"
        )


def drop_cache(arguments: dict[str, Any]) -> None:
    """Drop the cache: filled while training, it would hold every key and value of every layer, with their graph."""
    if arguments.pop("use_cache", None) or arguments.get("past_key_values") is not None:
        warnings.warn(
            "streamgrad: use_cache=True is ignored while gradients are computed; no past_key_values are returned.",
            UserWarning,
            stacklevel=3,
        )
    arguments.pop("past_key_values", None)
    arguments["use_cache"] = False
