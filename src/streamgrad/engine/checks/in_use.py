"""Refuses a second caller of a model while its layers are changed.

A streamed call replaces the `forward` of layers, and its backward replaces their parameters, until it ends. A call from another
thread, or from a hook of the first call, would run these replacements.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class _Caller:
    thread: int
    alone: bool


class InUse:
    """Refuses callers that would disturb each other. Callers that change nothing may run together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: list[_Caller] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a copied or unpickled model start without callers."""
        return InUse, ()

    @contextmanager
    def claimed(self, name: str, *, alone: bool = True) -> Iterator[None]:
        """Let no other caller change the model within the block and, with `alone`, no other thread run it at all."""
        caller = _Caller(threading.get_ident(), alone)
        try:
            with self._lock:
                for other in self._callers:
                    if other.alone or (alone and other.thread != caller.thread):
                        raise RuntimeError(_refusal(name, same_thread=other.thread == caller.thread))
                self._callers.append(caller)
            yield
        finally:
            if caller in self._callers:
                self._callers.remove(caller)


def _refusal(name: str, *, same_thread: bool) -> str:
    if same_thread:
        return (
            f"{name} was called from inside of its own streamed forward or backward, as by a hook on one of its modules, and "
            "would run layers that are changed while they stream. Call it after the step, call a copy (copy.deepcopy), or call "
            "streamgrad.disable(model)."
        )
    return (
        f"{name} is being run by another thread, and a streamed model can be run by one at a time: its layers are changed while "
        "they stream. Give each thread a copy (copy.deepcopy), or hold a lock from forward to the end of backward."
    )
