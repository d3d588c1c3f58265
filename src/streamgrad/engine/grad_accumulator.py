"""Parameter gradients that are summed over chunks and leave once.

A *gradient accumulator* is a leaf tensor that shares a parameter's storage. While chunks run backward, the module holds
accumulators in place of its trainable parameters. The chunks' gradients are summed there (in fp32 for 16-bit parameters), and
nothing that watches the real parameters, a user's hook, DDP, FSDP or DeepSpeed, sees more than the one gradient that is returned.

The weight of a linear map, which is nearly all parameters, is summed by the matrix product itself: each chunk's product is added
to the sum in the product's own precision, and no gradient of the weight's size is made per chunk. Weights of many experts in one
tensor have a gradient per chunk, which is added to the sum as it is, with no copy in the precision of the sum.

Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch.nn import functional as F

from streamgrad.engine.replay import as_autocast
from streamgrad.ops.accumulate import accumulator_dtype, add_product_, zeros_for_sum
from streamgrad.ops.autograd import Function, first_order_only, own
from streamgrad.ops.deferred import Deferred
from streamgrad.ops.memory_label import labelled, memory_label


class GradAccumulator(Tensor):
    """A matrix's stand-in; as the weight of `torch.nn.functional.linear` it sums its gradient in the product."""

    product_sum: Tensor | None
    weight: Tensor  # the parameter's values
    autocast_copies: dict[torch.dtype, Tensor]  # by what the product is in

    @classmethod
    def of(cls, parameter: Tensor) -> GradAccumulator:
        values = parameter.detach()
        accumulator = values.as_subclass(cls)
        accumulator.requires_grad_()
        accumulator.product_sum, accumulator.weight, accumulator.autocast_copies = None, values, {}
        sum_dtype = accumulator_dtype(parameter.dtype)
        if sum_dtype is not parameter.dtype:
            accumulator.grad_dtype = sum_dtype  # what other operations give is summed by autograd
        return accumulator

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            is_weight = function is F.linear and len(args) > 1 and type(args[1]) is GradAccumulator
            transform = peek_interpreter_stack()  # of torch.func, which takes the product apart; a compiler's does not
            if is_weight and (transform is None or transform.key() == TransformType.Functionalize):
                return linear(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    def for_product(self) -> Tensor:
        """Return the values as a product sees them under autocast, cast once for all chunks."""
        dtype = torch.get_autocast_dtype(self.weight.device.type)
        if dtype not in self.autocast_copies:
            self.autocast_copies[dtype] = as_autocast(self.weight)
        return self.autocast_copies[dtype]

    def take_gradient(self) -> Tensor | None:
        """Return the sum and drop it here, as a graph may still hold the accumulator; None if no chunk reached it."""
        with torch._C.DisableTorchFunctionSubclass():
            terms = [term for term in (self.product_sum, self.grad) if term is not None]
            self.product_sum = self.grad = None
            return sum(terms[1:], terms[0]) if terms else None


@contextmanager
def swapped_parameters(modules: Sequence[nn.Module], stand_ins: Mapping[int, Tensor]) -> Iterator[set[int]]:
    """Let `modules` read stand-ins for parameters of their own, by ids, within the block; yield the ids that were found.

    Entries of `_parameters` are swapped, which no hook or engine observes, and put back whatever happens.
    """
    swapped: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for module in modules:
            entries = module._parameters
            for name, parameter in entries.items():
                if parameter is not None and id(parameter) in stand_ins:
                    swapped.append((entries, name, parameter))
                    entries[name] = stand_ins[id(parameter)]  # type: ignore[assignment]
        yield {id(parameter) for _, _, parameter in swapped}
    finally:
        for entries, name, parameter in swapped:
            entries[name] = parameter


class GradAccumulators:
    """The accumulators of `parameters`, in their order.

    Leaves of the parameter's own class stand in where a single chunk leaves nothing to be `summed`, and for parameters whose
    class has operations of its own (quantised training).
    """

    def __init__(self, parameters: Sequence[Tensor], *, summed: bool) -> None:
        self.parameters, self.summed = list(parameters), summed
        self.tensors = [stand_in(parameter, summed=summed) for parameter in self.parameters]
        self._sums = {index: _Sum() for index, leaf in enumerate(self.tensors) if summed and _is_of_many_weights(leaf)}
        with torch.enable_grad():
            self._read = [  # by the module
                _Added.apply(leaf, self._sums[index]) if index in self._sums else leaf for index, leaf in enumerate(self.tensors)
            ]

    @contextmanager
    def installed_in(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Let `modules` read the accumulators in place of the parameters within the block."""
        stand_ins = {id(parameter): tensor for parameter, tensor in zip(self.parameters, self._read, strict=True)}
        with swapped_parameters(modules, stand_ins) as swapped:
            if len(swapped) != len(stand_ins):
                raise RuntimeError(
                    "parameters of a layer were replaced between forward and backward (by load_state_dict(assign=True), "
                    "functional_call or assignment), so their gradients would be lost. Call backward first."
                )
            yield

    @labelled("gradients")
    def take_sums(self) -> list[Tensor | None]:
        """Return the summed gradients in the precision of the sum.

        An unused parameter has None, not zeros, so that optimizers and engines treat it as they do without streaming.
        """
        self._refuse_hooks()
        return [
            accumulator.take_gradient() if isinstance(accumulator, GradAccumulator | _Sum) else accumulator.grad
            for accumulator in (self._sums.get(index, leaf) for index, leaf in enumerate(self.tensors))
        ]

    def _refuse_hooks(self) -> None:
        """Raise if the module has put a hook on an accumulator: it was called once a chunk, with the sum so far."""
        hooks = [hooks for each in self._read for hooks in (each._backward_hooks, each._post_accumulate_grad_hooks)]
        if self.summed and any(each is not None for each in hooks):  # nor empty, as of one that was removed
            raise RuntimeError(
                "a module registers a hook on its own parameter while it runs, as tensor parallelism does, and would be called "
                "for each chunk of a sequence instead of once. Call streamgrad.disable(model) to train it without."
            )

    @labelled("gradients")
    def take_gradients(self) -> list[Tensor | None]:
        """Return the summed gradients in the parameters' own dtype. No sum outlives its conversion."""
        sums = self.take_sums()[::-1]
        return [_converted(sums.pop(), parameter.dtype) for parameter in self.parameters]


class _Sum:
    """The sum of a parameter's gradients."""

    total: Tensor | None = None

    def take_gradient(self) -> Tensor | None:
        """Return the sum and drop it here, as a graph may still hold it; None if no chunk reached the parameter."""
        total, self.total = self.total, None
        return total


def _is_of_many_weights(leaf: Tensor) -> bool:
    """Return whether a leaf is summed in another precision, and too large for a copy of each chunk's gradient in that."""
    return leaf.dim() > 2 and type(leaf) is Tensor and leaf.dtype is not accumulator_dtype(leaf.dtype)


class _Added(Function):
    """The identity on a parameter, whose gradient is added to a sum."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, into: _Sum) -> Tensor:
        ctx.into = into
        ctx.materialize_grads = False
        return own(parameter.detach())

    @staticmethod
    @first_order_only
    @labelled("gradients")
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[None, None]:
        into: _Sum = ctx.into
        if gradient is not None:
            into.total = gradient.to(accumulator_dtype(gradient.dtype)) if into.total is None else into.total.add_(gradient)
        return None, None


def _converted(total: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if total is None else total.to(dtype)


def stand_in(parameter: Tensor, *, summed: bool) -> Tensor:
    """Return a leaf with the parameter's values, of the parameter's class if that may replace operations of torch."""
    is_plain = type(parameter) in (nn.Parameter, Tensor)
    if summed and is_plain and parameter.dim() == 2 and not parameter.is_complex():
        return GradAccumulator.of(parameter)
    leaf = parameter.detach()
    if not is_plain and type(leaf) is not type(parameter):
        leaf = leaf.as_subclass(type(parameter))
    leaf.requires_grad_()
    if summed and leaf.dtype is not accumulator_dtype(leaf.dtype):
        leaf.grad_dtype = accumulator_dtype(leaf.dtype)  # what chunks give is summed by autograd
    return leaf


def linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, label: Any = None, given: Tensor | None = None
) -> Tensor:
    """Return `F.linear` under the current autocast, computed where it is read if a `label` is given, or `given` with its graph.

    The gradient of a `GradAccumulator` goes into its `product_sum`.
    """
    device_type, accumulator = hidden.device.type, weight if type(weight) is GradAccumulator else None
    if not torch.is_autocast_enabled(device_type):
        return _product(accumulator, hidden, weight if accumulator is None else accumulator.weight, bias, label, given)
    operands = as_autocast(hidden), as_autocast(weight) if accumulator is None else accumulator.for_product()
    bias = None if bias is None else as_autocast(bias)
    with torch.autocast(device_type, enabled=False):
        return _product(accumulator, *operands, bias, label, given)


def _product(
    accumulator: GradAccumulator | None, hidden: Tensor, weight: Tensor, bias: Tensor | None, label: Any, given: Tensor | None
) -> Tensor:
    if label is not None:
        of_one_dtype = weight.dtype is hidden.dtype and (bias is None or bias.dtype is hidden.dtype)
        # Operands of several dtypes are refused by torch where the product is called.
        label = label if of_one_dtype and may_be_deferred(hidden.dtype) else None
    if torch.is_grad_enabled():
        return _Product.apply(accumulator, hidden, weight, bias, label, given)
    if given is not None:
        return given
    return F.linear(hidden, weight, bias) if label is None else Deferred.product(hidden, weight, bias, label=label)


def may_be_deferred(dtype: torch.dtype) -> bool:
    """Return whether a product in `dtype` may be computed later, of its tokens or of sums of them.

    Not in float32: where TF32 is allowed, a product of few tokens differs from that of many by what guards take for a change.
    """
    return dtype is not torch.float32


class _Product(Function):
    """Computes `F.linear(hidden, weight, bias)` of real numbers, defers it if it is given a label, or is given it.

    With an accumulator the weight's gradient goes into its sum. It is an input: it makes a graph where nothing else needs one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        accumulator: GradAccumulator | None,
        hidden: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        label: Any,
        given: Tensor | None,
    ) -> Tensor:
        ctx.accumulator = accumulator
        ctx.materialize_grads = False
        # As F.linear does: the input of a frozen weight is neither held nor watched.
        hidden_is_read = accumulator is not None or ctx.needs_input_grad[2]
        weight_is_read = accumulator is not None or ctx.needs_input_grad[1]
        ctx.save_for_backward(hidden if hidden_is_read else None, weight_OI if weight_is_read else None)
        if given is not None:
            return given.detach()  # as it is no input of the function
        if label is not None:
            return Deferred.product(hidden, weight_OI, bias_O, label=label)
        return own(F.linear(hidden, weight_OI, bias_O))

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight_OI = ctx.saved_tensors
        tokens = math.prod(dout.shape[:-1])  # by -1, nothing would be said of a width of 0
        dout_NO = dout.reshape(tokens, dout.shape[-1])
        hidden_NI: Any = None if hidden is None else hidden.reshape(tokens, hidden.shape[-1])
        accumulator: GradAccumulator | None = ctx.accumulator
        # A layer may call torch.autograd.grad for the gradient of another tensor, which is no part of the weight's.
        if accumulator is not None and torch._C._will_engine_execute_node(ctx.next_functions[0][0]):
            if accumulator.product_sum is None:
                with memory_label("gradients"):
                    accumulator.product_sum = zeros_for_sum(weight_OI)
            add_product_(accumulator.product_sum, dout_NO.mT, hidden_NI)
        dhidden = dout @ weight_OI if ctx.needs_input_grad[1] else None
        dweight = dout_NO.mT @ hidden_NI if ctx.needs_input_grad[2] else None
        dbias = dout_NO.sum(dim=0) if ctx.needs_input_grad[3] else None
        return None, dhidden, dweight, dbias, None, None
