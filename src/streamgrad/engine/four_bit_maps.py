"""Linear maps whose frozen weight bitsandbytes keeps in 4 bits: their products, computed where they are read.

    out = hidden @ W^T,    dhidden = dout @ W,    W = dequantize_4bit(weight)

bitsandbytes itself is not imported, so that other models do not need it: where such a map is found, it is there.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.ops.autograd import Function, first_order_only
from streamgrad.ops.deferred import Deferred

_CLASS = "bitsandbytes.nn.modules", "Linear4bit"
_CALL = nn.Module.__call__  # torch's own at import time, to compare with


def is_four_bit_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map as bitsandbytes has it, which nobody has changed."""
    kind: Any = type(module)
    is_own = (kind.__module__, kind.__name__) == _CLASS and kind.forward.__module__ == _CLASS[0]
    return is_own and nn.Module.__call__ is _CALL and "forward" not in module.__dict__


def four_bit_product(module: Any, hidden: Tensor, *, label: Any) -> Tensor | None:
    """Return `module(hidden)`, deferred, or None where the module does more than multiply: it casts, or adds a bias."""
    weight, autocast = module.weight, torch.is_autocast_enabled(hidden.device.type)
    state = getattr(weight, "quant_state", None)
    if autocast and torch.get_autocast_dtype(hidden.device.type) is not hidden.dtype:
        return None
    if state is None or getattr(state, "packing_format_for_cpu", False) or module.bias is not None or not hidden.numel():
        return None
    if not module.compute_type_is_set or module.compute_dtype not in (None, hidden.dtype):
        return None
    if torch.is_grad_enabled():
        return _Product.apply(hidden, weight, label)
    return _deferred(hidden, weight, label)


def _deferred(hidden: Tensor, weight: Any, label: Any) -> Deferred:
    return Deferred.product(hidden, weight, None, label=label, function=_multiplied, outputs=weight.quant_state.shape[0])


def _multiplied(hidden: Tensor, weight: Any) -> Tensor:
    product: Tensor = importlib.import_module("bitsandbytes").matmul_4bit(hidden, weight.t(), quant_state=weight.quant_state)
    return product


class _Product(Function):
    """Defers `matmul_4bit(hidden, weight)`. Its gradient is that of bitsandbytes, to the bit."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Any, label: Any) -> Tensor:
        ctx.weight = weight
        return _deferred(hidden, weight, label)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        dequantize = importlib.import_module("bitsandbytes.functional").dequantize_4bit
        weight_OI = dequantize(ctx.weight, ctx.weight.quant_state).to(dout.dtype)
        return dout @ weight_OI, None, None
