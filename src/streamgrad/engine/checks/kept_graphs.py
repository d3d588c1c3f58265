"""Tells whether a layer keeps something with its graph when it is called: for a loss of its own, or for a later layer to read.

Forward runs a streamed layer without a graph. What is kept of it then has none, so that a loss of it would give no gradients,
silently. So runs with a graph are watched, which must be gone when the output is: of a layer's first chunk (`first_run`), of a
few tokens before the first step in chunks, and of backward. There it is what begins at the layer's input, in every step, and what
begins at parameters alone, in a layer's first run in one chunk. What is kept on a module is looked at in every step too.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from streamgrad.engine.module_walk import OF_ALL_MODULES, hooks_of, parameters_in


def keeping(name: str) -> str:
    """Return the reason for refusing a layer that does."""
    return (
        f"{name}, or a hook in it, keeps a tensor with its graph when it is called, as for a loss of its own or for a later "
        "layer, and forward runs it without a graph, so no gradient would come back through that tensor. Let go of it before the "
        'layer returns, keep tensor.detach() if it is only looked at, or pass keep="all"'
    )


# The hooks that a layer had when a run of it was watched, and left nothing behind.
_WATCHED_WITH: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()


def is_to_be_watched(modules: Sequence[nn.Module]) -> bool:
    """Return whether no run of the layer of these modules has been watched from its parameters on, or one with other hooks."""
    return _WATCHED_WITH.get(modules[0]) != hooks_of(modules)


def note_watched(modules: Sequence[nn.Module]) -> None:
    """Note that a run has been, and has left nothing behind."""
    _WATCHED_WITH[modules[0]] = hooks_of(modules)


def keeps_a_graph(run: Callable[[Tensor], Tensor], h: Tensor, modules: Sequence[nn.Module]) -> bool:
    """Return whether `run(h)`, of a layer with these modules, leaves a tensor with its graph behind, wherever that is."""
    leaves = [h, *parameters_in(modules)]
    graphs = Graphs(leaves)
    out = run(h)
    if keeps_on_a_module(out, modules, leaves):
        return True
    del out
    return graphs.are_held(modules)


def keeps_on_a_module(out: Tensor, modules: Sequence[nn.Module], leaves: Sequence[Tensor], before: Sequence[Tensor] = ()) -> bool:
    """Return whether a run, which made `out` of `leaves`, its input the first, left a tensor on a module that a loss could use.

    That is one made of the input, or one made of the others alone that is not in the graph of `out`, as a weight that is normed
    in every call is. Tensors that were there `before` are not the run's. Quick enough for every step.
    """
    for tensor, begun in _made_on_modules(modules, leaves, before):
        if id(leaves[0]) in begun or tensor.grad_fn not in nodes_from(out.grad_fn):
            return True
    return False


def leaves_weights(modules: Sequence[nn.Module], leaves: Sequence[Tensor], before: Sequence[Tensor] = ()) -> bool:
    """Return whether a run left a tensor on a module that is made of `leaves`."""
    return any(True for _ in _made_on_modules(modules, leaves, before))


def attributes_with_graphs(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the attributes that are or hold a tensor with a graph: of which module, the name and the value."""
    return [(module.__dict__, name, value) for module, name, value, _ in _stored(modules)]


def tensors_on_modules(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the tensors with a graph that modules hold beside parameters and buffers, in lists and dicts too."""
    return [tensor for *_, tensors in _stored(modules) for tensor in tensors]


def _made_on_modules(
    modules: Sequence[nn.Module], leaves: Sequence[Tensor], before: Sequence[Tensor]
) -> Iterator[tuple[Tensor, set[int]]]:
    """Yield the tensors on modules that begin at trainable `leaves`, with the ids of what they begin at."""
    old = set(map(id, before))
    for tensor in tensors_on_modules(modules):
        if id(tensor) not in old and not (begun := _begun_by(tensor)).isdisjoint(map(id, leaves)):
            yield tensor, begun


class Graphs:
    """Those that begin at trainable `leaves`: a layer's input and, in place of its parameters, what it reads.

    Graphs alone hold the nodes of autograd that collect a leaf's gradient. These are given a hook, which is gone with the last of
    them. If it is not, all tensors are looked through, for an observer may hold nodes and no tensor (`FlopCounterMode` does).

    A module may keep a tensor that is made of parameters alone, if the output is made of it: a weight that is normed in every
    call.
    """

    _one_at_a_time: threading.Lock = threading.Lock()  # else one thread's lists would be found to hold another's tensors

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self._first = leaves[0]
        self._leaves = [
            leaf for leaf in leaves if leaf.requires_grad and leaf.grad_fn is None and type(leaf) in (Tensor, nn.Parameter)
        ]
        self._nodes = [get_gradient_edge(leaf).node for leaf in self._leaves]
        hook = _Hook()  # one for all
        for node in self._nodes:
            node.register_prehook(hook)
        self._hook = weakref.ref(hook)

    def are_held(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether there is a tensor of such a graph, but for what modules may keep. The caller holds none."""
        self._nodes = []
        if not self._are_there():
            return False
        with self._one_at_a_time:
            gc.collect(1)  # young cycles: an exception that a layer keeps holds the frame that keeps it
            for _ in range(3):  # nothing is collected while another thread collects
                if not self._are_there() or not self._has_a_tensor(modules):
                    return False
                gc.collect()
            return self._has_a_tensor(modules)

    def _are_there(self) -> bool:
        return self._hook() is not None

    def _has_a_tensor(self, modules: Sequence[nn.Module]) -> bool:
        allowed = set(map(id, tensors_on_modules(modules)))
        watched = {id(leaf) for leaf in self._leaves}
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
        made = []
        for tensor in alive:
            leaves = _begun_by(tensor)
            if id(self._first) in leaves or (id(tensor) not in allowed and not leaves.isdisjoint(watched)):
                made.append(tensor)
        # What graphs save for backward is held by nothing of Python.
        return any(holder is not alive and holder is not made for holder in gc.get_referrers(*made))


def _begun_by(tensor: Tensor) -> set[int]:
    return {id(leaf) for leaf in leaves_from(_node_of(tensor))}


class _Hook:
    def __call__(self, *gradients: Any) -> None:
        """Leave the gradients as they are."""


# Of nearly all attributes of modules: to ask whether they are tensors takes ten times as long.
_NO_TENSORS = frozenset({bool, int, float, str, type(None), OrderedDict, set, MethodType, partial})


def _stored(modules: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, Any, list[Tensor]]]:
    """Yield the attributes of modules that are or hold tensors with a graph: module, name, value and these tensors."""
    for module in modules:
        for name, value in module.__dict__.items():
            kind = type(value)
            if kind not in _NO_TENSORS and name not in OF_ALL_MODULES:
                held = value.values() if kind is dict else value if kind in (list, tuple, deque) else [value]
                found = [each for each in held if isinstance(each, Tensor) and _node_of(each) is not None]
                if found:
                    yield module, name, value, found


def leaves_from(first: Any) -> Iterator[Tensor]:
    """Yield the trainable tensors that backward reaches from a node, the `grad_fn` of what depends on them."""
    for node in nodes_from(first):
        # Only the node of a leaf has no inputs. Asking every node for a variable would double the time.
        variable = None if node.next_functions else getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            yield variable


def nodes_from(first: Any) -> list[Any]:
    """Return a node and those that backward goes to from there."""
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
