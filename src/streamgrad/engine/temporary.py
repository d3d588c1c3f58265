"""Instance attributes that are set for the duration of a block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def temporary_attributes(settings: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set instance attributes `(object, name, value)` within the block, then restore them or remove those that were new."""
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
                attributes.pop(name, None)  # code inside the block may have removed it
            else:
                attributes[name] = value


def temporary_attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    """Set one instance attribute within the block, as `temporary_attributes` does."""
    return temporary_attributes([(owner, name, value)])
