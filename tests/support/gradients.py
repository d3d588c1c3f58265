"""The one comparison that every exactness test uses, and the reference it compares with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

# Repeats a proof on more families, seeds or sizes: run by `make test-all`, left out by `make test`.
more = pytest.mark.more


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


Tensors = dict[str, Tensor | None]


def errors_by_name(actual: Tensors, expected: Tensors) -> dict[str, float]:
    """The relative error of every tensor that `expected` has; a missing, extra, non-finite or misshapen one fails at once."""
    assert actual.keys() == expected.keys(), f"different parameters: {sorted(actual.keys() ^ expected.keys())}"
    errors = {}
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
            errors[name] = (gradient - reference).double().norm().item() / largest
        else:
            errors[name] = relative_error(gradient, reference)
    return errors


def in_float64(tensors: Tensors) -> Tensors:
    return {name: None if tensor is None else tensor.double() for name, tensor in tensors.items()}


def root_mean_square(errors: dict[str, float]) -> float:
    return math.sqrt(sum(error**2 for error in errors.values()) / len(errors))


def worst_gradient_error(actual: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest of `errors_by_name`, and its parameter."""
    worst, worst_name = 0.0, "none"
    for name, error in errors_by_name(actual, expected).items():
        if not error <= worst:  # nor where it is NaN
            worst, worst_name = error, name
    return worst, worst_name


def total_gradient_error(actual: Tensors, expected: Tensors) -> float:
    """Root mean square over the parameters of their relative errors: the yardstick for 16-bit gradients.

    The worst parameter alone would compare single draws of rounding noise.
    """
    return root_mean_square(errors_by_name(in_float64(actual), in_float64(expected)))


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


# How much larger than plain float32's a streamed float32 error may be. Sums in another order are another draw of the same noise:
# over all tensors the two errors are alike (ratios to 1.13 were seen), and one tensor's may by chance be larger (1.7 was seen).
# A gradient that is scaled by 1.001 is beyond 100.
ROOM, ROOM_OF_ONE = 3.0, 10.0


def assert_as_exact_as_plain(actual: Tensors, plain: Tensors, truth: Tensors, *, rounding: torch.dtype = torch.float32) -> None:
    """Assert that `actual` is as close to a float64 `truth` as `plain`, the ordinary `rounding` computation of the same tensors.

    With the relative errors e of `actual` and p of `plain`: rms(e) <= ROOM * rms(p), and e_i <= ROOM_OF_ONE * max(p_i, rms(p)).
    So the tolerance is the machine's own: of its BLAS, its number of threads, the width of its vectors.
    """
    errors, plain_errors = (errors_by_name(in_float64(side), in_float64(truth)) for side in (actual, plain))
    assert errors, "the truth has no tensor at all"
    name_of_plain, one_rounding = f"plain {rounding}".replace("torch.", ""), torch.finfo(rounding).eps
    # At least one rounding: of a few numbers, plain float32 may have them all right by chance.
    total, plain_total = root_mean_square(errors), max(root_mean_square(plain_errors), one_rounding)
    assert plain_total < min(1000 * one_rounding, 1.0), (
        f"{name_of_plain} is off by {plain_total:.2e}: it is not the computation that the truth is of"
    )
    assert total <= ROOM * plain_total, f"error {total:.2e} over all tensors; {name_of_plain} has {plain_total:.2e}"
    for name, error in errors.items():
        allowed = ROOM_OF_ONE * max(plain_errors[name], plain_total)
        assert error <= allowed, (
            f"{name}: error {error:.2e}, {allowed:.2e} is allowed, {name_of_plain} has {plain_errors[name]:.2e}"
        )


def assert_step_as_exact_as_plain(actual: Step, plain: Step, truth: Step, *, rounding: torch.dtype = torch.float32) -> None:
    """`assert_as_exact_as_plain` for a step's gradients, and for its loss as one more tensor."""
    assert_as_exact_as_plain(*({"loss": step.loss} | step.gradients for step in (actual, plain, truth)), rounding=rounding)


@contextmanager
def no_float32() -> Iterator[None]:
    """Models in float64 still compute norms and softmax in float32; within this block they stay in float64.

    Without it both sides round to float32 here and there, and a comparison could not tell a small bug from that rounding.
    (A patch, not a TorchFunctionMode: torch switches modes off inside backward, where streamed layers run again.)
    """

    def lifted(function: Callable) -> Callable:
        def patched(*args, **kwargs):
            if isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
                kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in kwargs.items()}
            return function(*args, **kwargs)

        return patched

    plain_float = Tensor.float
    with (
        mock.patch.object(Tensor, "float", lambda self: self if self.dtype == torch.float64 else plain_float(self)),
        mock.patch.object(Tensor, "to", lifted(Tensor.to)),
        mock.patch.object(Tensor, "type", lifted(Tensor.type)),
        mock.patch.object(nn.functional, "softmax", lifted(nn.functional.softmax)),
    ):
        yield
