"""The parts of a decoder layer between its matrix products, each as one operation forward and one backward.

Arithmetic is fp32 for 16-bit values (fp64 for fp64) and rounded once, at the end. For backward each operation keeps its inputs
(and one number per row for a norm), and no intermediate value.

The functions here are the reference, in torch; on a GPU the Triton kernels of `fused_kernels` run instead.

Shapes: N rows (tokens, or tokens x heads), E width of a row, B batch, H query heads, G key heads, L tokens, D head size.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.autograd import Function, first_order_only, own
from streamgrad.ops.triton_support import kernels_for

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


def code_for(tensor: Tensor) -> Any:
    """Return the module whose functions compute on this tensor: `fused_kernels` on a GPU, else this one."""
    return kernels_for(tensor, "streamgrad.ops.fused_kernels") or sys.modules[__name__]


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor with consecutive values along its last axis, as kernels read it."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _rows(tensor: Tensor) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


# --- RMS norm -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """The RMS norm `x * rsqrt(mean(x^2) + eps) * (weight_offset + weight)`."""

    eps: float
    weight_offset: float = 0.0


def norm_forward(x_NE: Tensor, weight_E: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return the normed rows, and the factor `rsqrt(mean(x^2) + eps)` of each."""
    wide_NE = x_NE.to(accumulator_dtype(x_NE.dtype))
    inverse_N1 = torch.rsqrt(wide_NE.square().mean(dim=-1, keepdim=True) + eps)
    out_NE = wide_NE * inverse_N1 * (weight_E.to(wide_NE.dtype) + offset)
    return out_NE.to(x_NE.dtype), inverse_N1


def norm_backward(dout_NE: Tensor, x_NE: Tensor, inverse_N1: Tensor, weight_E: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows, and of the weight in its accumulator dtype."""
    wide = inverse_N1.dtype
    unit_NE = x_NE.to(wide) * inverse_N1
    dunit_NE = dout_NE.to(wide) * (weight_E.to(wide) + offset)
    dx_NE = inverse_N1 * (dunit_NE - unit_NE * (dunit_NE * unit_NE).mean(dim=-1, keepdim=True))
    return dx_NE.to(x_NE.dtype), (dout_NE.to(wide) * unit_NE).sum(dim=0)


class _RmsNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_E: Tensor, norm: Norm) -> Tensor:
        out_NE, inverse_N1 = code_for(x).norm_forward(_rows(x), weight_E.detach(), norm.eps, norm.weight_offset)
        ctx.norm = norm
        ctx.materialize_grads = False
        ctx.save_for_backward(x, weight_E, inverse_N1)
        return own(out_NE, x.shape)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_E, inverse_N1 = ctx.saved_tensors
        dx_NE, dweight_E = code_for(x).norm_backward(_rows(dout), _rows(x), inverse_N1, weight_E.detach(), ctx.norm.weight_offset)
        return dx_NE.view(x.shape), dweight_E if ctx.needs_input_grad[1] else None, None


def rms_norm(x: Tensor, weight_E: Tensor, norm: Norm) -> Tensor:
    """Return `x * rsqrt(mean(x^2, -1) + norm.eps) * (norm.weight_offset + weight)`."""
    return _RmsNorm.apply(x, weight_E, norm)


# --- Gated activation -----------------------------------------------------------------------------------------------------


def _activation(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return the value and the slope of the activation."""
    if activation == "silu":
        half = torch.sigmoid(gate)
        return gate * half, half * (1.0 + gate * (1.0 - half))
    if activation == "gelu":
        half = 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))
        return gate * half, half + gate * torch.exp(-0.5 * gate.square()) / math.sqrt(2.0 * math.pi)
    assert activation == "gelu_tanh"
    scale, cubic = math.sqrt(2.0 / math.pi), 0.044715
    tanh = torch.tanh(scale * (gate + cubic * gate**3))
    dinner = scale * (1.0 + 3.0 * cubic * gate.square())
    return 0.5 * gate * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh.square()) * dinner


def gated_forward(gate_NE: Tensor, up_NE: Tensor, activation: str, weight_N: Tensor | None = None) -> Tensor:
    """Return `weight * activation(gate) * up`; without weights, of 1."""
    wide = accumulator_dtype(gate_NE.dtype)
    value_NE, _ = _activation(gate_NE.to(wide), activation)
    out_NE = value_NE * up_NE.to(wide)
    return (out_NE if weight_N is None else out_NE * weight_N.to(wide).unsqueeze(1)).to(gate_NE.dtype)


