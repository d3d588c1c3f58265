"""Carries the results of a module's call past what an engine does to its output.

Engines that shard parameters watch the tensors that a module returns, to gather its weights again when a gradient arrives. They
may also cast them: FSDP2's `output_dtype`, which Accelerate sets for `mixed_precision: bf16`, would round losses and
log-probabilities that are sums over a vocabulary, and the gradients that come back. So the module returns a scalar of no meaning:

    inside the call:   ticket = passage.leave(loss)
    the engine:        hooks, and ticket.to(dtype)
    after the call:    (loss,) = passage.arrive(ticket)

Gradients wait in the passage while the ticket's goes through the engine's hooks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamgrad.ops.autograd import first_order_only


class Passage:
    """The tensors of one call on their way out, and their gradients on the way back."""

    def __init__(self) -> None:
        self._values: tuple[Tensor, ...] = ()
        self._gradients: tuple[Tensor | None, ...] = ()

    def leave(self, *tensors: Tensor) -> Tensor:
        """Return the ticket for `tensors`, a scalar in the dtype of the first."""
        self._values = tuple(tensor.detach() for tensor in tensors)
        self._needed = [tensor.requires_grad for tensor in tensors]
        return _Leave.apply(self, *tensors)

    def arrive(self, ticket: Tensor) -> tuple[Tensor, ...]:
        """Return what left, unchanged, with the ticket in the graph between."""
        return _Arrive.apply(self, ticket)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> Tensor:
        ctx.passage = passage
        ctx.materialize_grads = False
        return tensors[0].new_zeros(())

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dticket: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.passage._gradients = ctx.passage._gradients, ()
        return None, *gradients


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, ticket: Tensor) -> tuple[Tensor, ...]:
        values, passage._values = passage._values, ()
        ctx.passage, ctx.ticket = passage, ticket.detach()
        ctx.materialize_grads = False
        ctx.mark_non_differentiable(*(value for value, needed in zip(values, passage._needed, strict=True) if not needed))
        return values

    @staticmethod
    @first_order_only
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor]:
        ctx.passage._gradients = gradients
        return None, torch.ones_like(ctx.ticket)
