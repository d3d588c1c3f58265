"""Modules and parameters in the order of torch's own walks, without their names.

torch builds a name for everything that it passes. A step walks all layers at its start, while the device has nothing to do.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from torch import Tensor, nn
from torch.nn.modules import module as _module

# Attributes that every module has, among them its hooks by kind.
OF_ALL_MODULES = frozenset(nn.Module().__dict__)
HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def modules_of(root: nn.Module, *, but_for: Sequence[nn.Module] = ()) -> list[nn.Module]:
    """Return `root.modules()`, without walking into the modules `but_for`."""
    seen, found, pending = set(but_for), [], [root]
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            found.append(module)
            if module._modules:
                pending += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters that the modules themselves hold, each once."""
    found = {id(p): p for module in modules for p in module._parameters.values() if p is not None}
    return list(found.values())


def buffers_in(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the buffers that the modules themselves hold, each once."""
    found = {id(b): b for module in modules for b in module._buffers.values() if b is not None}
    return list(found.values())


def parameters_of(root: nn.Module) -> list[nn.Parameter]:
    """Return `root.parameters()`."""
    return parameters_in(modules_of(root))


def trainable_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of `root` that need a gradient now: adapters are attached, switched and frozen between steps."""
    return [parameter for parameter in parameters_of(root) if parameter.requires_grad]


def parameters_by_depth(root: nn.Module) -> list[nn.Parameter]:
    """Return `root.parameters()` from the outermost modules on, in a fifth of the time; a shared one is there several times."""
    found: list[nn.Parameter] = []
    level = {root: None}
    seen = set(level)  # a module may have one of those above it as a child
    while level:
        found += [p for module in level for p in module._parameters.values() if p is not None]
        children = (child for module in level for child in module._modules.values() if child is not None)
        level = dict.fromkeys(child for child in children if child not in seen)
        seen.update(level)
    return found


def hooks_of(modules: Sequence[nn.Module]) -> Hashable:
    """Return the numbers of all forward hooks, which torch gives to no other hook, and how many modules there are.

    That takes a tenth of the time of comparing all that the modules consist of (`contents`).
    """
    own = [number for module in modules for number in (*module._forward_hooks, *module._forward_pre_hooks)]
    return len(modules), *own, *_module._global_forward_hooks, *_module._global_forward_pre_hooks
