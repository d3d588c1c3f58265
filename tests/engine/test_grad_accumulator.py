"""Gradients of parameters that are summed over chunks, apart from any model."""

from __future__ import annotations

import pytest
import torch

from streamgrad.engine.grad_accumulator import GradAccumulators


def test_gradients_of_many_weights_in_one_tensor_are_summed_in_float32():
    """As of experts, in 16 bits; a hook that the module puts on what it reads is refused, as on other parameters."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(2, 3, 3, dtype=torch.bfloat16))
    accumulators = GradAccumulators([module.weight], summed=True)
    gradients = torch.randn(5, 2, 3, 3).bfloat16().unbind()
    with accumulators.installed_in([module]):
        assert module.weight.data_ptr() == accumulators.parameters[0].data_ptr()
        for gradient in gradients:
            (module.weight * gradient).sum().backward()
    assert torch.equal(accumulators.take_gradients()[0], sum(each.float() for each in gradients).bfloat16())
    assert accumulators.take_gradients() == [None]
    with accumulators.installed_in([module]):
        module.weight.register_hook(lambda _: None)
    with pytest.raises(RuntimeError, match="registers a hook on its own parameter"):
        accumulators.take_sums()


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        return 2 * hidden

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_gives_a_parameter_no_gradient_leaves_none(dtype):
    """Not zeros, by which an optimizer with weight decay would move it."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(2, 3, 3, dtype=dtype))
    accumulators = GradAccumulators([module.weight], summed=True)
    with accumulators.installed_in([module]):
        _WithoutGradient.apply(torch.ones(3, dtype=dtype, requires_grad=True), module.weight).sum().backward()
    assert accumulators.take_gradients() == [None]


@pytest.mark.parametrize("shape", [(3,), (3, 2)])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameter_that_is_summed_over_chunks_is_refused(shape, register):
    """Also where it was removed again: it would have been called with the sum so far."""
    accumulators = GradAccumulators([torch.nn.Parameter(torch.ones(shape))], summed=True)
    getattr(accumulators.tensors[0], register)(lambda _: None).remove()
    with pytest.raises(RuntimeError, match="registers a hook on its own parameter"):
        accumulators.take_sums()
