"""Tells whether a layer keeps something with its graph when it is called: for a loss of its own, or for a later layer to read.

Forward runs a streamed layer without a graph. What is kept of it then has none, so that a loss of it would give no gradients,
silently. So the layer is run once with a graph, on a few tokens, and the graph must be gone when its output is.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from streamgrad.engine.module_walk import parameters_in


def keeps_a_graph(run: Callable[[Tensor], Tensor], h: Tensor, modules: Sequence[nn.Module]) -> bool:
    """Return whether `run(h)`, of a layer with these modules, leaves a tensor with its graph behind, wherever that is.

    A module may keep one that is made of parameters alone, if the output is made of it: a weight that is normed in every call.
    """
    parameters = [p for p in parameters_in(modules) if p.requires_grad and type(p) in (Tensor, nn.Parameter)]
    graphs = _Graphs(h, parameters)
    out = run(h)
    nodes = set(nodes_of(out))
    if any(tensor.grad_fn not in nodes for tensor in _stored_tensors(modules)):
        return True
    del out, nodes
    return graphs.are_held(modules)


class _Graphs:
    """Those that begin at `h` or at one of the `parameters`.

    Graphs alone hold the nodes of autograd that collect a leaf's gradient. Each is given a hook, which is gone with it. If one is
    not, all tensors are looked through, for an observer may hold nodes and no tensor (`FlopCounterMode` does).
    """

    _one_at_a_time: threading.Lock = threading.Lock()  # else the lists of one thread would be found to hold another's tensors

    def __init__(self, h: Tensor, parameters: Sequence[Tensor]) -> None:
        self._h, self._parameters = h, parameters
        self._nodes = [get_gradient_edge(leaf).node for leaf in (h, *parameters)]
        hooks = [_Hook() for _ in self._nodes]
        for node, hook in zip(self._nodes, hooks, strict=True):
            node.register_prehook(hook)
        self._hooks = [weakref.ref(hook) for hook in hooks]

    def are_held(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether there is a tensor of such a graph, but for what modules may keep. The caller holds none."""
        self._nodes = []
        if not self._are_there():
            return False
        gc.collect(1)  # young cycles: an exception that a layer keeps holds the frame that keeps it
        if not self._are_there() or not self._has_a_tensor(modules):
            return False
        gc.collect()
        return self._has_a_tensor(modules)

    def _are_there(self) -> bool:
        return any(hook() is not None for hook in self._hooks)

    def _has_a_tensor(self, modules: Sequence[nn.Module]) -> bool:
        allowed = {id(tensor) for tensor in _stored_tensors(modules)}
        parameters = {id(parameter) for parameter in self._parameters}
        with self._one_at_a_time:
            alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
            made = []
            for tensor in alive:
                leaves = {id(leaf) for leaf in leaves_of(tensor)}
                if id(self._h) in leaves or (id(tensor) not in allowed and not leaves.isdisjoint(parameters)):
                    made.append(tensor)
            # What graphs save for backward is held by nothing of Python.
            return any(holder is not alive and holder is not made for holder in gc.get_referrers(*made))


class _Hook:
    def __call__(self, *gradients: Any) -> None:
        """Leave the gradients as they are."""


# Of nearly all attributes of modules: to ask whether they are tensors takes ten times as long.
_NO_TENSORS = frozenset({bool, int, float, str, type(None), OrderedDict, set, MethodType, partial})
_OF_ALL_MODULES = frozenset(nn.Module().__dict__)


def _stored_tensors(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors with a graph that modules hold beside parameters and buffers, in lists and dicts too."""
    for module in modules:
        for name, value in module.__dict__.items():
            kind = type(value)
            if kind not in _NO_TENSORS and name not in _OF_ALL_MODULES:
                held = value.values() if kind is dict else value if kind in (list, tuple, deque) else [value]
                yield from (each for each in held if isinstance(each, Tensor) and _node_of(each) is not None)


def leaves_of(out: Tensor) -> Iterator[Tensor]:
    """Yield the trainable tensors that `out` depends on."""
    for node in nodes_of(out):
        # Only the node of a leaf has no inputs. Asking every node for a variable would double the time.
        variable = None if node.next_functions else getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable


def nodes_of(out: Tensor) -> list[Any]:
    """Return the nodes of the graph of `out`."""
    first = _node_of(out)
    nodes: list[Any] = [] if first is None else [first]
    seen = set(nodes)
    for node in nodes:  # which grow on the way
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return nodes


def _node_of(tensor: Tensor) -> Any:
    """Return the tensor's `grad_fn`; None for a view that torch has none for, as it was written to where that is not allowed."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.grad_fn
    except RuntimeError:
        return None
