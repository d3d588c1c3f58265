"""A tensor whose values are computed when something reads them, and not before.

    Deferred.product(hidden, weight, bias)  ==  F.linear(hidden, weight, bias)
    residual + Deferred                     ==  a Deferred of the sum

A sum of equal shapes stays deferred, and a copy of a product in 4 bits. Every other operation has the values computed first,
once, so a program gets what it would have got without; so do methods that read or replace a tensor's memory. Code outside of
torch that is given the tensor itself and takes its address gets an error. Autograd takes a Deferred for the tensor that it
stands for: the graph is there, whether or not the values are.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from streamgrad.ops.autograd import without_autocast


class Deferred(Tensor):
    """A product, a copy of one, or a sum that has one in it, which is computed where it is read."""

    _operands: tuple[Tensor, ...]  # hidden, weight and perhaps bias of a product, or one or two terms; none once it is computed
    _function: Callable[..., Tensor]  # of a product
    _versions: list[int]  # of the operands
    _label: Any  # of a product; None for a sum
    _computed: Tensor | None
    _sums: list[weakref.ref[Deferred]]  # that it is a term of

    @staticmethod
    def __new__(
        cls, operands: tuple[Tensor, ...], shape: torch.Size, label: Any = None, function: Callable[..., Tensor] = F.linear
    ) -> Deferred:
        like = operands[0]
        deferred: Deferred = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        deferred._operands, deferred._label, deferred._function, deferred._computed = operands, label, function, None
        deferred._versions, deferred._sums = [operand._version for operand in operands], []
        for operand in operands:
            if isinstance(operand, Deferred):
                operand._sums.append(weakref.ref(deferred))
        torch._C._set_throw_on_mutable_data_ptr(deferred)  # which would be null
        return deferred

    def __init__(self, *args: Any, **options: Any) -> None:
        """Do nothing: `__new__` has done it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def product(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        label: Any,
        function: Callable[..., Tensor] = F.linear,
        outputs: int | None = None,
    ) -> Deferred:
        """Return `function(hidden, weight, bias)`, of `hidden`'s dtype; `label` tells it from other products.

        The function is linear in `hidden`. A token has as many `outputs` as the weight has rows, unless they are given.
        """
        operands = (hidden, weight) if bias is None else (hidden, weight, bias)
        shape = torch.Size((*hidden.shape[:-1], weight.shape[0] if outputs is None else outputs))
        return cls(operands, shape, label, function)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.add.Tensor and not kwargs:
            left, right = map(_computed, args)
            if _may_stay_deferred(left, right):
                total = cls((left, right), left.shape)
                for term in args:  # if it is changed in place, this sum is computed first
                    if isinstance(term, Deferred) and term._computed is not None:
                        term._sums.append(weakref.ref(total))
                return total
        if function is torch.ops.aten.clone.default and not kwargs and _stays_deferred_in_copies(args[0]):
            return cls(args, args[0].shape)
        result = function(*tree_map_only(Deferred, cls.values, args), **tree_map_only(Deferred, cls.values, kwargs or {}))
        # What was changed in place is still the tensor that the program knows.
        changed = (arg for arg in args if isinstance(arg, Deferred) and arg._computed is result)
        return next(changed, result)

    def values(self) -> Tensor:
        """Return the tensor itself, computed by now, and sums that it is a term of too, as the caller may write to it."""
        computed = self._compute()
        while self._sums:
            total = self._sums.pop()()
            if total is not None and total._operands:  # neither computed nor forgotten
                total._compute()
        return computed

    def _compute(self) -> Tensor:
        if self._computed is None:
            self._check_operands()
            with torch.no_grad(), without_autocast(self.device.type):
                if self._label is None:
                    first, *rest = (each._compute() if isinstance(each, Deferred) else each for each in self._operands)
                    self._computed = first + rest[0] if rest else first.clone()
                else:
                    self._computed = self._function(*self._operands)
            self._operands = ()
        return self._computed

    def last_and_combined(self, weights_1L: Tensor) -> Tensor:
        """Return `self[:, -1:]` and, after it, `weights @ self`, (B, 2, ...), by products of these two tokens and no more."""
        if self._computed is not None:
            return _last_and_combined(self._computed, weights_1L)
        self._check_operands()
        with without_autocast(self.device.type):
            if self._label is None:
                first, *rest = (_last_and_combined(each, weights_1L) for each in self._operands)
                return sum(rest, first)
            hidden, weight, *bias = self._operands
            product = self._function(_last_and_combined(hidden, weights_1L), weight)
            if not bias:
                return product
            return product + torch.cat([torch.ones_like(weights_1L[:, :1]), weights_1L.sum(dim=1, keepdim=True)]) * bias[0]

    def labels(self) -> list[Any]:
        """Return the labels of the products in it that have not been computed."""
        if self._label is not None and self._computed is None:
            return [self._label]
        return [label for each in self._operands if isinstance(each, Deferred) for label in each.labels()]

    # --- methods of torch that reach a tensor's memory without an operation -------------------------------------------------

    def data_ptr(self) -> int:
        return self.values().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values().untyped_storage()

    def numpy(self, *, force: bool = False) -> Any:
        return self._ordinary().numpy(force=force)

    def tolist(self) -> Any:
        return self.values().tolist()

    def share_memory_(self) -> Deferred:
        self.values().share_memory_()
        return self

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        return self._ordinary().__dlpack__(*args, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._ordinary(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    def _ordinary(self) -> Tensor:
        """Return a view of the values that has the graph, so that torch refuses what it would have refused."""
        return self.view_as(self)

    @property
    def data(self) -> Tensor:
        return self.values().data

    @data.setter
    def data(self, other: Tensor) -> None:
        if (other.shape, other.dtype, other.device) != (self.shape, self.dtype, self.device):
            raise RuntimeError(
                "`.data` of a layer's product was set to a tensor of another shape, dtype or device. Set it to one of the same, "
                "or call streamgrad.disable(model)."
            )
        self.values().data = other

    # --- what has become of the operands ------------------------------------------------------------------------------------

    def _check_operands(self) -> None:
        """Raise if an operand is no longer what it was when the operation was called."""
        if not self._operands:
            raise RuntimeError(
                "the output of a layer that was run again in backward was kept, as by a hook, and is read afterwards. Copy what "
                "you need of it in the hook."
            )
        if [operand._version for operand in self._operands] != self._versions:
            raise RuntimeError(
                "an operand of a layer's last product or sum was changed in place before its result was read, so that result "
                "cannot be computed any more. Change a copy of it, or call streamgrad.disable(model)."
            )


def values_of(tensor: Tensor) -> Tensor:
    """Return the tensor with its values computed, if they were deferred."""
    return tensor.values() if isinstance(tensor, Deferred) else tensor


def _last_and_combined(tensor: Tensor, weights_1L: Tensor) -> Tensor:
    if isinstance(tensor, Deferred):
        return tensor.last_and_combined(weights_1L)
    return torch.cat([tensor[:, -1:], weights_1L @ tensor], dim=1)


def forget(tensor: Tensor) -> None:
    """Drop what a deferred tensor would be computed from, as nothing will read it; its graph stays."""
    if isinstance(tensor, Deferred):  # once it is computed it has no operands, and a graph may have saved it
        operands, tensor._operands = tensor._operands, ()
        for operand in operands:
            forget(operand)


def _computed(tensor: Any) -> Any:
    """Return the values of what is computed by now, and everything else as it is."""
    return tensor if type(tensor) is not Deferred or tensor._computed is None else tensor.values()


def _stays_deferred_in_copies(tensor: Any) -> bool:
    """Return whether a copy of the tensor stays deferred: that of a product in 4 bits, which PEFT makes, with a graph.

    A copy without a graph counts as a read. A program makes such copies to keep them, and in the forward of its `Function`s.
    """
    is_product = type(tensor) is Deferred and tensor._computed is None and tensor._label is not None
    return is_product and tensor._function is not F.linear and torch.is_grad_enabled()


def _may_stay_deferred(left: Any, right: Any) -> bool:
    """Return whether a sum is of two tensors that are alike, one of them deferred."""
    for each, other in ((left, right), (right, left)):
        if type(each) is Deferred:
            plain = type(other) is Deferred or (type(other) is Tensor and _is_in_order(other))
            return bool(plain and left.shape == right.shape and left.dtype == right.dtype and left.device == right.device)
    return False


def _is_in_order(tensor: Tensor) -> bool:
    """Return whether a sum with a contiguous tensor is contiguous: this one is too, or is a slice, as of some tokens of rows."""
    strides = tensor.stride()
    return tensor.is_contiguous() or (strides[-1] > 0 and all(left >= right for left, right in pairwise(strides)))
