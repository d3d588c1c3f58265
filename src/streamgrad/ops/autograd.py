"""What autograd functions share.

Derivatives of derivatives are refused, as a gradient computed in chunks has no graph of its own. Outputs belong to the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For the `backward` of an autograd function: an error where its result would be differentiated again.

    torch's `once_differentiable` raises only where the incoming gradient needs one itself; with `create_graph=True` the gradient
    of a loss would be taken for a constant.
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
    """An output in the shape that it should have, and no view: autograd lets nobody change a view from inside of a function."""
    if shape is None and not tensor._is_view():
        return tensor
    return torch.ops.aten._unsafe_view(tensor, tensor.shape if shape is None else shape)
