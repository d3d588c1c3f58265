"""The first chunk of a layer's first step, which runs with a graph, as in the stock model.

    out_BLE = layer(h_BLE)          whose graph is dropped

Forward makes no graphs otherwise. So a tensor that a layer keeps would be a constant to whoever reads it: a program whose loss
it is part of, a later layer, or the layer's own next call, of a weight that it makes once. Here it has its graph. What is made
of the layer's input is refused as soon as the chunk is gone; what is made of parameters, where a layer reads it again
(`check_leaves`). A layer that sets a parameter by the tokens of its first call, as the scale of a quantiser, would set it by a
chunk of them, and is refused too, with all as it was.

A weight that is made in every call, and left on a module, may be part of a loss of the program: of a gate that is to be sparse,
or of a weight that is pruned. So the last chunk of such layers runs with a graph in every step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.guards import changed_in_place
from streamgrad.engine.kept_graphs import Graphs, keeping, keeps_on_a_module, leaves_weights, tensors_on_modules
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.module_walk import modules_of, parameters_in
from streamgrad.ops.autograd import own_graph

# The most elements of a parameter or buffer that may be a scale.
_LARGEST_SCALE = 1 << 16

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
        of_part: whether what it runs on is a part of the sequence.
    """

    def __init__(self, modules: Sequence[nn.Module], name: str, *, of_input: bool, of_part: bool) -> None:
        self._layer, self._name, self._of_input, self._of_part = modules[0], name, of_input, of_part
        self._graphs: Graphs | None = None

    def __call__(self, run: Callable[[Tensor], Tensor], h_BLE: Tensor) -> Tensor:
        """Return `run(h_BLE)` with its graph."""
        before = tensors_on_modules(modules_of(self._layer))
        state = _State(modules_of(self._layer)) if self._of_part else None
        leaf_BLE = h_BLE.detach().requires_grad_(self._of_input)
        self._graphs = Graphs([leaf_BLE])
        with with_graph():
            # No view of the leaf: torch would say why that cannot be changed in place, and not what is wrong with it here.
            given_BLE = leaf_BLE.clone() if self._of_input else leaf_BLE
            version = given_BLE._version
            out_BLE = run(given_BLE)
        if given_BLE._version != version:
            raise changed_in_place()
        if state is not None and (which := state.changed_parameter()) is not None:
            raise SeamError(
                f"{self._name} sets {which} in its first call, by the tokens that it is given, which would be those of a chunk; "
                "call the model once under torch.no_grad() before streamgrad.enable(model)"
            )
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


@contextmanager
def undone_if_refused(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set modules back to what they were where the block ends in a refusal: a user may go on without streaming.

    That is small parameters and buffers, plain numbers and switches, and those in a dict.
    """
    before = _State(modules)
    try:
        yield
    except SeamError:
        before.put_back()
        raise


class _State:
    """What calls of modules may set by the tokens that they are given, and what the modules had before."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._parameters = [
            (f"{type(module).__name__}.{name}", tensor, tensor._version, tensor.detach().clone())
            for module in modules
            for name, tensor in module._parameters.items()
            if type(tensor) is nn.Parameter and _is_small(tensor)
        ]
        self._buffers = [(module, dict(module._buffers)) for module in modules]
        values = {id(buffer): buffer for _, each in self._buffers for buffer in each.values() if buffer is not None}
        self._values = [(buffer, buffer.detach().clone()) for buffer in values.values() if _is_small(buffer)]
        self._plain = [(module, _plain_in(vars(module))) for module in modules]
        self._tables = [(table, dict(table)) for module in modules for table in _tables_of(module)]

    def changed_parameter(self) -> str | None:
        """Return which parameter has other values than before, if one has."""
        # What is changed in place by an operation that autograd sees is refused elsewhere, whenever it happens.
        unseen = ((name, tensor, values) for name, tensor, version, values in self._parameters if tensor._version == version)
        return next((name for name, tensor, values in unseen if not _same(tensor, values)), None)

    def put_back(self) -> None:
        for tensor, values in [*self._values, *((tensor, values) for _, tensor, _, values in self._parameters)]:
            if not _same(tensor, values):
                tensor.data.copy_(values)
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for module, plain in self._plain:
            for name in _plain_in(vars(module)).keys() - plain.keys():
                delattr(module, name)
            vars(module).update(plain)
        for table, before in self._tables:
            table.clear()
            table.update(before)


def _is_small(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() <= _LARGEST_SCALE


def _plain_in(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if type(value) in (bool, int, float)}


def _tables_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of plain values alone that a module's own code has, such as one that tells which adapter is set up."""
    named = [value for name, value in vars(module).items() if type(value) is dict and not name.startswith("_")]
    return [table for table in named if len(_plain_in(table)) == len(table)]


def _same(tensor: Tensor, values: Tensor) -> bool:
    ours, theirs = (each.detach().reshape(-1).view(torch.uint8) for each in (tensor, values))  # of any dtype, NaN too
    return torch.equal(ours, theirs)
