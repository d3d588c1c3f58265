"""Checks of the objectives' arguments: a wrong shape would broadcast into a wrong loss."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_shape(name: str, tensor: Tensor | None, like: Tensor, like_name: str) -> None:
    if tensor is not None and tensor.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} but {like_name} {tuple(like.shape)}: both have one entry per token. "
            "Cut or pad them to one shape; the mask says which tokens count."
        )


def check_constant(name: str, tensor: Tensor | None) -> None:
    """Raise for scores of another model, or of another time, that would pass on a gradient, or take the policy's away."""
    if tensor is not None and tensor.requires_grad:
        raise ValueError(f"{name} needs a gradient, and the loss takes it for a constant. Pass {name}.detach().")
