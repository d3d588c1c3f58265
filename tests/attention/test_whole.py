"""Causal attention of whole sequences as an operator: equal to torch's own, forward and backward, whatever the layout."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gradients import relative_error
from streamgrad.attention import whole


def operand(heads: int, length: int, *, by_token: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(heads)
    shape = (2, length, heads, 8) if by_token else (2, heads, length, 8)
    drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
    return (drawn.transpose(1, 2) if by_token else drawn).detach().requires_grad_()


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(("length", "groups"), [(7, 2), (1, 4), (13, 1)])
def test_the_operator_is_causal_attention(length, groups, by_token):
    operands = [operand(heads, length, by_token=by_token) for heads in (4, groups, groups)]
    expected = scaled_dot_product_attention(*operands, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
    actual = whole.causal_attention(*operands, 0.3)
    weight = torch.randn_like(expected)
    pairs = zip(
        [actual, *torch.autograd.grad((actual * weight).sum(), operands)],
        [expected, *torch.autograd.grad((expected * weight).sum(), operands)],
        strict=True,
    )
    for ours, theirs in pairs:
        assert ours.shape == theirs.shape and relative_error(ours, theirs) <= 1e-12


def test_compilers_are_told_the_truth_of_the_operators():
    """By torch's own checks: shapes and strides, by which a graph is laid out, no result that shares memory, and gradients."""
    operators = torch.ops.streamgrad
    operands = [operand(heads, 5, by_token=True) for heads in (4, 2, 2)]
    out_BTHD, lse_BHT = operators.causal_attention(*operands, 0.3)
    backward = (out_BTHD.detach(), *(tensor.detach() for tensor in operands), out_BTHD.detach(), lse_BHT.detach(), 0.3)
    torch.library.opcheck(operators.causal_attention.default, (*operands, 0.3))
    torch.library.opcheck(operators.causal_attention_backward.default, backward)
