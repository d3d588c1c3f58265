"""The attention of layers that run whole (`hf.plain_pass`): the stock model's, by the fastest kernel where it needs no mask."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamgrad.attention.backends import flash_implementation
from streamgrad.attention.backends.cudnn_plans import FLASH_LOSS, PRICES, attention_flops
from streamgrad.attention.whole import causal_attention
from streamgrad.engine.module_walk import modules_of
from streamgrad.hf.discover import attention_configs
from streamgrad.hf.seams import attention_replaced_in
from streamgrad.hf.whole_step import WholeStep

_NAME = "streamgrad-whole"
# A layer gains as much by cuDNN with about 1,500 tokens of 32 heads of 128. In shorter steps the device waits for launches, and
# so for the operator's Python code too.
OPERATOR_SECONDS = 0.1e-3
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
# torch's own order may begin with cuDNN, and every new length would wait for its plan.
_CUDNN_LATE = [
    SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH,
]  # fmt: skip


def whole_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return what `sdpa_attention_forward` does, by an operator that chooses its kernel in each call where it can."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    special = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "cache", "s_aux"))
    if attention_mask is None and causal and not dropout and not special and _has_kernels(query, key, value):
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return causal_attention(query, key, value, scale), None
    found: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )
    return found


AttentionInterface.register(_NAME, whole_attention_forward)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def _has_kernels(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether cuDNN or flash may compute it: 16 bits on CUDA, and several tokens, all of them in this call."""
    if query.device.type != "cuda" or query.dtype.itemsize != 2 or torch.is_autocast_enabled("cuda"):
        return False
    return query.dtype == key.dtype == value.dtype and key.shape[-1] == value.shape[-1] and query.shape[2] == key.shape[2] > 1


def fastest_attention(step: WholeStep, decoder: Any, layers: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Return the context in which layers attend by cuDNN where the step is worth its plan, and else by flash where that can.

    Compiled layers have two graphs: of short steps, with flash in the graph, and with the operator, which chooses in each call.
    """
    if step.device.type != "cuda":
        return nullcontext()
    config = decoder.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer_flops = 2 * attention_flops(step.rows, heads, size, step.sequence**2 / 2)
    if step.compiled and FLASH_LOSS * layer_flops > OPERATOR_SECONDS:
        return attention_by_operator(decoder, layers)
    if step.compiled or flash_implementation() is not None:  # FlashAttention-3 or 4 is faster than cuDNN
        return sdpa_kernel(_CUDNN_LATE, set_priority=True)
    dtype = next(decoder.parameters()).dtype
    shape = "whole step", step.rows, step.sequence, heads, size, step.device.index, dtype, step.masked
    is_worth = PRICES.is_worth(shape, len(layers) * layer_flops)
    return sdpa_kernel(_CUDNN_FIRST if is_worth else _CUDNN_LATE, set_priority=True)


def attention_by_operator(decoder: nn.Module, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Return the context in which layers attend by `whole_attention_forward`."""
    return attention_replaced_in(attention_configs([decoder, *modules_of(layers[0])]), _NAME)
