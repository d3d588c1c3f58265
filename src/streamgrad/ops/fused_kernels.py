"""Triton kernels for the parts of a decoder layer between its matrix products: fp32 in registers, one rounding at the end.

They equal the torch functions of the same names in `fused`, which are their reference. Importing this module needs Triton;
`fused` imports it only for tensors on a GPU. Offsets are 64-bit: rows x width exceeds 2^31. Triton compiles a second kernel for
numbers that 16 divides, unless told not to, as for the number of rows, which is only compared with.

Shapes: N rows, E width of a row, B batch, H and G heads, L tokens, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of each operand that a program holds at a time.
TILE = 4096


def norm_forward(x_NE: Tensor, weight_E: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    rows, width = x_NE.shape
    out_NE, inverse_N1 = torch.empty_like(x_NE), x_NE.new_empty((rows, 1), dtype=torch.float32)
    block, tile = _row_tile(width)
    with torch.cuda.device_of(x_NE):
        _norm_forward_kernel[(_parts(rows, tile),)](
            x_NE, weight_E, out_NE, inverse_N1, rows, x_NE.stride(0), eps, offset, E=width, ROWS=tile, BLOCK=block, num_warps=8
        )
    return out_NE, inverse_N1


def norm_backward(dout_NE: Tensor, x_NE: Tensor, inverse_N1: Tensor, weight_E: Tensor, offset: float) -> tuple[Tensor, Tensor]:
    rows, width = x_NE.shape
    block, tile = _row_tile(width)
    # Each program sums the weight's gradient over its own rows; the sum over programs is taken at the end. Two programs keep a
    # processor's memory busy, and more of them write more sums: with 2,048 rows of 2,560 eight take 22 us, two take 16.
    programs = min(_parts(rows, tile), 2 * _processors(x_NE.device))
    dx_NE, partial = torch.empty_like(x_NE), x_NE.new_empty((programs, width), dtype=torch.float32)
    with torch.cuda.device_of(x_NE):
        _norm_backward_kernel[(programs,)](
            dout_NE, x_NE, inverse_N1, weight_E, dx_NE, partial, rows, dout_NE.stride(0), x_NE.stride(0), offset,
            E=width, ROWS=tile, BLOCK=block, num_warps=8,
        )  # fmt: skip
    return dx_NE, partial.sum(dim=0)


def gated_forward(gate_NE: Tensor, up_NE: Tensor, activation: str, weight_N: Tensor | None = None) -> Tensor:
    rows, width = gate_NE.shape
    out_NE = gate_NE.new_empty((rows, width))
    block = min(TILE, _power_of_2(width))
    with torch.cuda.device_of(gate_NE):
        _gated_forward_kernel[(rows, _parts(width, block))](
            gate_NE, up_NE, out_NE, weight_N, gate_NE.stride(0), up_NE.stride(0), E=width, ACTIVATION=activation,
            WEIGHTED=weight_N is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return out_NE


def gated_backward(
    dout_NE: Tensor, gate_NE: Tensor, up_NE: Tensor, activation: str, *, in_place: bool, weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, width = gate_NE.shape
    dgate_NE, dup_NE = (gate_NE, up_NE) if in_place else (gate_NE.new_empty((rows, width)) for _ in range(2))
    block = min(TILE, _power_of_2(width))
    parts = _parts(width, block)
    # Each program sums the weight's gradient over its own part of a row.
    partial = None if weight_N is None else gate_NE.new_empty((rows, parts), dtype=torch.float32)
    with torch.cuda.device_of(gate_NE):
        _gated_backward_kernel[(rows, parts)](
            dout_NE, gate_NE, up_NE, dgate_NE, dup_NE, weight_N, partial,
            dout_NE.stride(0), gate_NE.stride(0), up_NE.stride(0), dgate_NE.stride(0), dup_NE.stride(0),
            E=width, ACTIVATION=activation, WEIGHTED=weight_N is not None, BLOCK=block, num_warps=_warps(block),
        )  # fmt: skip
    return dgate_NE, dup_NE, None if partial is None else partial.view(rows) if parts == 1 else partial.sum(dim=1)


def sum_of_rows(rows_SE: Tensor, place_TK: Tensor, stop_X: Tensor) -> Tensor:
    (tokens, each), width = place_TK.shape, rows_SE.shape[1]
    out_TE = rows_SE.new_empty((tokens, width))
    block = min(TILE, _power_of_2(width))
    with torch.cuda.device_of(rows_SE):
        _sum_of_rows_kernel[(tokens, _parts(width, block))](
            rows_SE, place_TK, stop_X, out_TE, rows_SE.stride(0), E=width, K=each, X=len(stop_X), BLOCK=block,
            num_warps=_warps(block),
        )  # fmt: skip
    return out_TE


def rotate(heads: Sequence[Tensor], cos_BLD: Tensor, sin_BLD: Tensor, *, back: bool) -> list[Tensor]:
    """Return `fused.rotate` laid out in memory as (B, L, H, D), as projections make and consume heads."""
    batch, _, length, size = heads[0].shape
    outs = [x_BHLD.new_empty((batch, length, x_BHLD.shape[1], size)) for x_BHLD in heads]
    cos_BLD, sin_BLD = cos_BLD.expand(batch, -1, -1), sin_BLD.expand(batch, -1, -1)
    first, second = heads[0], heads[-1]
    with torch.cuda.device_of(first):
        _rotate_kernel[(length, batch)](
            first, second, cos_BLD, sin_BLD, outs[0], outs[-1], *first.stride()[:3], *second.stride()[:3],
            *cos_BLD.stride()[:2], *sin_BLD.stride()[:2], H=first.shape[1], G=second.shape[1] if len(heads) == 2 else 0,
            HALF=size // 2, BACK=back, H_BLOCK=_power_of_2(first.shape[1]), G_BLOCK=_power_of_2(second.shape[1]),
            BLOCK=_power_of_2(size // 2), num_warps=4,
        )  # fmt: skip
    return [out_BLHD.transpose(1, 2) for out_BLHD in outs]


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `accumulate.scaled` of a contiguous tensor; torch's product with a one-element tensor takes three times as long."""
    out = torch.empty_like(total, dtype=dtype)
    with torch.cuda.device_of(total):
        _scaled_kernel[(_parts(total.numel(), TILE),)](total, factor, out, total.numel(), BLOCK=TILE, num_warps=8)
    return out


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _row_tile(width: int) -> tuple[int, int]:
    """Return the power of 2 that a program reserves for a row of `width`, and how many rows it holds at a time."""
    block = _power_of_2(width)
    return block, max(1, TILE // block)


def _warps(block: int) -> int:
    """Return how many warps share a block of a row: threads with fewer than 16 values of it each would wait for memory."""
    return max(1, min(8, block // 512))


# Triton's own versions of these two are made for use in kernels, and slow outside.
def _power_of_2(count: int) -> int:
    """Return the smallest power of 2 that is at least `count`."""
    return 1 << (count - 1).bit_length()


def _parts(count: int, size: int) -> int:
    """Return how many parts of `size` cover `count`."""
    return -(-count // size)


@triton.jit
def _scaled_kernel(total, factor, out, count, BLOCK: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    value = tl.load(total + places, mask=inside).to(tl.float32) * tl.load(factor)
    tl.store(out + places, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _norm_forward_kernel(
    x, weight, out, inverse, rows, x_stride, eps, offset, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < E)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=1, keep_dims=True) / E + eps)
    factor = tl.load(weight + column, mask=column < E, other=0.0).to(tl.float32) + offset
    tl.store(out + row * E + column, values * scale * factor, mask=inside)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _norm_backward_kernel(
    dout, x, inverse, weight, dx, partial, rows, dout_stride, x_stride, offset,
    E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    factor = tl.load(weight + column, mask=column < E, other=0.0).to(tl.float32) + offset
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=3):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < E)
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)
        unit = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * scale
        upstream = tl.load(dout + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
        dweight += upstream * unit
        dunit = upstream * factor
        projection = tl.sum(dunit * unit, axis=1, keep_dims=True) / E
        tl.store(dx + row * E + column, scale * (dunit - unit * projection), mask=inside)
    tl.store(partial + tl.program_id(0) * E + column, tl.sum(dweight, axis=0, keep_dims=True), mask=column < E)


@triton.jit
def _activation(gate, ACTIVATION: tl.constexpr):
    """Return the value and the slope of the activation."""
    if ACTIVATION == "silu":
        half = tl.sigmoid(gate)
        return gate * half, half * (1.0 + gate * (1.0 - half))
    elif ACTIVATION == "gelu":
        half = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        return gate * half, half + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
    else:
        # tanh(u) = 2 sigmoid(2u) - 1
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        tanh = 2.0 * tl.sigmoid(2.0 * inner) - 1.0
        dinner = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * gate * gate)
        return 0.5 * gate * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * gate * (1.0 - tanh * tanh) * dinner


@triton.jit
def _gated_forward_kernel(
    gate, up, out, weight, gate_stride, up_stride,
    E: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    gate_values = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up_values = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activation(gate_values, ACTIVATION)
    if WEIGHTED:
        value *= tl.load(weight + row).to(tl.float32)
    tl.store(out + row * E + column, value * up_values, mask=inside)


@triton.jit
def _gated_backward_kernel(
    dout, gate, up, dgate, dup, weight, dweight, dout_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    E: tl.constexpr, ACTIVATION: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    upstream = tl.load(dout + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
    gate_values = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up_values = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activation(gate_values, ACTIVATION)
    if WEIGHTED:
        tl.store(dweight + row * tl.num_programs(1) + tl.program_id(1), tl.sum(upstream * value * up_values, axis=0))
        upstream *= tl.load(weight + row).to(tl.float32)
    tl.store(dgate + row * dgate_stride + column, upstream * up_values * slope, mask=inside)
    tl.store(dup + row * dup_stride + column, upstream * value, mask=inside)


@triton.jit
def _sum_of_rows_kernel(rows, place, stop, out, stride, E: tl.constexpr, K: tl.constexpr, X: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < E
    last = tl.load(stop + X - 1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token * K + k).to(tl.int64)
        total += tl.load(rows + row * stride + column, mask=inside & (row < last), other=0.0).to(tl.float32)
    tl.store(out + token * E + column, total, mask=inside)


@triton.jit
def _rotate_kernel(
    x, y, cos, sin, x_out, y_out, x_b, x_h, x_l, y_b, y_h, y_l, cos_b, cos_l, sin_b, sin_l,
    H: tl.constexpr, G: tl.constexpr, HALF: tl.constexpr, BACK: tl.constexpr,
    H_BLOCK: tl.constexpr, G_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate a token's H heads of x and G heads of y; G may be 0."""
    token, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row = batch * tl.num_programs(0) + token
    column = tl.arange(0, BLOCK)[None, :]
    cos += batch * cos_b + token * cos_l
    sin += batch * sin_b + token * sin_l
    cos_first = tl.load(cos + column, mask=column < HALF, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + column, mask=column < HALF, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
    if BACK:  # the transpose of a rotation
        sin_first, sin_second = -sin_second, -sin_first
    x_out += row * H * 2 * HALF
    x += batch * x_b + token * x_l
    _rotate_heads(x, x_h, x_out, cos_first, cos_second, sin_first, sin_second, H, HALF, H_BLOCK, BLOCK)
    if G > 0:
        y_out += row * G * 2 * HALF
        y += batch * y_b + token * y_l
        _rotate_heads(y, y_h, y_out, cos_first, cos_second, sin_first, sin_second, G, HALF, G_BLOCK, BLOCK)


@triton.jit
def _rotate_heads(
    x, x_h, out, cos_first, cos_second, sin_first, sin_second,
    H: tl.constexpr, HALF: tl.constexpr, H_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, H_BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (head < H) & (column < HALF)
    first = tl.load(x + head * x_h + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + head * x_h + HALF + column, mask=inside, other=0.0).to(tl.float32)
    out += head * (2 * HALF)
    tl.store(out + column, first * cos_first - second * sin_first, mask=inside)
    tl.store(out + HALF + column, second * cos_second + first * sin_second, mask=inside)
