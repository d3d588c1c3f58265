"""Helpers of the autograd functions: first derivatives by backward only, no views returned, trial graphs kept apart.

A gradient that is computed in chunks has no graph that could be differentiated again, or that a transform could follow.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta
from torch.compiler import is_dynamo_compiling


class _Untraced(FunctionMeta):
    """The class of `Function`s that torch.compile leaves as they are, as it traces only those of exactly `FunctionMeta`.

    It would trace what they do to sums and streams as well, in modules that a user has compiled.
    """


class Function(torch.autograd.Function, metaclass=_Untraced):
    """torch's `Function`, called a dozen Python calls sooner: what those prepare is for transforms of torch.func alone."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if is_dynamo_compiling():
            return _outside_of_graphs(super().apply, *args)
        caller = torch.autograd.Function if peek_interpreter_stack() is None else Function
        return super(caller, cls).apply(*args)  # type: ignore[misc]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that torch.compile shall not trace; `torch.compiler.disable`, in two calls of Python and not in nine."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return _outside_of_graphs(function, *args, **kwargs) if is_dynamo_compiling() else function(*args, **kwargs)

    return called


@torch.compiler.disable
def _outside_of_graphs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def first_order_only(backward: Callable[..., Any], *, even_undefined: bool = False) -> Callable[..., Any]:
    """Wrap the `backward` of an autograd function to raise where its result would be differentiated again.

    Where no output has a gradient, neither has an input, as with torch's own functions: zeros in the place of None would let
    optimizers decay weights that the loss does not depend on. `even_undefined` calls `backward` then too.

    torch's `once_differentiable` raises only if the incoming gradient itself needs one; with `create_graph=True` it would take
    the gradient of a loss for a constant. Inference mode, under which a layer could not be run again with a
    graph, is left while `backward` runs.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:  # flat: a chunk's backward calls it more than a dozen times
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward was called with create_graph=True, and streamgrad computes first derivatives only. Leave create_graph "
                "out, or call streamgrad.disable(model) for a step that differentiates gradients."
            )
        batched, defined = forward_ad._current_level >= 0 or peek_interpreter_stack() is not None, even_undefined
        for gradient in gradients:
            if gradient is not None:
                # Which come in batches from `is_grads_batched=True`, without a transform of torch.func.
                batched, defined = batched or is_legacy_batchedtensor(gradient), True
        if batched:
            raise _in_a_transform("backward")
        if not defined:
            return (None,) * len(ctx.needs_input_grad)
        if not torch.is_inference_mode_enabled():
            return backward(ctx, *gradients)
        with torch.inference_mode(False), torch.no_grad():
            return backward(ctx, *(None if gradient is None else gradient.clone() for gradient in gradients))

    return checked


def backward_pass() -> int:
    """Return the number of the backward pass that is under way in this thread, or -1."""
    return torch._C._current_graph_task_id()


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that is under way has ended, unless it ends in an error."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def in_transform() -> bool:
    """Return whether forward-mode derivatives are taken, or a transform of `torch.func` (jvp, grad, vmap) is under way."""
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def refuse_transforms(name: str) -> None:
    """Raise inside of a transform: autograd functions here know `backward` alone, and what they hold aside has no tangent."""
    if in_transform():
        raise _in_a_transform(name)


def _in_a_transform(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name} was called inside forward-mode differentiation or a transform of torch.func (jvp, grad, vmap), and "
        "streamgrad computes gradients by loss.backward() or torch.autograd.grad alone. Use one of these, or call "
        "streamgrad.disable(model)."
    )


def own(tensor: Tensor, shape: torch.Size | None = None) -> Tensor:
    """Return an output in `shape` that is no view: autograd forbids callers to change a view that a function returns."""
    if shape is None and not tensor._is_view():
        return tensor
    return torch.ops.aten._unsafe_view(tensor, tensor.shape if shape is None else shape)


def own_graph() -> AbstractContextManager[Any]:
    """Hide what a graph saves within the block from the program's hooks: those of checkpointing would run the model again."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(as_saved, lambda tensor: tensor)


def as_saved(tensor: Tensor) -> Tensor:
    """Return what a hook may give to be saved: a node's own output itself would keep that node for good."""
    return tensor.detach()


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off; not entered where it is off already, as it is not free."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()
