"""Leaves out, where backward runs a layer again, the matrix product whose values nothing reads: the layer's last one.

    out = hidden + down(x)

Backward needs the graph of this sum, and `x`, but not the values of `down(x)`, a quarter of a layer's products. The graph of the
layer's first re-run shows which products its output is a sum of. Later re-runs make these `Deferred`: they are computed only if
something reads them, and one that was read is computed at once from then on. Other products are never deferred, because a layer's
code may pass their address to a kernel. Forward computes everything, and notes more of its output to compare (`guards`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from streamgrad.engine.grad_accumulator import may_be_deferred
from streamgrad.engine.linear_maps import Noting, is_watched, multiplies, product_of
from streamgrad.engine.temporary import temporary_attributes
from streamgrad.ops.autograd import in_transform
from streamgrad.ops.deferred import Deferred

_Map = weakref.ref[nn.Module]  # which may hold on to its layer, by a hook that somebody has given it

# By device: with fewer tokens in a chunk, a GPU has multiplied before Python has arranged that it need not.
_FEWEST_TOKENS = {"cuda": 2048}


class UnreadProducts:
    """One pass through a layer, in chunks of `tokens`, in which products are left out that nothing reads."""

    # The linear maps that make them; a layer that has not been run again is not there.
    _known: ClassVar[weakref.WeakKeyDictionary[nn.Module, list[_Map]]] = weakref.WeakKeyDictionary()

    def __init__(self, layer: nn.Module, tokens: int, device_type: str) -> None:
        self._layer, self._maps = layer, self._known.get(layer)
        self._is_worthwhile = tokens >= _FEWEST_TOKENS.get(device_type, 0)
        self._is_tried = False
        self._made: dict[Any, nn.Module] | None = None  # the maps by the nodes of their products, while these are noted

    @property
    def may_be_left_out(self) -> bool:
        """Return whether a re-run may leave out a product, so that forward has to note what is compared then."""
        return bool(self._maps) and self._is_worthwhile

    def deferred(self, modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Let a re-run of the layer, which has these modules, compute products only where they are read within the block.

        The first re-run notes all products instead.
        """
        if self._maps == [] or not self._is_worthwhile:
            return nullcontext()
        modules = modules[1:]
        if any(map(is_watched, modules)) or _module._has_any_global_hook() or torch._C._len_torch_function_stack():
            return nullcontext()
        kind: type[functools.partial[Tensor]] = functools.partial
        if self._maps is None:
            self._made, kind, forward = {}, Noting, self._noted
        else:
            self._is_tried, forward = True, _forward
            modules = [module for module in (each() for each in self._maps) if module is not None]
        linear_maps = [module for module in modules if multiplies(module)]
        return temporary_attributes((module, "forward", kind(forward, module)) for module in linear_maps)

    def learn(self, out: Tensor) -> None:
        """Note whose products make up the output of a re-run, or which of those nobody has read."""
        if self._made is not None:
            self._known[self._layer] = _maps(_terms(out, self._made))
            self._made = None
        elif self._is_tried:
            self._known[self._layer] = _maps(out.labels() if isinstance(out, Deferred) else [])

    def _noted(self, module: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the module's own forward does, and note which node of the graph has made it."""
        out: Tensor = type(module).forward(module, *args, **kwargs)
        if torch.compiler.is_compiling() or self._made is None:
            return out
        if out.grad_fn is not None and may_be_deferred(out.dtype):
            self._made[out.grad_fn] = module
        return out


def is_left_out(layer: nn.Module, module: nn.Module) -> bool:
    """Return whether re-runs of the layer leave out this map's product."""
    return any(known() is module for known in UnreadProducts._known.get(layer) or ())


def _maps(modules: Iterable[nn.Module]) -> list[_Map]:
    return [weakref.ref(module) for module in dict.fromkeys(modules)]


def _terms(out: Tensor, made: dict[Any, nn.Module]) -> list[nn.Module]:
    """Return the linear maps whose products `out` is a sum of, directly or through copies; `made` has the map of each node."""
    nodes, found = [out.grad_fn], []
    seen = set(nodes)
    for node in nodes:  # which grow on the way
        if node in made:
            found.append(made[node])
        elif node is not None and node.name() in ("AddBackward0", "CloneBackward0"):
            following = {each for each, _ in node.next_functions} - seen
            seen |= following
            nodes += following
    return found


def _forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Return what the module's own forward does, deferred unless its operands are of classes with operations of their own."""
    input, product = args[0] if args else None, None
    if type(input) is Tensor and input.dim() > 1 and not torch.compiler.is_compiling() and not in_transform():
        product = product_of(module, input)
    return type(module).forward(module, *args, **kwargs) if product is None else product
