"""Modules and parameters as torch's own walks give them, in the same order, without the names.

torch makes a name of everything that it passes. A step looks at every layer, at its start while the device has nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def modules_of(root: nn.Module, *, but_for: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """`root.modules()`, without walking into some."""
    seen, found, pending = set(but_for), [], [root]
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            found.append(module)
            pending += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """`root.parameters()`."""
    found = {id(p): p for module in modules_of(root) for p in module._parameters.values() if p is not None}
    return list(found.values())


def trainable_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Read afresh at every call: adapters are attached, switched and frozen between steps."""
    return [parameter for parameter in parameters_of(root) if parameter.requires_grad]
