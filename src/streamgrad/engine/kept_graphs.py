"""Finds what a run of a layer leaves behind with its graph, as for a loss of its own, which would get no gradients.

Forward has run the layer without a graph. What a program kept of it then, in a list or on a module, has none; what it keeps of
the run in backward has one, too late for any loss.
"""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


class KeptGraph:
    """Tells whether a tensor that a run makes of `leaf` is held, wherever that is, once the run and its backward are over.

    The node of autograd that collects a leaf's gradient is held by graphs alone, and holds the hook that is looked for first: in
    nearly every run it is gone. If not, all tensors are looked through, for an observer may hold nodes and no tensor
    (`FlopCounterMode` does).
    """

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = weakref.ref(leaf)
        self._node = self._hook = None
        if leaf.requires_grad:
            with torch.enable_grad():
                self._node = leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            hook = _Hook()
            self._node.register_prehook(hook)  # type: ignore[union-attr]
            self._hook = weakref.ref(hook)

    def is_held_on(self) -> bool:
        """Return whether such a tensor is there still. The caller has let go of the leaf, and of what it made of it."""
        self._node = None
        if self._hook is None or self._hook() is None or not self._has_a_tensor():
            return False
        gc.collect()  # a function that a layer defines and that calls itself holds itself, and the tensors it uses
        return self._has_a_tensor()

    def _has_a_tensor(self) -> bool:
        with torch._C.DisableTorchFunctionSubclass():
            alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.grad_fn is not None]
            made = [tensor for tensor in alive if any(leaf is self._leaf() for leaf in leaves_of(tensor))]
        # What graphs save for backward is held by nothing of Python.
        return any(holder is not alive and holder is not made for holder in gc.get_referrers(*made))


class _Hook:
    def __call__(self, *gradients: Any) -> None:
        """Leave the gradients as they are."""


def keeps_what_is_not_its_output(out: Tensor, modules: Sequence[nn.Module], others: Sequence[Tensor]) -> bool:
    """Return whether a run left a tensor on a module that is made of `others` alone and is not in the graph of `out`.

    One that is in there, as a weight that is normed in every call, has its gradient from the output.
    """
    for tensor in _stored_tensors(modules):
        if tensor.grad_fn not in nodes_of(out) and not {id(leaf) for leaf in leaves_of(tensor)}.isdisjoint(map(id, others)):
            return True
    return False


# Of nearly all attributes of modules: to ask whether they are tensors takes ten times as long.
_NO_TENSORS = frozenset({bool, int, float, str, type(None), OrderedDict, set, MethodType, partial})
_OF_ALL_MODULES = frozenset(nn.Module().__dict__)


def _stored_tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors with a graph that modules hold beside parameters and buffers, in lists and dicts too."""
    for module in modules:
        for name, value in module.__dict__.items():
            if name not in _OF_ALL_MODULES:
                yield from _tensors_in(value)


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    kind = type(value)
    if kind in _NO_TENSORS:
        return
    if kind in (dict, list, tuple, deque):
        for each in (value.values() if kind is dict else value) if depth else ():
            yield from _tensors_in(each, depth - 1)
    elif isinstance(value, Tensor) and value.grad_fn is not None:
        yield value


def leaves_of(*outs: Tensor) -> Iterator[Tensor]:
    """Yield the trainable tensors that `outs` depend on."""
    for node in nodes_of(*outs):
        # Only the node of a leaf has no inputs. Asking every node for a variable would double the time.
        variable = None if node.next_functions else getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable


def nodes_of(*outs: Tensor) -> list[Any]:
    """Return the nodes of the graph of `outs`."""
    nodes: list[Any] = list({out.grad_fn: None for out in outs if out.grad_fn is not None})
    seen = set(nodes)
    for node in nodes:  # which grow on the way
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes
