"""What the modules of a layer have been set to, and how to set them back.

    with left_as_they_were(modules): ...        with undone_if_refused(modules): ...

A layer may set itself up by the tokens of its first call: a scale, or a switch that says that there is one. A call on some of the
tokens, to measure the layer or to try it, would set it up by those. And where a first call is refused, a user may go on without
streaming. Put back are small parameters and buffers, attributes of the modules' own, and numbers in their dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.module_walk import OF_ALL_MODULES

# The most elements of a parameter or buffer that may be a scale.
_LARGEST_SCALE = 1 << 16


class ModuleState:
    """The state of modules at one time."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tensors = [
            (f"{type(module).__name__}.{name}", tensor, tensor._version, tensor.detach().clone())
            for module in modules
            for name, tensor in {**module._parameters, **module._buffers}.items()
            if tensor is not None and type(tensor) in (nn.Parameter, Tensor) and _is_small(tensor)
        ]
        self._buffers = [(module, dict(module._buffers)) for module in modules]
        self._attributes = [(module, _attributes_of(module)) for module in modules]
        self._tables = [(table, dict(table)) for _, own in self._attributes for table in own.values() if _is_table(table)]

    def changed_unseen(self) -> str | None:
        """Return which parameter or buffer has other values than before, if one has, by no operation that autograd sees.

        What such an operation changes in place is refused elsewhere, whenever it happens.
        """
        unseen = ((name, tensor, values) for name, tensor, version, values in self._tensors if tensor._version == version)
        return next((name for name, tensor, values in unseen if not _same(tensor, values)), None)

    def set_since(self) -> dict[tuple[int, str], Any]:
        """Return the attributes that are another number or another tensor without a graph now, by module and name."""
        return {
            (id(module), f"{type(module).__name__}.{name}"): value
            for module, before in self._attributes
            for name, value in _attributes_of(module).items()
            if (type(value) in (bool, int, float) or (isinstance(value, Tensor) and value.grad_fn is None))
            and value is not before.get(name)
        }

    def put_back(self) -> None:
        for _, tensor, _, values in self._tensors:
            if not _same(tensor, values):
                tensor.data.copy_(values)
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)
        for module, before in self._attributes:
            for name in _attributes_of(module).keys() - before.keys():
                delattr(module, name)
            vars(module).update(before)
        for table, before in self._tables:
            table.clear()
            table.update(before)


@contextmanager
def undone_if_refused(modules: Sequence[nn.Module]) -> Iterator[ModuleState]:
    """Put modules back where the block ends in a refusal."""
    before = ModuleState(modules)
    try:
        yield before
    except SeamError:
        before.put_back()
        raise


@contextmanager
def left_as_they_were(modules: Sequence[nn.Module]) -> Iterator[ModuleState]:
    """Put modules back after the block."""
    before = ModuleState(modules)
    try:
        yield before
    finally:
        before.put_back()


def set_by_first_call(
    before: ModuleState, after: ModuleState, run: Callable[[Tensor], Any], draw: Callable[[], Tensor]
) -> str | None:
    """Return which parameter, buffer or attribute a layer's first call has set by its tokens, as the scale of a quantiser.

    The call has been made, between the states `before` and `after` it. An attribute may be set in every call, or be the largest
    value so far: guards see if that matters. So the layer, called by `run`, is called with two draws, each alone and in both
    orders. What stays as the first call set it, whichever draw that had, is set for good.
    """
    if (which := before.changed_unseen()) is not None or not before.set_since():
        return which
    one, other = draw(), 2 * draw()

    def left_by(*calls: Tensor) -> dict[tuple[int, str], Any]:
        before.put_back()
        for h_BNE in calls:
            run(h_BNE)
        return before.set_since()

    alone, in_order = (left_by(one), left_by(other)), (left_by(one, other), left_by(other, one))
    after.put_back()
    for key in alone[0]:
        first, second, both, reverse = (values.get(key) for values in (*alone, *in_order))
        if _is_equal(first, both) and _is_equal(second, reverse) and not _is_equal(first, second):
            return key[1]
    return None


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in OF_ALL_MODULES or name == "training"}


def _is_table(value: Any) -> bool:
    """Return whether it is a dict of plain values alone, such as one that tells which adapter is set up."""
    return type(value) is dict and all(type(each) in (bool, int, float) for each in value.values())


def _is_small(tensor: Tensor) -> bool:
    is_plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    return is_plain and tensor.numel() <= _LARGEST_SCALE


def _same(tensor: Tensor, values: Tensor) -> bool:
    """Return whether a tensor has these values. One of another shape or place was gathered or moved by an engine, and not set."""
    if tensor.shape != values.shape or tensor.device != values.device:
        return True
    # As bytes: of any dtype, NaN too.
    ours, theirs = (each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (tensor, values))
    return torch.equal(ours, theirs)
