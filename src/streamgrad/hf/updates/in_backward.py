"""Optimizers that update each parameter in the backward pass, so that no more gradients exist than one layer's.

A streamed layer returns the gradients of its parameters once, when its last chunk is done. torch then calls each parameter's hook
(`register_post_accumulate_grad_hook`), and here the hook is an optimizer's step that sees no other parameter.
A tensor that is used twice, such as tied embeddings, has its hook called when both gradients have been added.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.hf.updates.optimizer_trial import Alone, StateSizes, tensors_in, tried
from streamgrad.hf.updates.refusals import check_class, check_parameters, check_surroundings, check_trainer
from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.freed_gradient import TWICE, FreedGradient, held_gradient

logger = logging.getLogger(__name__)
_LAST_NORM = "last_grad_norm"


def optimizer_in_backward(
    model: nn.Module | Iterable[Any],
    optimizer_class: type[torch.optim.Optimizer],
    *,
    params: Iterable[Any] | None = None,
    max_grad_norm: float | None = None,
    **options: Any,
) -> InBackward:
    """Return an optimizer that updates each parameter in backward, as soon as its gradient is whole, and frees the gradient.

    ```diff
    - optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    + optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-5)
    ```

    The loop stays as it is: `backward()`, `optimizer.step()`, `scheduler.step()`, `optimizer.zero_grad()`. Parameters become what
    `optimizer_class` makes of them in an ordinary loop. After `backward()`, `.grad` holds no numbers, and raises if it is used;
    `step()` sets it to None and ends the step.

    Args:
        model: the model whose trainable parameters are updated; or parameters, or groups of them, as for `optimizer_class`.
        optimizer_class: a `torch.optim.Optimizer` that updates each parameter by its own gradient and state.
        params (*optional*): parameters or groups of them, where not all of the model's are updated alike.
        max_grad_norm (`float`, *optional*):
            Clips by the norm of the step before: gradients are multiplied by `min(1, max_grad_norm / (norm + 1e-6))`, where
            `norm` is that of all gradients of the step before, unclipped. The first step is not clipped.
        options: the other arguments of `optimizer_class`.

    The result is an instance of `optimizer_class`, with its `param_groups`, `state_dict` and `load_state_dict`. Its `grad_norm`
    is the norm of the latest gradients, unclipped, and `remove()` ends the updates in backward.

    A second backward before `step()`, clipping by the global norm, a GradScaler and engines that share gradients among processes
    raise an error: parameters are updated before all gradients are known. If a backward pass fails on its way, the parameters
    that it has passed are updated already.
    """
    check_class(optimizer_class)
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={max_grad_norm} must be above 0. To clip nothing, leave it out; for a Trainer, pass 0.")
    if params is None:
        params = [p for p in model.parameters() if p.requires_grad] if isinstance(model, nn.Module) else model
    kind = type(f"{optimizer_class.__name__}InBackward", (InBackward, optimizer_class), {"__module__": __name__})
    optimizer: InBackward = kind(params, **options)
    _check(model, optimizer.parameters, optimizer.parameters)
    optimizer.begin(tried(optimizer, optimizer_class, options), max_grad_norm)
    return optimizer


def _check(model: Any, parameters: list[Tensor], added: list[Tensor]) -> None:
    """Raise where `parameters` cannot be updated in backward, or another optimizer does so for some of those `added`."""
    check_parameters(model, parameters, [parameter for parameter in added if updates_of(parameter)])


class _Owner:
    """Has the optimizer of a parameter, as the parameter's attribute.

    torch has hooks where the garbage collector does not look: one that held the optimizer, which has the parameter, would keep
    both for ever. An attribute is seen, so both go when nothing else has them, and not before.
    """

    name = "streamgrad_owner"

    def __init__(self, optimizer: InBackward) -> None:
        self.optimizer = optimizer

    def __reduce__(self) -> Any:
        return OrderedDict, ()  # a parameter is saved with its attributes, but not with its optimizer


def updates_of(parameter: Tensor) -> InBackward | None:
    """Return the optimizer that updates the parameter in backward, if one of these does."""
    owner = getattr(parameter, _Owner.name, None)
    # A copy of a parameter has its attributes, but not its hook.
    return owner.optimizer if isinstance(owner, _Owner) and parameter in owner.optimizer._handles else None


def end_updates_by_others(parameters: Iterable[Tensor], optimizer: Any) -> None:
    """End the updates in backward of parameters that a trainer is about to train by this optimizer, or by one yet to be made.

    An earlier trainer's optimizer would still make them. It can go on as an ordinary one, after this.
    """
    own = getattr(optimizer, "optimizer", optimizer)  # in Accelerate's wrapper
    for other in {updates_of(parameter) for parameter in parameters} - {None, own}:
        assert other is not None
        other.remove()
        logger.info("streamgrad: %s updates no parameters in backward any more: another trainer begins", type(other).__name__)


def _updated(parameter: Tensor) -> None:
    """Update one parameter by its optimizer; torch calls this when its gradient is whole."""
    optimizer = updates_of(parameter)
    assert optimizer is not None
    optimizer._update(parameter)


class InBackward(torch.optim.Optimizer):
    """What an optimizer in backward adds to its class, which follows in the method resolution order."""

    max_grad_norm: float | None = None
    _sizes: StateSizes | None = None  # None until `begin`

    def begin(self, sizes: StateSizes, max_grad_norm: float | None) -> None:
        """Update parameters in backward from now on; their states have these `sizes`."""
        self._sizes, self.max_grad_norm = sizes, max_grad_norm
        self._handles: dict[Tensor, Any] = {}
        self._updated: set[int] = set()  # since the last step
        self._norms: list[Tensor] = []
        self._last_norm: Tensor | None = None
        self._in_trainer = False
        self._factor: Tensor | None = None  # that was found to be what `max_grad_norm` asks for
        self._watch(self.parameters)

    @property
    def parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _watch(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            frozen = not parameter.requires_grad  # torch takes hooks of others only; it may be trained later
            self._handles[parameter] = parameter.requires_grad_().register_post_accumulate_grad_hook(_updated)
            parameter.requires_grad_(not frozen)
            setattr(parameter, _Owner.name, _Owner(self))

    def remove(self) -> None:
        """End the updates in backward: gradients stay in `.grad` again, and `step()` does nothing but for them."""
        for parameter, handle in self._handles.items():
            handle.remove()
            vars(parameter).pop(_Owner.name, None)  # `swap_tensors` has given it the attributes of another tensor, and no hook
            parameter.grad = held_gradient(parameter)
        self._handles.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._sizes is None:
            return
        added = self.param_groups[-1]["params"]
        try:
            _check(None, self.parameters, added)
        except (RuntimeError, ValueError):
            del self.param_groups[-1]
            raise
        self._watch(added)

    def train(self) -> None:
        """Raise for clipping that a Trainer would do after backward: it calls this before each forward pass."""
        own: Callable[[], Any] = getattr(super(), "train", lambda: None)  # that of optimizers without a schedule
        own()
        self._in_trainer = check_trainer(self.max_grad_norm) or self._in_trainer

    @functools.cached_property
    def _own_step(self) -> Callable[[], Any]:
        """Return the step of the optimizer's class, without the hooks on steps that torch may have put around it."""
        step: Any = super().step
        return functools.partial(step.__func__.__wrapped__, self) if getattr(step, "hooked", False) else step

    @torch.no_grad()
    def _update(self, parameter: Tensor) -> None:
        try:
            if not self._updated:
                check_surroundings([other for other in self.parameters if other is not parameter])
                self._alone = Alone(self)
            if id(parameter) in self._updated:
                raise RuntimeError(TWICE)
            gradient = parameter.grad
            assert gradient is not None
            self._updated.add(id(parameter))
            norm = torch.linalg.vector_norm(gradient, dtype=accumulator_dtype(gradient.dtype))
            self._norms.append(norm)
            if self.max_grad_norm is not None and self._last_norm is not None:
                gradient.mul_(_clipping(self.max_grad_norm, self._last_norm))
            with self._alone.only(parameter):
                self._own_step()
        except BaseException:
            parameter.grad = None
            raise
        parameter.grad = FreedGradient(gradient, norm, self)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """End a step, whose updates backward has made. Gradients that were set by hand are applied now, as ever."""
        loss, self._factor = None, None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = self.parameters
        if self._handles and set(parameters) != self._handles.keys():
            raise RuntimeError(
                "the parameters of an optimizer in backward were replaced in its param_groups, as by DeepSpeed or FSDP, so those "
                "that are there now were not updated. Use an ordinary optimizer with them."
            )
        for parameter in parameters:
            parameter.grad = held_gradient(parameter)
        if any(parameter.grad is not None for parameter in parameters):
            self._own_step()
        if self._updated:
            self._last_norm = self.grad_norm
            self._updated.clear()
            self._norms.clear()
        return loss

    @property
    def grad_norm(self) -> Tensor | None:
        """Return the norm of all gradients of the latest backward pass, before any clipping."""
        if not self._norms:
            return self._last_norm
        return torch.linalg.vector_norm(torch.stack([norm.to(self._norms[0]) for norm in self._norms]))

    @property
    def may_ask_norms(self) -> bool:
        """Return whether a norm that is asked for after backward is known not to be for clipping that would come too late."""
        return self._in_trainer or self.max_grad_norm is not None

    def has_clipped_by(self, factor: Tensor) -> bool:
        """Return whether scaling gradients by `factor` leaves nothing to do: it is 1, or what `max_grad_norm` makes of them."""
        if factor is not self._factor and self.grad_norm is not None:
            limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
            own = _clipping(limit, self.grad_norm).to(factor)
            self._factor = factor if factor.dim() == 0 and torch.isclose(factor, own, rtol=1e-3, equal_nan=True) else None
        return factor is self._factor

    def state_bytes_to_come(self, parameter: Tensor) -> float:
        """Return about how many bytes the parameter's first update will add to those on its device."""
        return 0.0 if self.state.get(parameter) or self._sizes is None else self._sizes.of(parameter)

    def state_tensors(self, parameter: Tensor) -> list[Tensor]:
        """Return the tensors of the parameter's state."""
        return list(tensors_in(self.state.get(parameter)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer's class, and the norm by which the next step will be clipped."""
        saved = super().state_dict()
        return saved if self.max_grad_norm is None or self._last_norm is None else saved | {_LAST_NORM: self._last_norm}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or one of its class in an ordinary loop."""
        super().load_state_dict(state_dict)
        self._last_norm = state_dict.get(_LAST_NORM)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Raise: a hook before `step` would come after the updates."""
        raise ValueError(
            "register_step_pre_hook: parameters are updated in backward, before step() and so before this hook. Change gradients "
            "by a hook on the parameter (register_hook), or register a step post hook."
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "an optimizer in backward is bound to its parameters by their hooks and cannot be copied or pickled. Save its "
            "state_dict(), and load it into the optimizer of the other model."
        )


def _clipping(max_norm: float, norm: Tensor) -> Tensor:
    """Return the factor by which torch's `clip_grad_norm_` scales gradients of this norm."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
