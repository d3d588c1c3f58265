"""Putting another forward on a module, for good or for the time of one call, and reading the one that stands."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

_ABSENT = object()


class InstalledForward:
    """What stands as the `forward` of an enabled module: `function(module, stock, stream, ...)`.

    It has the stock forward's signature, which Trainer and `generate` read. The module is held, not closed over, so that copying
    and pickling rebind it. Once removed it passes everything on to stock, for whoever has wrapped it in the meantime.
    """

    def __init__(self, module: nn.Module, function: Callable[..., Any], stream: Any) -> None:
        self.module, self.function, self.stream = module, function, stream
        self._replaced: Callable[..., Any] | None = None

    @classmethod
    def on(cls, module: nn.Module) -> InstalledForward | None:
        return module.__dict__.get("_streamgrad")

    def install(self) -> None:
        previous = self.on(self.module)
        if previous is not None:
            previous.remove()
        self._replaced = self.module.__dict__.get("forward")
        # Straight into __dict__: these are settings of this instance, not submodules.
        self.module.__dict__["forward"] = self.module.__dict__["_streamgrad"] = self

    def remove(self) -> None:
        self.stream = None
        self.module.__dict__.pop("_streamgrad", None)
        installed = self.module.__dict__.get("forward")
        if installed is self or getattr(installed, "__func__", None) is self:
            del self.module.__dict__["forward"]
            if self._replaced is not None:
                self.module.__dict__["forward"] = self._replaced

    @property
    def stock(self) -> Callable[..., Any]:
        return self._replaced or types.MethodType(type(self.module).forward, self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.stock)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.module:  # Accelerate, when it unwraps a model, makes a method of whatever it finds
            args = args[1:]
        if self.stream is None:
            return self.stock(*args, **kwargs)
        return self.function(self.module, self.stock, self.stream, *args, **kwargs)


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as it stands now; read at the call, since other libraries patch it in the meantime."""
    own = module.__dict__.get("forward")
    return own if own is not None else types.MethodType(type(module).forward, module)


def signature_of(forward: Callable[..., Any]) -> inspect.Signature:
    """`inspect.signature`, which takes as long as launching several kernels, once for each function."""
    if isinstance(forward, types.MethodType):
        return _signature_of_method(forward.__func__)
    return inspect.signature(forward)


@functools.lru_cache(maxsize=256)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(types.MethodType(function, object()))


def named_arguments(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    parameters = signature_of(forward).parameters.items()
    names = [name for name, p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return dict(zip(names, args, strict=False)) | kwargs


@contextmanager
def temporary_attributes(settings: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Instance attributes `(object, name, value)` for the duration of the block, removed afterwards where there were none."""
    previous = []
    try:
        for owner, name, value in settings:
            attributes = owner.__dict__
            previous.append((attributes, name, attributes.get(name, _ABSENT)))
            attributes[name] = value
        yield
    finally:
        for attributes, name, value in reversed(previous):
            if value is _ABSENT:
                attributes.pop(name, None)  # which someone inside the block may have removed
            else:
                attributes[name] = value


def temporary_attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """One of them."""
    return temporary_attributes([(owner, name, value)])
