"""Sums over chunks, in fp32 for 16-bit terms: the error of a thousand terms is then that of one."""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.ops.triton_support import kernels_for


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a sum over chunks: fp32 for 16-bit terms, else the terms' own."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def zeros_for_sum(tensor: Tensor) -> Tensor:
    """Return a sum of no terms yet, shaped like `tensor`."""
    return torch.zeros_like(tensor, dtype=accumulator_dtype(tensor.dtype))


def as_sum(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of a sum, so that terms can be added to it."""
    return tensor.to(accumulator_dtype(tensor.dtype))


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute `total += left @ right` in `total`'s dtype: a 16-bit product would be rounded in every chunk."""
    if left.dtype != total.dtype and total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `total * factor`, computed in the factor's precision and rounded to `dtype` once."""
    kernels = kernels_for(total, "streamgrad.ops.fused_kernels") if total.is_contiguous() and total.numel() else None
    if kernels is not None:
        return kernels.scaled(total, factor, dtype)
    # A factor without dimensions does not promote: torch would multiply a 16-bit total in 16 bits.
    out = torch.empty_like(total, dtype=dtype)
    torch.mul(torch.atleast_1d(total), factor.reshape(1), out=torch.atleast_1d(out))
    return out
