"""A tensor that is computed where it is read gives what it would have given at once, to every operation and to autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from streamgrad.engine.grad_accumulator import linear
from streamgrad.ops.deferred import Deferred, forget, values_of


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 5, 4), (2, 5, 3), (4, 3), (4,)  # residual, hidden, weight, bias
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def change_in_place(residual, product):
    residual = residual.clone()
    residual += product
    return residual


def change_product(residual, product):
    product.add_(1.0)
    return residual + product.mul_(2.0)


def change_view_of_product(residual, product):
    product.view(-1)[::3] = 7.0
    return residual + product


# Whatever a layer may do with its last product. The first four read nothing.
USES = {
    "sum": (lambda residual, product: residual + product, 0),
    "sum the other way round": (lambda residual, product: product + residual, 0),
    "product alone": (lambda residual, product: product, 0),
    "two sums": (lambda residual, product: residual.sin() + (product + residual.cos()), 0),
    "twice the same": (lambda residual, product: residual + product + product, 0),
    "scaled": (lambda residual, product: residual + 0.3 * product, 1),
    "a sum with alpha": (lambda residual, product: residual.add(product, alpha=2.0), 1),
    "a sum that spreads": (lambda residual, product: residual[:1, :1] + product, 1),
    "a sum with a number": (lambda residual, product: residual + (product + 1.0), 1),
    "a sum of another dtype": (lambda residual, product: residual.to(torch.complex128) + product, 1),
    "a sum in another layout": (lambda residual, product: residual.mT.contiguous().mT + product, 1),
    "activation": (lambda residual, product: F.silu(residual + product), 1),
    "view": (lambda residual, product: (residual + product).view(10, 4), 1),
    "slice": (lambda residual, product: residual[:, 1:] + product[:, 1:], 1),
    "concatenated": (lambda residual, product: torch.cat([residual, product], dim=1), 1),
    "times itself": (lambda residual, product: product * product + residual, 1),
    "into the residual": (change_in_place, 1),
    "changed": (change_product, 1),
    "changed by a view": (change_view_of_product, 1),
    "a branch on its values": (lambda residual, product: residual + product if product.sum() > 0 else residual - product, 1),
}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("use", USES)
def test_values_and_gradients_are_those_of_the_stock_product(use, with_bias):
    function, reads = USES[use]
    steps: list[list[Tensor]] = []
    for deferred in (False, True):
        residual, hidden, weight, bias = inputs()
        operands = hidden.sin(), weight, bias if with_bias else None
        product = linear(*operands, label="a label") if deferred else F.linear(*operands)
        out = function(residual * 1.0, product)
        assert not deferred or isinstance(out, Deferred) == (reads == 0)
        values = values_of(out).detach().clone()
        used = [residual, hidden, weight, *([bias] if with_bias else [])]
        seeds = torch.linspace(-1.0, 2.0, values.numel(), dtype=values.dtype).view_as(values)
        gradients = torch.autograd.grad(out, used, seeds, allow_unused=True)
        steps.append([values, *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)])
    for stock, ours in zip(*steps, strict=True):
        assert torch.equal(stock, ours) or torch.allclose(stock, ours, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("read_first", [False, True])
def test_the_graph_is_there_whether_or_not_the_values_are(read_first):
    residual, hidden, weight, bias = inputs()
    out = residual + linear(hidden, weight, bias, label="a label")
    assert isinstance(out, Deferred) and out.requires_grad and out.labels() == ["a label"]
    if read_first:
        out.values()
        assert out.labels() == []
    forget(out)
    out.backward(torch.ones_like(residual))
    torch.testing.assert_close(weight.grad, hidden.detach().flatten(0, 1).sum(0).expand(4, 3), rtol=1e-12, atol=0.0)


def test_the_last_token_and_the_terms_of_a_sum():
    residual, hidden, weight, bias = inputs()
    out = residual + linear(hidden, weight, bias, label="a label")
    torch.testing.assert_close(out.last_token(), (residual + F.linear(hidden, weight, bias))[:, -1])
    assert [term is expected for term, expected in zip(out.terms(), (residual, hidden), strict=True)] == [True, True]
    assert out.labels() == ["a label"]  # nothing of it has been computed


@pytest.mark.parametrize("changed", ["residual", "hidden", "weight"])
def test_an_operand_that_is_changed_before_it_is_read_is_refused(changed):
    residual, hidden, weight, _ = inputs()
    tensors = {"residual": residual.detach(), "hidden": hidden.detach(), "weight": weight.detach()}
    out = tensors["residual"] + linear(tensors["hidden"], tensors["weight"], label="a label")
    tensors[changed].mul_(2.0)
    with pytest.raises(RuntimeError, match="changed in place before its result was read"):
        out.relu()


def test_what_is_forgotten_cannot_be_read():
    residual, hidden, weight, _ = inputs()
    out = residual + linear(hidden, weight, label="a label")
    forget(out)
    with pytest.raises(RuntimeError, match="read after the re-run"):
        out.sum()


def test_operands_of_different_dtypes_are_refused_where_torch_refuses_them():
    _, hidden, weight, _ = inputs()
    with pytest.raises(RuntimeError, match="dtype"):
        linear(hidden, weight.float(), label="a label")
