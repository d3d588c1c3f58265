"""Says what memory is, where it is allocated.

    with memory_label("keys and values"):
        keys = torch.empty(...)

`streamgrad profile` asks for the label at each allocation. The innermost label wins. A label belongs to the thread that entered
it: backward on a GPU runs in a thread of autograd, where the labels count that are entered there.

While nobody listens, a label costs one look at an empty tuple and a shared context that does nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Listener:
    """Is told of labels between `listen` and `stop_listening`."""

    def label_changed(self, label: str | None) -> None:
        """Take note of what this thread allocates from now on; None where it has no label."""

    def relabelled(self, tensor: Tensor, label: str) -> None:
        """Take note that a tensor has become something else than what it was allocated as."""


_listeners: tuple[Listener, ...] = ()


class _Thread(threading.local):
    label: str | None = None


_thread = _Thread()


class _Nothing:
    """Does nothing on entry and exit, without running Python code."""

    __slots__ = ()

    # It is written in C, takes any arguments and returns what is false. Two empty methods would take twice as long.
    __enter__ = staticmethod("".format)
    __exit__ = staticmethod("".format)


_NOTHING = _Nothing()


class _Label:
    __slots__ = ("_label", "_outer")

    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        self._outer = _thread.label
        _change(self._label)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        _change(self._outer)


def _change(label: str | None) -> None:
    _thread.label = label
    for listener in _listeners:
        listener.label_changed(label)


def memory_label(label: str) -> _Label | _Nothing:
    """Return a context in which this thread allocates `label`, where no label inside it says otherwise."""
    return _Label(label) if _listeners else _NOTHING


def labelled(label: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function run under `memory_label(label)`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def under_label(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _listeners:
                return function(*args, **kwargs)
            with memory_label(label):
                return function(*args, **kwargs)

        return under_label

    return decorate


def relabel(label: str, *tensors: Tensor) -> None:
    """Say that tensors are `label`. One kernel may allocate several things at once, under one label."""
    for listener in _listeners:
        for tensor in tensors:
            listener.relabelled(tensor, label)


def current_label() -> str | None:
    """Return the innermost label of this thread, or None."""
    return _thread.label


def listen(listener: Listener) -> None:
    """Switch labels on."""
    global _listeners
    _listeners += (listener,)


def stop_listening(listener: Listener) -> None:
    """Switch labels off with the last listener."""
    global _listeners
    _listeners = tuple(each for each in _listeners if each is not listener)
