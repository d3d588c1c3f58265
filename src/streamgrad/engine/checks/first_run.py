"""The first chunk of a layer's first step, which runs with a graph, as in the stock model.

    out_BLE = layer(h_BLE)          whose graph is dropped

Forward makes no graphs otherwise. So a tensor that a layer keeps would be a constant to whoever reads it: a program whose loss
it is part of, a later layer, or the layer's own next call, of a weight that it makes once. Here it has its graph. What is made
of the layer's input is refused as soon as the chunk is gone; what is made of parameters, where a layer reads it again
(`check_leaves`).

A weight that is made in every call, and left on a module, may be part of a loss of the program: of a gate that is to be sparse,
or of a weight that is pruned. So the last chunk of such layers runs with a graph in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from streamgrad.engine.checks.guards import changed_in_place
from streamgrad.engine.checks.kept_graphs import Graphs, keeping, keeps_on_a_module, leaves_weights, tensors_on_modules
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.module_walk import modules_of, parameters_in
from streamgrad.ops.autograd import own_graph

# Layers that leave a tensor made of their parameters on a module.
_LEAVING: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def is_leaving_weights(layer: nn.Module) -> bool:
    return layer in _LEAVING


@contextmanager
def with_graph() -> Iterator[None]:
    """Let a graph be made within the block that the program's hooks do not see: it will be dropped."""
    with own_graph(), torch.enable_grad():
        yield


class FirstRun:
    """Runs a layer once with a graph, and tells whether it keeps a tensor of that graph.

    Args:
        modules: of the layer, which is the first.
        of_input: whether the input needs a gradient, so that what is made of it may not be kept.
    """

    def __init__(self, modules: Sequence[nn.Module], name: str, *, of_input: bool) -> None:
        self._layer, self._name, self._of_input = modules[0], name, of_input
        self._graphs: Graphs | None = None

    def __call__(self, run: Callable[[Tensor], Tensor], h_BLE: Tensor) -> Tensor:
        """Return `run(h_BLE)` with its graph."""
        before = tensors_on_modules(modules_of(self._layer))
        leaf_BLE = h_BLE.detach().requires_grad_(self._of_input)
        self._graphs = Graphs([leaf_BLE])
        with with_graph():
            # No view of the leaf: torch would say why that cannot be changed in place, and not what is wrong with it here.
            given_BLE = leaf_BLE.clone() if self._of_input else leaf_BLE
            version = given_BLE._version
            out_BLE = run(given_BLE)
        if given_BLE._version != version:
            raise changed_in_place()
        modules = modules_of(self._layer)  # of which some may be new
        leaves = [leaf_BLE, *parameters_in(modules)]
        if keeps_on_a_module(out_BLE, modules, leaves, before):
            raise SeamError(keeping(self._name))
        (_LEAVING.add if leaves_weights(modules, leaves, before) else _LEAVING.discard)(self._layer)
        return out_BLE

    def check(self) -> None:
        """Raise if a tensor of the graph is there, once the caller has dropped it."""
        if self._graphs is not None and self._graphs.are_held(modules_of(self._layer)):
            raise SeamError(keeping(self._name))
