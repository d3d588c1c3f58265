"""Restores what a trainer's constructor was given if it raises, so that the advised retry starts from the same objects.

TRL's constructors change their arguments as they go: tokens in configurations, hooks, dropout, adapters in place of layers. A
refusal, by TRL or by streamgrad, must leave no trace of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import GenerationConfig, PretrainedConfig

from streamgrad.hf.patching import InstalledForward

_CONTAINERS = (dict, list, set)


@contextmanager
def restored_on_error(given: Iterable[Any]) -> Iterator[None]:
    """Restore the objects of `given` if the block raises: their attributes, and of modules all submodules and parameters.

    Weights are not copied. They keep their device, and lose what was added to them: precision and rows.
    """
    parts = list({id(part): part for whole in given for part in _parts(whole)}.values())
    attributes = [(part, dict(vars(part)), _contents(part)) for part in parts]
    weights = [
        (weight, weight.requires_grad, weight.dtype, weight.shape)
        for part in parts
        if isinstance(part, nn.Module)
        for weight in part.parameters(recurse=False)
    ]
    try:
        yield
    except BaseException:
        for part, before, contents in attributes:
            _refill(vars(part), before)
            for name, content in contents.items():
                _refill(before[name], content)
        for weight, requires_grad, dtype, shape in weights:
            weight.requires_grad_(requires_grad)
            if weight.dtype != dtype or weight.shape != shape:
                weight.data = weight.data[tuple(map(slice, shape))].to(dtype)
        raise


def _parts(whole: Any) -> Iterator[Any]:
    """Yield `whole` and, of a module, its submodules with the configurations and streamed forwards that they hold."""
    if not isinstance(whole, nn.Module):
        yield whole
        return
    for module in whole.modules():
        yield module
        yield from (
            value for value in vars(module).values() if isinstance(value, PretrainedConfig | GenerationConfig | InstalledForward)
        )


def _contents(part: Any) -> dict[str, Any]:
    return {name: value.copy() for name, value in vars(part).items() if isinstance(value, _CONTAINERS)}


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)
