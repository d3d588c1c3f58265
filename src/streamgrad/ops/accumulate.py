"""Sums over chunks: in fp32 for 16-bit terms, so that a thousand terms lose no more than one."""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.ops.triton_support import kernels_for


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a sum over chunks is kept: fp32 for 16-bit terms, else the terms' own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def zeros_for_sum(tensor: Tensor) -> Tensor:
    """An empty sum of terms like `tensor`."""
    return torch.zeros_like(tensor, dtype=accumulator_dtype(tensor.dtype))


def as_sum(tensor: Tensor) -> Tensor:
    """The tensor as a sum to which more terms can be added."""
    return tensor.to(accumulator_dtype(tensor.dtype))


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """`total += left @ right` in `total`'s dtype: 16-bit products would be rounded once a chunk."""
    if left.dtype != total.dtype and total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`total * factor` in the factor's precision, rounded to `dtype` once."""
    kernels = kernels_for(total, "streamgrad.ops.fused_kernels") if total.is_contiguous() and total.numel() else None
    if kernels is not None:
        return kernels.scaled(total, factor, dtype)
    # Both of one dimension or more: by a scalar, a 16-bit total would be multiplied in 16 bits.
    out = torch.empty_like(total, dtype=dtype)
    torch.mul(torch.atleast_1d(total), factor.reshape(1), out=torch.atleast_1d(out))
    return out
