"""Failures that a test injects, and what must be as it was before them."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


class FailingAllocation(TorchDispatchMode):
    """Raise `torch.OutOfMemoryError` at the n-th operation that returns memory of its own, or at none, and count them."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at, self.count = fails_at, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not func._schema.is_mutable:
            self.count += 1
            if self.count == self.fails_at:
                raise torch.OutOfMemoryError(f"no memory for {func}.")
        return func(*args, **(kwargs or {}))


class Hook:
    """A forward hook, or one before forward, that does something while it is `on`: layers are not told when that changes."""

    def __init__(self, module: nn.Module, hook: Callable[..., Any], *, on: bool = False, before: bool = False) -> None:
        self.on = on
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        register(lambda *args: hook(*args) if self.on else None)


def state_of(model: nn.Module) -> tuple:
    """Return what a call changes of a model for as long as it runs: attributes, parameters and configuration."""
    owned = [(module.__dict__, module._parameters) for module in model.modules()]
    attributes = [{name: id(value) for name, value in own.items()} for own, _ in owned]
    return attributes, [list(map(id, parameters.values())) for _, parameters in owned], dict(model.config.__dict__)


def live_tensors() -> list[tuple]:
    """Return the shape and type of every tensor that this process holds."""
    # After an error in backward, torch holds the nodes that were ready to run until the thread's next pass, streamed or not.
    torch.ones((), requires_grad=True).clone().backward()
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    return sorted((tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors)


# With a limit that they look after themselves.
_LIMITED = {("streamgrad.attention.backends", "_FOUND")}


def sizes_of_caches(model: nn.Module) -> dict[tuple[str, str], int]:
    """Return how much is in each cache without a limit: collections of streamgrad's modules, classes and what `enable` left."""
    sizes = {}
    owners = [(name, vars(module)) for name, module in list(sys.modules.items()) if name.startswith("streamgrad")]
    owners += [(f"{name}.{key}", vars(each)) for name, own in owners for key, each in own.items() if inspect.isclass(each)]
    stream = model.model._streamgrad.stream
    owners += [("stream", vars(stream)), ("planner", vars(stream.planner)), ("host", vars(stream.host_store))]
    for owner, entries in owners:
        for name, value in list(entries.items()):
            if isinstance(value, functools._lru_cache_wrapper) and value.cache_parameters()["maxsize"] is None:
                sizes[owner, name] = value.cache_info().currsize
            elif (owner, name) in _LIMITED:
                continue
            elif isinstance(value, Collection) and not isinstance(value, str | type) and not name.startswith("__"):
                sizes[owner, name] = len(value)
    return sizes
