"""Puts the switches of a layer's modules back, while it runs again for backward, to what they were when it ran forward.

Switches are hooks, submodules, and attributes that hold a number, a text, a function, True, False or None. A program may select
an adapter by them, stop or reverse gradients, or call `eval()`, for one forward of several. Autograd has bound all of that in
forward. Outputs could not tell: what changes gradients need not change what a layer gives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from streamgrad.engine.checks.first_run import is_leaving_weights
from streamgrad.engine.checks.kept_graphs import attributes_with_graphs
from streamgrad.engine.module_walk import HOOKS

_PLAIN = frozenset({bool, int, float, str, type(None), FunctionType, MethodType, BuiltinFunctionType})
_ABOUT_HOOKS = "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"
_ABSENT = object()


class _Change(NamedTuple):
    """An attribute that has another value than it had."""

    attributes: dict[str, Any]
    name: str
    then: Any
    now: Any

    def undo(self) -> None:
        _set(self.attributes, self.name, self.then)

    def redo(self) -> None:
        """Set the present value, or what code has made of it since `undo`: a count goes on, a new value stays."""
        last = self.attributes.get(self.name, _ABSENT)
        if last is self.then or last == self.then:
            _set(self.attributes, self.name, self.now)
        elif type(last) is type(self.then) is type(self.now) is int:
            self.attributes[self.name] = self.now + last - self.then


class _Noted(NamedTuple):
    """What a module's attributes were."""

    attributes: dict[str, Any]
    names: frozenset[str]
    plain: dict[str, Any]
    hooks: dict[str, Any]
    children: dict[str, Any]
    is_layer: bool  # whose own forward is streaming's

    @classmethod
    def of(cls, attributes: dict[str, Any], *, is_layer: bool) -> _Noted:
        children = attributes["_modules"].copy()
        return cls(attributes, frozenset(attributes), _plain(attributes), _hooks(attributes), children, is_layer)

    def changes(self) -> Iterator[_Change]:
        now = _plain(self.attributes)
        if now != self.plain:
            for name, value in self.plain.items():
                if now.get(name, _ABSENT) != value and not (self.is_layer and name == "forward"):
                    yield _Change(self.attributes, name, value, self.attributes.get(name, _ABSENT))
            for name in now.keys() - self.names - ({"forward"} if self.is_layer else set()):
                yield _Change(self.attributes, name, _ABSENT, now[name])
        if self.attributes["_modules"] != self.children:
            yield _Change(self.attributes, "_modules", self.children, self.attributes["_modules"])
        if _hooks(self.attributes) != self.hooks:
            for name in (*HOOKS, *_ABOUT_HOOKS):
                yield _Change(self.attributes, name, OrderedDict(self.hooks.get(name, ())), self.attributes[name])


class Switches:
    """The switches that modules have when it is made."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._noted = [_Noted.of(module.__dict__, is_layer=module is modules[0]) for module in modules]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let the modules have these switches within the block."""
        changes = [change for noted in self._noted for change in noted.changes()]
        # Weights that forward has left there, and that a loss of the program may use: the run to come leaves others.
        left = attributes_with_graphs(self._modules) if is_leaving_weights(self._modules[0]) else []
        for change in changes:
            change.undo()
        try:
            yield
        finally:
            for attributes, name, value in left:
                attributes[name] = value
            for change in changes:
                change.redo()


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if type(value) in _PLAIN}


def _hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of a module's hooks by kind, nothing if it has none."""
    if not any(attributes[name] for name in HOOKS):
        return {}
    return {name: attributes[name].copy() for name in (*HOOKS, *_ABOUT_HOOKS)}


def _set(attributes: dict[str, Any], name: str, value: Any) -> None:
    if value is _ABSENT:
        attributes.pop(name, None)
    else:
        attributes[name] = value
