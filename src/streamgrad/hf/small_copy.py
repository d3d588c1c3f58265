"""A small copy of a model: the same class and flags, few layers, narrow widths, random weights.

It has the first layer of each kind. A layer's kind is its entries in the configuration's lists with one entry per layer (full or
sliding attention, with or without rotary embedding, dense or experts).
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from streamgrad.hf.configs import check_alike

_HEAD_SIZE, _KEY_HEADS, _MOST_LAYERS = 16, 2, 4

# The largest sizes of a small copy, where its configuration has these names.
_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32, "head_dim": _HEAD_SIZE, "vocab_size": 512, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48,
}  # fmt: skip


def reduced_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of `config` with small sizes. A composite model keeps its class, and its text part is reduced."""
    check_alike(config, "made small")
    config = copy.deepcopy(config)
    text = config.get_text_config(decoder=True)
    _reduce_heads(text)
    _keep_layers(text, _kinds_of_layers(text))
    for name, size in _SIZES.items():
        value = getattr(text, name, None)
        if isinstance(value, int) and value > size:
            setattr(text, name, size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(text, name, None) is not None:
            setattr(text, name, None)
    return config


def _reduce_heads(text: Any) -> None:
    """Keep at most two key heads with at most four query heads each; if there is no head_dim, set the width to match."""
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        return  # a model without attention, which is refused elsewhere
    key_heads = getattr(text, "num_key_value_heads", None)
    fewer = min(_KEY_HEADS, key_heads or heads)
    text.num_attention_heads = fewer * min(4, heads // (key_heads or heads))
    if key_heads is not None:
        text.num_key_value_heads = fewer
    if getattr(text, "head_dim", None) is None:
        text.hidden_size = _HEAD_SIZE * text.num_attention_heads


def _per_layer(text: Any) -> dict[str, list[Any]]:
    """Return, by name, the lists that have one entry per layer."""
    layers = text.num_hidden_layers
    return {name: value for name, value in vars(text).items() if isinstance(value, list) and len(value) == layers}


def _kinds_of_layers(text: Any) -> list[int]:
    """Return the indices of the first layer of each kind, and at least two where there are two."""
    lists = list(_per_layer(text).values())
    first: dict[tuple[str, ...], int] = {}
    for index in range(text.num_hidden_layers):
        first.setdefault(tuple(str(entries[index]) for entries in lists), index)
    chosen = sorted(first.values())[:_MOST_LAYERS]
    return chosen if len(chosen) > 1 else list(range(min(2, text.num_hidden_layers)))


def _keep_layers(text: Any, indices: list[int]) -> None:
    for name, entries in _per_layer(text).items():
        setattr(text, name, [entries[index] for index in indices])
    text.num_hidden_layers = len(indices)


def reduced_model(config: PretrainedConfig, *, seed: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a small copy without dropout, whose random weights are large enough for every part to matter to the loss.

    The same seed gives the same weights, rounded to `dtype`.
    """
    reduced = reduced_config(config)
    # With sdpa, transformers leaves out the softcap of attention scores.
    softcap = getattr(reduced.get_text_config(decoder=True), "attn_logit_softcapping", None)
    try:
        model = AutoModelForCausalLM.from_config(reduced, **({"attn_implementation": "eager"} if softcap else {}))
    except Exception as error:
        raise ValueError(
            f"a small copy of this {config.model_type} model could not be built ({error}), so its gradients cannot be checked. "
            "Call streamgrad.enable(model) on the model itself to see whether it can be streamed."
        ) from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / math.sqrt(parameter.shape[-1]) if parameter.ndim > 1 else parameter + 0.2 * noise)
    frequencies = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model = model.to(dtype).eval()
    for name, buffer in model.named_buffers():
        if name in frequencies:  # rotary angles are float32 in every model
            buffer.data = frequencies[name]
    return model.to(device)
