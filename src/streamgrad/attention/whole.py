"""Causal attention of whole sequences as an operator of torch, for layers that torch.compile has made a graph of.

The compiler does not look inside of it. So the kernel is chosen in every call, as for chunks (`attention.backends`), and one
graph runs flash for lengths that come once and cuDNN, which is faster, for those that come again.

The operators are defined by `torch.library.Library`: one of `torch.library.custom_op` looks at its results in every call, which
takes longer than all the rest of the Python code here.

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

_LIBRARY = torch.library.Library("streamgrad", "DEF")
_LIBRARY.define("causal_attention(Tensor query, Tensor key, Tensor value, float scale) -> (Tensor, Tensor)")
_LIBRARY.define(
    "causal_attention_backward(Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
_OPERATORS = torch.ops.streamgrad


def causal_attention(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> Tensor:
    """Return softmax(query @ key^T * scale, over each token and those before it) @ value, as (B, T, H, D)."""
    out_BTHD: Tensor = _OPERATORS.causal_attention(query_BHTD, key_BGTD, value_BGTD, scale)[0]
    return out_BTHD


@torch.library.impl(_LIBRARY, "causal_attention", "CompositeExplicitAutograd")
def _attend(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    query, key, value = map(with_dense_rows, (query_BHTD, key_BGTD, value_BGTD))
    done = run_or_replace(_KERNELS, query, key, value, Block(scale, causal=True))
    return done.out_BHLD.transpose(1, 2).contiguous(), done.lse_BHL.contiguous()


@torch.library.register_fake("streamgrad::causal_attention", lib=_LIBRARY)
def _(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, length, size = query_BHTD.shape
    lse_BHT = query_BHTD.new_empty((batch, heads, length), dtype=accumulator_dtype(query_BHTD.dtype))
    return query_BHTD.new_empty((batch, length, heads, size)), lse_BHT


@torch.library.impl(_LIBRARY, "causal_attention_backward", "CompositeExplicitAutograd")
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


@torch.library.register_fake("streamgrad::causal_attention_backward", lib=_LIBRARY)
def _(
    dout_BTHD: Tensor, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, out_BTHD: Tensor, lse_BHT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (_by_token(torch.empty_like(tensor)) for tensor in (query_BHTD, key_BGTD, value_BGTD))
    return query, key, value


def _by_token(tensor_BHTD: Tensor) -> Tensor:
    """Return the tensor laid out as (B, T, H, D), as projections and kernels make it."""
    return tensor_BHTD.transpose(1, 2).contiguous().transpose(1, 2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        made = _without_graph(query_BHTD, key_BGTD, value_BGTD, scale)
        ctx.scale = scale
        ctx.save_for_backward(query_BHTD, key_BGTD, value_BGTD, *made)
        ctx.mark_non_differentiable(made[1])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_OPERATORS.causal_attention_backward.default(gradients[0], *ctx.saved_tensors, ctx.scale), None


def _without_graph(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        made: tuple[Tensor, Tensor] = _OPERATORS.causal_attention.default(query_BHTD, key_BGTD, value_BGTD, scale)
    return made


@torch.library.impl(_LIBRARY, "causal_attention", "Autograd")
def _(query_BHTD: Tensor, key_BGTD: Tensor, value_BGTD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    operands = query_BHTD, key_BGTD, value_BGTD
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        made: tuple[Tensor, Tensor] = _Attention.apply(*operands, scale)
        return made
    return _without_graph(*operands, scale)
