"""What a layer consists of, as something to compare: what one trial has shown holds until it changes."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as _module

from streamgrad.engine.checks.guards import AdapterFacts
from streamgrad.engine.module_walk import HOOKS, OF_ALL_MODULES

_PLAIN = frozenset({bool, float, str, type(None)})


def contents_of(modules: Sequence[nn.Module], adapters: AdapterFacts) -> Hashable:
    """Return what tells whether a layer is still the one that was tried: modules, code, switches, hooks, what is trained.

    Switches are plain values of a module's attributes, in its dicts too, and whether an attribute is a tensor. Frozen parameters
    count by their versions, but for those of linear maps: adapters are merged into these before texts are generated, every time.
    """
    hooks_of_all = tuple(_module._global_forward_hooks), tuple(_module._global_forward_pre_hooks)
    return hooks_of_all, *(
        (
            weakref.ref(module),
            type(module).forward,
            switches_in(module.__dict__),
            *(tuple(module.__dict__[kind]) for kind in HOOKS),
            *(_version(p, module) for p in module._parameters.values() if p is not None),
            *(buffer._version for buffer in module._buffers.values() if buffer is not None),
            None if module is modules[0] else identity(module.__dict__.get("forward")),
            *map(str, adapters.state([module])),
        )
        for module in modules
    )


def switches_in(values: Mapping[str, Any]) -> Hashable:
    """Return the plain values by name, in dicts too, and which are tensors; no whole numbers, as calls are counted by them."""
    found: list[Hashable] = []
    for name, value in values.items():
        kind = type(value)
        if kind in _PLAIN:
            found.append((name, value))
        elif kind is Tensor:
            found.append((name, Tensor))
        elif kind is dict and name not in OF_ALL_MODULES:
            found.append((name, *((str(key), each) for key, each in value.items() if type(each) in _PLAIN)))
    return tuple(found)


def _version(parameter: Tensor, module: nn.Module) -> int:
    return -1 if parameter.requires_grad else -2 if isinstance(module, nn.Linear) else parameter._version


def identity(forward: Any) -> Hashable:
    """Return what tells a function, and what it is bound to, from all others; an `id` goes to another when its owner is gone."""
    owner, function = getattr(forward, "__self__", None), getattr(forward, "__func__", forward)
    parts = [part for part in (owner, function) if part is not None]
    # What takes no weak reference equals nothing, and is tried in every step.
    return tuple(weakref.ref(part) if type(part).__weakrefoffset__ else object() for part in parts)
