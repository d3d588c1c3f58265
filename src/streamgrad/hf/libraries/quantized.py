"""Asks modules of bitsandbytes what streaming has to know of them, and counts the bytes of quantised tensors.

bitsandbytes itself is not imported, so that other models do not need it. Its attributes are known by their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamgrad.engine.temporary import temporary_attributes

# Set where the processor has instructions for it: in eval mode, a forward pass without a graph then packs the weights in a form
# that has no backward.
_PACKS = "support_avx512bf16_for_cpu"


def never_packed(modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Within the block, weights stay as they are: chunks run without a graph first, and are differentiated later."""
    packing = [module for module in modules if module.__dict__.get(_PACKS)]
    return temporary_attributes((module, _PACKS, False) for module in packing)


def is_packed(module: nn.Module) -> bool:
    """Return whether the module's weight was packed for inference; its products have no gradient, streamed or not."""
    state = getattr(module._parameters.get("weight"), "quant_state", None)
    return getattr(state, "packing_format_for_cpu", False)


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors with all that they are made of: values in few bits, and their scales."""
    found: dict[int, int] = {}
    for tensor in tensors:
        _collect(tensor, found)
    return sum(found.values())


def _collect(value: Any, found: dict[int, int]) -> None:
    """Note the bytes at each address: tensors are other tensors' parts, or their attributes, or those of an attribute."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            _collect(getattr(value, name), found)
    elif isinstance(value, Tensor):
        found[value.data_ptr()] = value.nbytes
        if type(value) not in (Tensor, nn.Parameter):
            _collect_attributes(value, found)


def _collect_attributes(value: Any, found: dict[int, int]) -> None:
    for part in vars(value).values():
        if isinstance(part, Tensor):
            _collect(part, found)
        elif hasattr(part, "__dict__") and not isinstance(part, nn.Module | type):
            _collect_attributes(part, found)
