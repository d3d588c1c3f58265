"""The attention seam: the function that attention modules find in `AttentionInterface` under the name "streamgrad"."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from streamgrad.attention.streamed import streamed_attention
from streamgrad.engine.kv_chunk import Chunk, SeamError
from streamgrad.engine.replay import as_autocast
from streamgrad.hf.mask_seam import stream_mask
from streamgrad.hf.patching import temporary_attributes

IMPLEMENTATION = "streamgrad"

# What attention modules pass on besides the arguments below, and why it may be left unread here.
_CARRIED_BY_THE_MASK = {"sliding_window", "is_causal", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
_NOT_ABOUT_ATTENTION = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "output_hidden_states", "return_dict",
    "num_items_in_batch", "ignore_index", "shift_labels",
    "logits_to_keep", "past_key_values", "layer_past", "seq_idx", "output_router_logits",
}  # fmt: skip

_LEFT_UNREAD = _CARRIED_BY_THE_MASK | _NOT_ABOUT_ATTENTION


def stream_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The contract of `sdpa_attention_forward`: (B, H, L, D) in, ((B, L, H, D), None) out."""
    if not isinstance(attention_mask, Chunk):
        raise SeamError(f"its attention replaces the mask it was given by a {type(attention_mask).__name__}")
    for name, argument in kwargs.items():
        if name not in _LEFT_UNREAD and argument is not None and argument is not False:
            raise SeamError(f"its attention is called with {name}={type(argument).__name__}, which streaming does not know")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise SeamError("its attention is not causal")
    cached = attention_mask.cached or (key, value)
    attention_mask.made_after_update = key is not cached[0] or value is not cached[1]
    out_BHLD = streamed_attention(
        attention_mask,
        *map(as_autocast, (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        dropout=dropout,
        sink_H=s_aux,
    )
    return out_BHLD.transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, stream_attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, stream_mask)


def streamed_attention_in(configs: Iterable[PretrainedConfig]) -> AbstractContextManager[None]:
    """Within the block, attention modules and mask functions that read one of `configs` take the streamed implementation."""
    # The internal name: the public setter also writes into sub-configs, which may belong to other towers.
    return temporary_attributes((config, "_attn_implementation_internal", IMPLEMENTATION) for config in configs)