def gated_backward(
    dout_NE: Tensor, gate_NE: Tensor, up_NE: Tensor, activation: str, *, in_place: bool, weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of `gate` and `up`, and of the weights if there are any, in the accumulator dtype.

    With `in_place`, `gate` and `up` are overwritten with theirs.
    """
    wide = accumulator_dtype(gate_NE.dtype)
    value_NE, slope_NE = _activation(gate_NE.to(wide), activation)
    upstream_NE, dweight_N = dout_NE.to(wide), None
    if weight_N is not None:
        dweight_N = (upstream_NE * value_NE * up_NE.to(wide)).sum(dim=1)
        upstream_NE = upstream_NE * weight_N.to(wide).unsqueeze(1)
    dgate_NE, dup_NE = upstream_NE * up_NE.to(wide) * slope_NE, upstream_NE * value_NE
    if in_place:
        return gate_NE.copy_(dgate_NE), up_NE.copy_(dup_NE), dweight_N
    return dgate_NE.to(gate_NE.dtype), dup_NE.to(up_NE.dtype), dweight_N


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str, consumed: bool) -> Tensor:
        ctx.activation, ctx.consumed = activation, consumed
        ctx.materialize_grads = False
        ctx.save_for_backward(gate, up)
        return own(code_for(gate).gated_forward(_rows(gate), _rows(up), activation), gate.shape)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        in_place = ctx.consumed and not torch._C._autograd._get_current_graph_task_keep_graph()
        dgate_NE, dup_NE, _ = code_for(gate).gated_backward(
            _rows(dout), _rows(gate.detach()), _rows(up.detach()), ctx.activation, in_place=in_place
        )
        if in_place:
            # Lets autograd raise if another function has saved them for backward.
            torch.autograd.graph.increment_version((gate, up))
        return dgate_NE.view(gate.shape), dup_NE.view(up.shape), None, None


def gated(gate: Tensor, up: Tensor, activation: str, *, consumed: bool = False) -> Tensor:
    """Return `activation(gate) * up`.

    `consumed` says that nothing else reads `gate` and `up`, the widest tensors of a layer: the last backward pass through their
    graph may then overwrite them with their gradients.
    """
    return _Gated.apply(gate, up, activation, consumed)


# --- Rows of experts ------------------------------------------------------------------------------------------------------


def sum_of_rows(rows_SE: Tensor, place_TK: Tensor, stop_X: Tensor) -> Tensor:
    """Return `rows_SE[place_TK].sum(dim=1)`, added up in the accumulator dtype, without rows from the last stop on."""
    rows_TKE = rows_SE[place_TK].masked_fill((place_TK >= stop_X[-1]).unsqueeze(-1), 0.0)
    return rows_TKE.sum(dim=1, dtype=accumulator_dtype(rows_SE.dtype)).to(rows_SE.dtype)


# --- Rotary embedding -----------------------------------------------------------------------------------------------------


def _rotate_half(x: Tensor) -> Tensor:
    """Return `(-second half, first half)` of the last axis; the transpose of this map is its negative."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotate(heads: Sequence[Tensor], cos_BLD: Tensor, sin_BLD: Tensor, *, back: bool) -> list[Tensor]:
    """Return `x * cos + rotate_half(x) * sin` of each x in `heads`, or with `back` the transpose of that map."""
    wide = accumulator_dtype(heads[0].dtype)
    cos, sin = cos_BLD.to(wide).unsqueeze(1), sin_BLD.to(wide).unsqueeze(1)
    xs = [x_BHLD.to(wide) for x_BHLD in heads]
    outs = [x * cos - _rotate_half(x * sin) if back else x * cos + _rotate_half(x) * sin for x in xs]
    return [out.to(x_BHLD.dtype) for out, x_BHLD in zip(outs, heads, strict=True)]


class _Rotary(Function):
    @staticmethod
    def forward(ctx: Any, query_BHLD: Tensor, key_BGLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos_BLD, sin_BLD)
        ctx.materialize_grads = False
        heads = _dense(query_BHLD), _dense(key_BGLD)
        query, key = code_for(query_BHLD).rotate(heads, _dense(cos_BLD), _dense(sin_BLD), back=False)
        # Otherwise the output of a frozen projection would need a gradient because the other one does.
        ctx.mark_non_differentiable(*(x for x, needed in zip((query, key), ctx.needs_input_grad[:2], strict=True) if not needed))
        return query, key

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *douts: Tensor) -> tuple[Tensor | None, ...]:
        gradients: list[Tensor | None] = [None, None, None, None]
        present = [index for index, dout in enumerate(douts) if dout is not None]
        if present:
            heads = [_dense(douts[index]) for index in present]
            rotated = code_for(heads[0]).rotate(heads, *map(_dense, ctx.saved_tensors), back=True)
            for index, dhead in zip(present, rotated, strict=True):
                gradients[index] = dhead
        return tuple(gradients)


def rotary(query_BHLD: Tensor, key_BGLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x * cos + rotate_half(x) * sin` of queries and keys, with the same angles for every head."""
    return _Rotary.apply(query_BHLD, key_BGLD, cos_BLD, sin_BLD)
