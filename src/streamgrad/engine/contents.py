"""What a layer consists of, as something to compare: what one trial has shown holds until it changes."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as _module

from streamgrad.engine.guards import AdapterFacts

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def contents_of(modules: Sequence[nn.Module], adapters: AdapterFacts) -> Hashable:
    """Return what tells whether a layer is still the one that was tried: modules, code, switches, hooks, what is trained."""
    hooks_of_all = tuple(_module._global_forward_hooks), tuple(_module._global_forward_pre_hooks)
    return hooks_of_all, *(
        (
            weakref.ref(module),
            type(module).forward,
            *((name, value) for name, value in module.__dict__.items() if type(value) in (bool, float, str)),
            *(tuple(module.__dict__[kind]) for kind in _HOOKS),
            *(p.requires_grad for p in module._parameters.values() if p is not None),
            *(buffer._version for buffer in module._buffers.values() if buffer is not None),
            None if module is modules[0] else identity(module.__dict__.get("forward")),
            *map(str, adapters.state([module])),
        )
        for module in modules
    )


def identity(forward: Any) -> Hashable:
    """Return what tells a function, and what it is bound to, from all others; an `id` goes to another when its owner is gone."""
    owner, function = getattr(forward, "__self__", None), getattr(forward, "__func__", forward)
    parts = [part for part in (owner, function) if part is not None]
    # What takes no weak reference equals nothing, and is tried in every step.
    return tuple(weakref.ref(part) if type(part).__weakrefoffset__ else object() for part in parts)
