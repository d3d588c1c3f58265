"""What a decoder call asks for that a streamed one cannot give: attention weights, and keys and values from or for a cache."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from streamgrad.hf.unusable import NoCache

# Caches that programs have passed to calls with gradients, which did not fill them.
_LEFT_EMPTY: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_a_cache_left_empty(arguments: dict[str, Any]) -> None:
    """Raise for a cache that an earlier call with gradients did not fill: without gradients too, a call would go on from it."""
    if arguments.get("past_key_values") in _LEFT_EMPTY:
        raise ValueError(f"past_key_values was passed to an earlier call, but {NoCache.reason}")


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


def drop_cache(arguments: dict[str, Any], config: Any) -> bool:
    """Drop the cache, and return whether there would be one.

    Filled while training, it would hold every key and value of every layer, with their graph.
    """
    asked, given = arguments.pop("use_cache", None), arguments.pop("past_key_values", None)
    if given is not None:
        _LEFT_EMPTY.add(given)
    if asked or given is not None:
        warnings.warn(
            "streamgrad: use_cache=True is ignored while gradients are computed; no past_key_values are returned.",
            UserWarning,
            stacklevel=3,
        )
    arguments["use_cache"] = False
    return bool(getattr(config, "use_cache", False) if asked is None else asked)


def own_token_arguments(arguments: dict[str, Any]) -> None:
    """Copy positions, padding and documents, which backward reads again: a program may write its next batch there before.

    Token ids are saved by the embedding, where autograd notices; a mask of (T x T) notices by itself.
    """
    if not torch.is_grad_enabled():
        return
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor) and name != "input_ids"}
    given = {name: value for name, value in tensors.items() if value.ndim < (3 if value.is_floating_point() else 4)}
    copies = {id(value): value.clone() for value in given.values()}  # one for boundaries that are passed as two arguments
    arguments.update({name: copies[id(value)] for name, value in given.items()})
