"""What stands in `.grad` for a gradient that an update in backward has used and freed.

If `.grad` were None, whatever comes between backward and step (clipping, a GradScaler, a loop that logs norms) would find no
gradient, do nothing and say nothing. This tensor has no memory, and raises for every operation but its norm.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_NORMS, _FACTORS = (_ATEN.linalg_vector_norm, _ATEN._foreach_norm), (_ATEN.mul_, _ATEN._foreach_mul_)
TWICE = (
    "a second backward came before optimizer.step(), but the parameters were updated by the first, whose gradients are gone. An "
    "optimizer in backward cannot accumulate gradients, or drop them: call step() after each backward, and pass larger batches. "
    "To accumulate, use an ordinary optimizer, or one that keeps gradients on the host (docs/optimizers.md). If a backward pass "
    "failed before this one, some parameters have its update: load a checkpoint, or call step() to go on with them."
)
_GONE = (
    "{what} asks for a gradient that an optimizer in backward has used and freed: its parameter is updated already, so clipping "
    "by the global norm or by value, and a GradScaler, come too late. To clip, pass max_grad_norm to optimizer_in_backward: it "
    "clips by the norm of the step before, or keep gradients on the host (docs/optimizers.md). To read the norm, take "
    "optimizer.grad_norm. Instead of a GradScaler, train in bf16. If that optimizer is of an earlier run, call its "
    "remove() (of a trainer: trainer.optimizer.optimizer.remove())."
)


class _Owner(Protocol):
    """What is used here of `in_backward.InBackward`."""

    @property
    def may_ask_norms(self) -> bool: ...

    def has_clipped_by(self, factor: Tensor) -> bool: ...


class FreedGradient(Tensor):
    """Has the shape, dtype and device of a gradient that is gone, and its norm."""

    norm_before_clipping: Tensor
    owner: weakref.ref[_Owner]  # the optimizer has the parameter, and with it this

    @staticmethod
    def __new__(cls, gradient: Tensor, norm: Tensor, owner: _Owner) -> FreedGradient:
        made = Tensor._make_wrapper_subclass(cls, gradient.shape, dtype=gradient.dtype, device=gradient.device)
        made.norm_before_clipping, made.owner = norm, weakref.ref(owner)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FreedGradient(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give the norm, and let the scaling pass that the update has made already; raise for everything else."""
        called, first, others = function.overloadpacket, args[0], args[1:]
        one = first[0] if isinstance(first, list) else first
        if isinstance(one, FreedGradient):
            owner = one.owner()
            if called in (_ATEN.add, _ATEN.add_):
                raise RuntimeError(TWICE)
            if owner is not None and called in _NORMS and owner.may_ask_norms and others in ((), (2,)) and not kwargs:
                return one.norm_before_clipping if first is one else [each.norm_before_clipping for each in first]
            if owner is not None and called in _FACTORS and isinstance(others[0], Tensor) and owner.has_clipped_by(others[0]):
                return one if first is one else None
        raise RuntimeError(_GONE.format(what=function))


def held_gradient(parameter: Tensor) -> Tensor | None:
    """Return the gradient that a parameter holds, if it has one that is not freed."""
    return None if isinstance(parameter.grad, FreedGradient) else parameter.grad
