"""Checks of the objectives' arguments: a wrong shape would broadcast into a wrong loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real

import torch
from torch import Tensor


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def check_number(name: str, value: Tensor | float, least: float, most: float = math.inf, *, above: bool = False) -> None:
    """Raise for what is no number from `least` to `most`, or only above `least`; numbers on a device are not looked at."""
    if isinstance(value, Tensor):
        return
    if not (isinstance(value, Real) and (least < value if above else least <= value) and value <= most):
        limits = f"{'above' if above else 'at least'} {least:g}" + ("" if most == math.inf else f" and at most {most:g}")
        raise ValueError(f"{name} must be a number {limits}, got {value!r}.")


def check_mask(name: str, mask: Tensor, like: Tensor, like_name: str) -> None:
    """Raise for what does not say by true and false, or by 0 to 1, which tokens count: labels would be taken for weights."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor that is true for the tokens that count, got {mask!r}.")
    check_shape(name, mask, like, like_name)
    if mask.dtype != torch.bool and mask.numel() and not (mask.min() >= 0 and mask.max() <= 1):
        raise ValueError(
            f"{name} must be true for the tokens that count, or have values from 0 to 1, got {mask.min().item():g} to "
            f"{mask.max().item():g}. If these are labels, pass labels != -100."
        )


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
