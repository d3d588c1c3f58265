"""Tells whether a module is an unmodified linear map, makes its product, and tells whether hooks or function modes see that."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from streamgrad.engine.four_bit_maps import four_bit_product, is_four_bit_linear
from streamgrad.engine.grad_accumulator import GradAccumulator, linear

# torch's own at import time, to compare with: a program may replace them later.
_LINEAR = nn.Linear, nn.Linear.forward, nn.Module.__call__


class Noting(functools.partial[Tensor]):
    """What streamgrad sets as a map's forward for one run, to note its calls: it calls the map's own and keeps no tensor."""


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map as torch has it, which nobody has changed."""
    return _is_linear(module) and "forward" not in module.__dict__


def multiplies(module: nn.Module) -> bool:
    """Return whether a module is an unmodified linear map of torch, or of bitsandbytes in 4 bits."""
    return is_plain_linear(module) or is_four_bit_linear(module)


def product_of(module: Any, input: Tensor, *, given: Tensor | None = None) -> Tensor | None:
    """Return the product of a map that `multiplies`, with its graph: `given`, or deferred, with the module as its label.

    None where the module does more than multiply, or its operands are of classes with operations of their own.
    """
    if type(module) is not nn.Linear:
        return four_bit_product(module, input, label=module, given=given)
    if type(module.weight) not in (Tensor, nn.Parameter, GradAccumulator) or input.is_complex():
        return None
    return linear(input, module.weight, module.bias, label=module, given=given)


def is_watched(module: nn.Module) -> bool:
    """Return whether somebody may be given the module's output, or a gradient of it, beside its caller."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def nobody_watches(module: nn.Module) -> bool:
    """Return whether only the caller gets a linear map's output: it is torch's own, and no hook or function mode sees it."""
    hooks = is_watched(module) or _module._global_forward_hooks or torch._C._len_torch_function_stack()
    return _is_linear(module) and type(module.__dict__.get("forward")) in (type(None), Noting) and not hooks


def _is_linear(module: nn.Module) -> bool:
    return (type(module), nn.Linear.forward, nn.Module.__call__) == _LINEAR
