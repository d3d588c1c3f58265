"""Loads Triton kernels where they run; elsewhere torch code replaces them, with one warning."""

from __future__ import annotations

import functools
import importlib
import warnings
from types import ModuleType

import torch
from torch import Tensor


def kernels_for(tensor: Tensor, module: str) -> ModuleType | None:
    """Return the kernels in `module` if they apply to this tensor (on CUDA, at most fp32) and run; else None."""
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return None
    return _loaded(module, tensor.device)


@functools.cache
def _loaded(module: str, device: torch.device) -> ModuleType | None:
    return importlib.import_module(module) if _run_on(device) else None


@functools.cache
def _run_on(device: torch.device) -> bool:
    """Return whether a trial kernel runs: Triton compiles at run time and may find no compiler."""
    try:
        kernels = importlib.import_module("streamgrad.ops.fused_kernels")
        trial = torch.zeros(1, 16, device=device)
        kernels.gated_forward(trial, trial, "silu")
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"streamgrad: Triton kernels do not run here ({type(error).__name__}: {error}). The head, norms, rotary embeddings "
            "and activations are computed by torch instead: the same values, more time and memory. Install triton and a C "
            "compiler to use the kernels.",
            UserWarning,
            stacklevel=2,
        )
        return False
    return True
