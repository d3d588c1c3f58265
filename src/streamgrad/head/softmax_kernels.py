"""Triton kernels for the two passes over a chunk of logits: one program per row, fp32 in registers, no copy of the chunk.

They equal `token_statistics` and `product_gradient` of `softmax`, whose torch code is the reference. Memory traffic is the chunk
itself, in the dtype of the product: read once for the statistics, read and overwritten once for the gradient.

Importing this module needs Triton; `softmax` imports it only for tensors on a GPU.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamgrad.head.linear_head import LogitMap

# Entries of a row that a program holds at a time, and the warps that share them.
BLOCK = 4096
WARPS = 8


def token_statistics(
    product_NV: Tensor, targets_N: Tensor, logit_map: LogitMap, *, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `(lse, picked, entropy)` of each row, as `softmax.token_statistics` does; `product_NV` is only read."""
    statistics = product_NV.new_empty((3 if with_entropy else 2, len(product_NV)), dtype=torch.float32)
    lse_N, picked_N = statistics[:2]
    entropy_N = statistics[2] if with_entropy else None
    with torch.cuda.device_of(product_NV):
        _statistics_kernel[(len(product_NV),)](
            product_NV,
            targets_N,
            lse_N,
            picked_N,
            entropy_N,
            logit_map.scale,
            logit_map.inner_scale,
            V=product_NV.shape[1],
            TANH=logit_map.tanh,
            BLOCK=_block(product_NV),
            num_warps=WARPS,
        )
    return lse_N, picked_N, entropy_N


def product_gradient(
    product_NV: Tensor,
    targets_N: Tensor,
    logit_map: LogitMap,
    lse_N: Tensor,
    dlogprobs_N: Tensor,
    entropy_N: Tensor | None = None,
    dentropy_N: Tensor | None = None,
) -> Tensor:
    """Overwrite `product_NV` with the gradient that `softmax.product_gradient` defines, and return it."""
    has_entropy = entropy_N is not None and dentropy_N is not None
    with torch.cuda.device_of(product_NV):
        _gradient_kernel[(len(product_NV),)](
            product_NV,
            targets_N,
            lse_N,
            dlogprobs_N.contiguous(),
            entropy_N if has_entropy else None,
            dentropy_N.contiguous() if has_entropy and dentropy_N is not None else None,
            logit_map.scale,
            logit_map.inner_scale,
            V=product_NV.shape[1],
            TANH=logit_map.tanh,
            BLOCK=_block(product_NV),
            num_warps=WARPS,
        )
    return product_NV


def _block(product_NV: Tensor) -> int:
    return min(BLOCK, triton.next_power_of_2(product_NV.shape[1]))


@triton.jit
def _tanh(x):
    # exp of a negative number cannot overflow. The absolute error, which is what matters for a logit, is that of fp32.
    decay = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - decay) / (1.0 + decay)
    return tl.where(x < 0, -size, size)


@triton.jit
def _mapped(z, scale, inner_scale, TANH: tl.constexpr):
    if TANH:
        z = _tanh(z * inner_scale)
    return z * scale


@triton.jit
def _statistics_kernel(
    product,
    targets,
    lse_out,
    picked_out,
    entropy_out,
    scale,
    inner_scale,
    V: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # With m the largest logit so far: total = sum e^(z - m), spread = sum e^(z - m) (z - m); both are re-based when m grows.
    row = tl.program_id(0).to(tl.int64)  # row * V exceeds 2^31
    row_start = product + row * V
    m = -1e30  # finite, so that m - m is a number
    total = tl.zeros([BLOCK], tl.float32)  # one sum per lane, reduced at the end: a block then waits for its maximum only
    spread = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        z = _mapped(tl.load(row_start + columns, mask=inside, other=0.0).to(tl.float32), scale, inner_scale, TANH)
        z = tl.where(inside, z, float("-inf"))
        new_m = tl.maximum(m, tl.max(z, axis=0))
        shift = m - new_m
        shrink = tl.exp(shift)
        e = tl.exp(z - new_m)
        if entropy_out is not None:
            # A term of probability 0 is 0, not 0 times -inf.
            spread = (spread + total * shift) * shrink + e * tl.maximum(z - new_m, -1e4)
        total = total * shrink + e
        m = new_m
    row_total = tl.sum(total, axis=0)
    log_total = tl.log(row_total)
    tl.store(lse_out + row, m + log_total)
    picked = tl.load(row_start + tl.load(targets + row)).to(tl.float32)
    tl.store(picked_out + row, _mapped(picked, scale, inner_scale, TANH))
    if entropy_out is not None:
        # log p = z - m - log total, so that -sum p log p = log total - spread / total.
        tl.store(entropy_out + row, log_total - tl.sum(spread, axis=0) / row_total)


@triton.jit
def _gradient_kernel(
    product,
    targets,
    lse,
    dlogprobs,
    entropy,
    dentropy,
    scale,
    inner_scale,
    V: tl.constexpr,
    TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_start = product + row * V
    target = tl.load(targets + row)
    row_lse = tl.load(lse + row)
    dlogprob = tl.load(dlogprobs + row)
    for start in range(0, V, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < V
        z = tl.load(row_start + columns, mask=inside, other=0.0).to(tl.float32)
        slope = scale
        if TANH:
            t = _tanh(z * inner_scale)
            slope = (1.0 - t * t) * (scale * inner_scale)
            z = t
        logp = z * scale - row_lse
        factor = dlogprob
        if dentropy is not None:
            factor = dlogprob + tl.load(dentropy + row) * (logp + tl.load(entropy + row))
        dz = -tl.exp(logp) * factor
        dz = tl.where(columns == target, dz + dlogprob, dz)
        tl.store(row_start + columns, (dz * slope).to(product.dtype.element_ty), mask=inside)
