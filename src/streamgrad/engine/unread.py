"""Products that nothing reads: a layer's last one, which a re-run in backward therefore leaves out.

    out = hidden + down(x)

Backward needs the graph of this sum, and `x`. It needs no value of `down(x)`, a quarter of a layer's products. Which linear maps
those are is found out and not looked up: in a layer's first re-run all products are `Deferred`, and computed where they are read.
Those that nobody has read by the end are deferred from then on, in forward too, where the sum is computed last of all: so the two
passes can be compared by what the sum is made of (`guards`).
"""

from __future__ import annotations

import functools
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from streamgrad.engine.grad_accumulator import GradAccumulator, linear
from streamgrad.engine.module_walk import modules_of
from streamgrad.engine.temporary import temporary_attributes
from streamgrad.ops.deferred import Deferred

# torch's own at import time, to compare with: a program may replace them later.
_LINEAR = nn.Linear, nn.Linear.forward, nn.Module.__call__


# By device: with fewer tokens in a chunk, a GPU has multiplied before Python has arranged that it need not.
_FEWEST_TOKENS = {"cuda": 2048}


class UnreadProducts:
    """One pass through a layer, in chunks of `tokens`, in which products are deferred that nothing reads."""

    # The linear maps that make them; a layer that has not been run again is not there.
    _known: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[nn.Module]]] = weakref.WeakKeyDictionary()

    def __init__(self, layer: nn.Module, tokens: int, device_type: str) -> None:
        self._layer, self._is_worthwhile = layer, tokens >= _FEWEST_TOKENS.get(device_type, 0)
        self._is_tried = False

    def deferred_in_forward(self) -> AbstractContextManager[None]:
        """Let products that a re-run will not read be computed as late as possible within the block."""
        return self._deferred(self._known.get(self._layer, []))

    def deferred_again(self) -> AbstractContextManager[None]:
        """Let products be computed only where they are read within the block: all of them in the first re-run."""
        return self._deferred(self._known.get(self._layer))

    def learn(self, out: Tensor) -> None:
        """Note whose products nobody has read, by the output of a re-run."""
        if self._is_tried:
            self._known[self._layer] = out.labels() if isinstance(out, Deferred) else []

    def _deferred(self, maps: list[nn.Module] | None) -> AbstractContextManager[None]:
        """Return a context in which products of `maps`, or of all linear maps in the layer, are deferred if nobody watches."""
        # What is computed where it is read is computed inside of a dispatch mode that counts, and not seen by it.
        counted = maps is None and torch._C._len_torch_dispatch_stack() > 0
        if maps == [] or counted or not self._is_worthwhile:
            return nullcontext()
        modules = modules_of(self._layer)[1:]
        if any(map(_is_watched, modules)) or _module._has_any_global_hook() or torch._C._len_torch_function_stack():
            return nullcontext()
        self._is_tried = True
        linear_maps = [module for module in (modules if maps is None else maps) if is_plain_linear(module)]
        return temporary_attributes((module, "forward", functools.partial(_forward, module)) for module in linear_maps)


def _is_watched(module: nn.Module) -> bool:
    """Return whether somebody may be given the module's output, or a gradient of it, beside its caller."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def nobody_watches(module: nn.Module) -> bool:
    """Return whether only the caller gets a linear map's output: it is torch's own, and no hook or function mode sees it."""
    hooks = _is_watched(module) or _module._global_forward_hooks or torch._C._len_torch_function_stack()
    return is_plain_linear(module) and not hooks


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map as torch has it, which nobody has changed."""
    return (type(module), nn.Linear.forward, nn.Module.__call__) == _LINEAR and "forward" not in module.__dict__


def _forward(module: Any, input: Tensor) -> Tensor:
    """Return `nn.Linear.forward(module, input)`, deferred unless its operands are of classes with operations of their own."""
    plain = type(input) is Tensor and type(module.weight) in (Tensor, nn.Parameter, GradAccumulator) and input.dim() > 1
    if plain and not torch.compiler.is_compiling():
        return linear(input, module.weight, module.bias, label=module)
    return nn.Linear.forward(module, input)
