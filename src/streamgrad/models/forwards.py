"""Reading a module's forward as it stands, and replacing attributes of a module for the time of one call."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_ABSENT = object()


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """The module's forward as it stands now; read at the call, since other libraries patch it in the meantime."""
    own = module.__dict__.get("forward")
    return own if own is not None else types.MethodType(type(module).forward, module)


def named_arguments(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    names = [name for name, p in inspect.signature(forward).parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return dict(zip(names, args, strict=False)) | kwargs


@contextmanager
def temporary_attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """An instance attribute for the duration of the block, removed afterwards if there was none."""
    previous = module.__dict__.get(name, _ABSENT)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if previous is _ABSENT:
            del module.__dict__[name]
        else:
            module.__dict__[name] = previous
