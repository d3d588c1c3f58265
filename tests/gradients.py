"""The one comparison that every exactness test uses, and the reference it compares with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor, nn


@dataclass
class Step:
    """The outcome of one forward and backward."""

    loss: Tensor
    gradients: dict[str, Tensor | None]


def run_step(model: nn.Module, batch: dict, *, forward: Callable | None = None) -> Step:
    """`model(**batch).loss.backward()` from clean gradients; `inputs_embeds` count as a parameter named "input"."""
    model.zero_grad(set_to_none=True)
    batch = dict(batch)
    leaf = None
    if "inputs_embeds" in batch:
        leaf = batch["inputs_embeds"] = batch["inputs_embeds"].detach().clone().requires_grad_()
    loss = forward(model, batch) if forward else model(**batch).loss
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    if leaf is not None:
        gradients["input"] = leaf.grad
    return Step(loss.detach(), gradients)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected|| in float64; against a zero reference, ||actual||."""
    actual, expected = actual.double(), expected.double()
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale if scale > 0 else 1.0)


def worst_gradient_error(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative error and its parameter; a missing, extra, non-finite or misshapen gradient fails at once."""
    assert actual.keys() == expected.keys(), f"different parameters: {sorted(actual.keys() ^ expected.keys())}"
    worst, worst_name = 0.0, "none"
    largest = max((g.double().norm().item() for g in expected.values() if g is not None), default=0.0)
    for name, reference in expected.items():
        gradient = actual[name]
        if reference is None or gradient is None:
            assert reference is None, f"{name} has no gradient, but the reference has one"
            assert gradient is None, f"{name} has a gradient, but the reference has none"
            continue
        assert gradient.shape == reference.shape, f"{name}: shape {gradient.shape} instead of {reference.shape}"
        assert gradient.dtype == reference.dtype, f"{name}: {gradient.dtype} instead of {reference.dtype}"
        assert reference.isfinite().all(), f"{name}: the reference gradient is not finite"
        assert gradient.isfinite().all(), f"{name}: the gradient is not finite"
        if reference.double().norm() < 1e-13 * largest:
            # Zero but for rounding (say, queries that see one key): there is nothing to be relative to but the others.
            error = (gradient - reference).double().norm().item() / largest
        else:
            error = relative_error(gradient, reference)
        if not error <= worst:  # nor where it is NaN
            worst, worst_name = error, name
    return worst, worst_name


def total_gradient_error(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    """Root mean square over the parameters of their relative errors: the yardstick for 16-bit gradients.

    The worst parameter alone would compare single draws of rounding noise.
    """
    worst_gradient_error(*({name: g if g is None else g.double() for name, g in side.items()} for side in (actual, expected)))
    errors = [relative_error(actual[name], gradient) for name, gradient in expected.items() if gradient is not None]
    return math.sqrt(sum(error**2 for error in errors) / len(errors))


def assert_same_step(actual: Step, expected: Step, tolerance: float) -> None:
    torch.testing.assert_close(actual.loss.double(), expected.loss.double(), rtol=tolerance, atol=0.0, equal_nan=True)
    assert any(gradient is not None for gradient in expected.gradients.values()), "the reference has no gradient at all"
    worst, name = worst_gradient_error(actual.gradients, expected.gradients)
    if not worst <= tolerance:
        there = [
            (name, actual.gradients[name], gradient) for name, gradient in expected.gradients.items() if gradient is not None
        ]
        beyond = [other for other, ours, theirs in there if not relative_error(ours, theirs) <= tolerance]
        raise AssertionError(
            f"worst gradient error {worst:.2e} > {tolerance:.0e}, at {name}; {len(beyond)} of {len(there)} parameters are beyond "
            f"that: {', '.join(beyond[:12])}"
        )


@contextmanager
def no_float32() -> Iterator[None]:
    """Models in float64 still compute norms and softmax in float32; within this block they stay in float64.

    Without it both sides round to float32 here and there, and a comparison could not tell a small bug from that rounding.
    (A patch, not a TorchFunctionMode: torch switches modes off inside backward, where streamed layers run again.)
    """

    def in_float64(function: Callable) -> Callable:
        def patched(*args, **kwargs):
            if isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
            return function(*args, **kwargs)

        return patched

    plain_float = Tensor.float
    with (
        mock.patch.object(Tensor, "float", lambda self: self if self.dtype == torch.float64 else plain_float(self)),
        mock.patch.object(Tensor, "to", in_float64(Tensor.to)),
        mock.patch.object(Tensor, "type", in_float64(Tensor.type)),
        mock.patch.object(nn.functional, "softmax", in_float64(nn.functional.softmax)),
    ):
        yield
