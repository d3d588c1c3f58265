"""Helpers of the autograd functions: they refuse second derivatives, return no views, and keep trial graphs to themselves.

A gradient that is computed in chunks has no graph that could be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `backward` of an autograd function to raise where its result would be differentiated again.

    torch's `once_differentiable` raises only if the incoming gradient itself needs one; with `create_graph=True` it would take
    the gradient of a loss for a constant.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward was called with create_graph=True, and streamgrad computes first derivatives only. Leave create_graph "
                "out, or call streamgrad.disable(model) for a step that differentiates gradients."
            )
        return backward(ctx, *gradients)

    return checked


def own(tensor: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return an output in `shape` that is no view: autograd forbids callers to change a view that a function returns."""
    if shape is None and not tensor._is_view():
        return tensor
    return torch.ops.aten._unsafe_view(tensor, tensor.shape if shape is None else shape)


def own_graph() -> AbstractContextManager[Any]:
    """Within the block, what a graph saves is not handed to hooks of the program's: checkpointing's would run the model again."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(as_saved, lambda tensor: tensor)


def as_saved(tensor: Tensor) -> Tensor:
    """Return what a hook may give to be saved: a node's own output itself would keep that node for good."""
    return tensor.detach()
