"""Causal attention of whole sequences as an operator of torch, for layers that torch.compile has made a graph of.

The compiler does not look inside of it. So the kernel is chosen in every call, as for chunks (`attention.backends`), and one
graph runs flash for lengths that come once and cuDNN, which is faster, for those that come again.

Shapes: B batch, H query heads, G key/value heads, T sequence, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamgrad.attention.backends import Block, backends_named, choose, run_or_replace
from streamgrad.engine.kv_chunk import Attended, with_dense_rows
from streamgrad.ops.accumulate import accumulator_dtype

_KERNELS = backends_named("auto")


def causal_attention(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> Tensor:
    """Return softmax(query @ key^T * scale, over each token and those before it) @ value, as (B, T, H, D)."""
    return _attend(query_BHTD, key_BGTD, value_BGTD, scale)[0]


@torch.library.custom_op("streamgrad::causal_attention", mutates_args=())
def _attend(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    query, key, value = map(with_dense_rows, (query_BHTD, key_BGTD, value_BGTD))
    done = run_or_replace(_KERNELS, query, key, value, Block(scale, causal=True))
    return done.out_BHLD.transpose(1, 2).contiguous(), done.lse_BHL.contiguous()


@_attend.register_fake
def _(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, size = query_BHTD.shape
    lse_BHT = query_BHTD.new_empty((batch, heads, length), dtype=accumulator_dtype(query_BHTD.dtype))
    return query_BHTD.new_empty((batch, length, heads, size)), lse_BHT


@torch.library.custom_op("streamgrad::causal_attention_backward", mutates_args=())
def _attend_backward(
    dout_BTHD: Tensor, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, out_BTHD: Tensor, lse_BHT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = map(with_dense_rows, (query_BHTD, key_BGTD, value_BGTD))
    dout, done = with_dense_rows(dout_BTHD.transpose(1, 2)), Attended(out_BTHD.transpose(1, 2), lse_BHT)
    block = Block(scale, causal=True)
    dquery, pieces = choose(_KERNELS, query, key, value, block).backward(dout, query, key, value, done, block)
    (_, _, dkey, dvalue), *others = pieces  # each over all keys
    for _, _, more_keys, more_values in others:
        dkey, dvalue = dkey + more_keys, dvalue + more_values
    return _by_token(dquery), _by_token(dkey), _by_token(dvalue)


@_attend_backward.register_fake
def _(
    dout_BTHD: Tensor, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, out_BTHD: Tensor, lse_BHT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_by_token(torch.empty_like(tensor)) for tensor in (query_BHTD, key_BGTD, value_BGTD))
    return query, key, value


def _by_token(tensor_BHTD: Tensor) -> Tensor:
    """Return the tensor laid out as (B, T, H, D), as projections and kernels make it."""
    return tensor_BHTD.transpose(1, 2).contiguous().transpose(1, 2)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, ctx.scale = inputs
    ctx.save_for_backward(*operands, *output)


def _differentiate(ctx: Any, dout_BTHD: Tensor, dlse_BHT: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_attend_backward(dout_BTHD, *ctx.saved_tensors, ctx.scale), None


_attend.register_autograd(_differentiate, setup_context=_save)
