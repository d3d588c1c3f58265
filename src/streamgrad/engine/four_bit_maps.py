"""Linear maps whose frozen weight bitsandbytes keeps in 4 bits: their products, computed where they are read.

    out = hidden @ W^T,    dhidden = dout @ W,    W = dequantize_4bit(weight)

bitsandbytes itself is not imported, so that other models do not need it: where such a map is found, it is there.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.grad_accumulator import may_be_deferred
from streamgrad.ops.autograd import Function, first_order_only
from streamgrad.ops.deferred import Deferred

_MODULES, _FUNCTIONS = "bitsandbytes.nn.modules", "bitsandbytes.autograd._functions"
_CALL = nn.Module.__call__  # torch's own at import time, to compare with


def is_four_bit_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map as bitsandbytes has it, which nobody has changed."""
    kind: Any = type(module)
    if (kind.__module__, kind.__name__) != (_MODULES, "Linear4bit") or "forward" in module.__dict__:
        return False
    library: Any = sys.modules["bitsandbytes"]
    own = _is_of(kind.forward, _MODULES) and _is_of(library.matmul_4bit, _FUNCTIONS)
    return own and _is_of(sys.modules[_FUNCTIONS].MatMul4Bit.backward, _FUNCTIONS) and nn.Module.__call__ is _CALL


def _is_of(function: Any, name: str) -> bool:
    """Return whether a function's code stands in the module of this name: a wrapper's does not, whatever it says of itself."""
    return getattr(function, "__code__", None) is not None and function.__code__.co_filename == sys.modules[name].__file__


def four_bit_product(module: Any, hidden: Tensor, *, label: Any, given: Tensor | None = None) -> Tensor | None:
    """Return `module(hidden)`, deferred or as `given`; None where the module does more than multiply, as cast or add a bias."""
    weight, autocast = module.weight, torch.is_autocast_enabled(hidden.device.type)
    state = getattr(weight, "quant_state", None)
    if autocast and torch.get_autocast_dtype(hidden.device.type) is not hidden.dtype:
        return None
    if state is None or getattr(state, "packing_format_for_cpu", False) or module.bias is not None or not hidden.numel():
        return None
    if not module.compute_type_is_set or module.compute_dtype not in (None, hidden.dtype):
        return None
    if tuple(state.shape) != (module.out_features, module.in_features):
        return None  # quantised as its transpose
    if given is None and not may_be_deferred(hidden.dtype):
        return None
    if torch.is_grad_enabled():
        return _Product.apply(hidden, weight, label, given)
    return _deferred(hidden, weight, label) if given is None else given


def _deferred(hidden: Tensor, weight: Any, label: Any) -> Deferred:
    return Deferred.product(hidden, weight, None, label=label, function=_multiplied, outputs=weight.quant_state.shape[0])


def _multiplied(hidden: Tensor, weight: Any) -> Tensor:
    library: Any = sys.modules["bitsandbytes"]
    product: Tensor = library.matmul_4bit(hidden, weight.t(), quant_state=weight.quant_state)
    return product


class _Product(Function):
    """Defers `matmul_4bit(hidden, weight)`, or is given it. Its gradient is that of bitsandbytes, to the bit."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Any, label: Any, given: Tensor | None) -> Tensor:
        ctx.weight = weight
        ctx.materialize_grads = False
        return _deferred(hidden, weight, label) if given is None else given.detach()

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        library: Any = sys.modules["bitsandbytes.functional"]
        packed = ctx.weight.view(-1, 1)  # of one that lies as a row, the transpose would be returned
        weight_OI = library.dequantize_4bit(packed, ctx.weight.quant_state).to(dout.dtype)
        return dout @ weight_OI, None, None, None
