"""A tensor that is computed where it is read gives what it would have given at once, to every operation and to autograd."""

from __future__ import annotations

import copy
import pickle

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


# Whatever a layer may do with its last product. The first six read nothing.
USES = {
    "sum": (lambda residual, product: residual + product, 0),
    "sum the other way round": (lambda residual, product: product + residual, 0),
    "product alone": (lambda residual, product: product, 0),
    "two sums": (lambda residual, product: residual.sin() + (product + residual.cos()), 0),
    "twice the same": (lambda residual, product: residual + product + product, 0),
    "a slice of the residual": (lambda residual, product: torch.cat([residual, residual.sin()], dim=1)[:, 2:7] + product, 0),
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


@pytest.mark.parametrize("with_bias", [True, False])
def test_weighted_sums_of_tokens(with_bias):
    residual, hidden, weight, bias = inputs()
    bias = bias if with_bias else None
    out = residual + linear(hidden, weight, bias, label="a label")
    weights = torch.tensor([[0.3, -1.0, 0.5, 2.0, 0.1]], dtype=torch.float64)
    expected = residual + F.linear(hidden, weight, bias)
    torch.testing.assert_close(out.last_and_combined(weights), torch.cat([expected[:, -1:], weights @ expected], dim=1))
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
    with pytest.raises(RuntimeError, match="is read afterwards"):
        out.sum()


def test_operands_of_different_dtypes_are_refused_where_torch_refuses_them():
    _, hidden, weight, _ = inputs()
    with pytest.raises(RuntimeError, match="dtype"):
        linear(hidden, weight.float(), label="a label")


# --- what reaches a tensor's memory without an operation ------------------------------------------------------------------------

READS = {
    "numpy": lambda product: torch.from_numpy(product.numpy()),
    "list": lambda product: torch.tensor(product.tolist(), dtype=product.dtype),
    "dlpack": torch.from_dlpack,
    "deepcopy": copy.deepcopy,
    "pickle": lambda product: pickle.loads(pickle.dumps(product)),
    "storage": lambda product: torch.empty(0, dtype=product.dtype).set_(product.untyped_storage()).view(product.shape),
    "data": lambda product: product.data,
}


@pytest.mark.parametrize("read", READS)
def test_memory_is_read_once_it_is_there(read):
    _, hidden, weight, _ = (tensor.detach() for tensor in inputs())
    out = READS[read](linear(hidden, weight, label="a label"))
    assert type(out) is Tensor and torch.equal(out, F.linear(hidden, weight))


def test_an_address_is_that_of_the_values():
    _, hidden, weight, _ = inputs()
    product = linear(hidden, weight, label="a label")
    assert product.data_ptr() == product.values().data_ptr() != 0


def test_data_that_are_assigned_are_the_values():
    residual, hidden, weight, _ = inputs()
    product = linear(hidden, weight, label="a label")
    product.data = 3.0 * product.data
    torch.testing.assert_close(residual + product, residual + 3.0 * F.linear(hidden, weight))


def test_a_term_that_is_written_to_unseen_changes_no_sum():
    residual, hidden, weight, _ = inputs()
    product = linear(hidden, weight, label="a label")
    out = residual + product
    product.data.zero_()
    torch.testing.assert_close(values_of(out), residual + F.linear(hidden, weight))


def test_a_term_that_was_read_and_is_changed_changes_no_sum():
    _, hidden, weight, _ = inputs()
    read, unread = (linear(factor * hidden, weight, label="a label") for factor in (1.0, 2.0))
    expected = 3.0 * F.linear(hidden, weight)
    assert read.isfinite().all()
    out = unread + read
    with torch.no_grad():
        read.mul_(-1.0)
    torch.testing.assert_close(values_of(out), expected)
    torch.testing.assert_close(values_of(read), -expected / 3.0)


def test_a_term_that_was_read_may_be_read_after_its_sum_is_forgotten():
    _, hidden, weight, _ = inputs()
    product = linear(hidden, weight, label="a label")
    square = product * product
    forget(product + linear(hidden, weight, label="a label"))
    square.sum().backward()
    assert hidden.grad is not None and product.isfinite().all()


def test_copies_of_a_plain_product_are_reads():
    """Only a product of another kind, which PEFT copies, stays deferred in a copy, and only in one that has a graph."""
    _, hidden, weight, _ = inputs()
    assert not isinstance(linear(hidden, weight, label="a label").clone(), Deferred)

    def double(hidden: Tensor, weight: Tensor) -> Tensor:
        return 2.0 * F.linear(hidden, weight)

    product = Deferred.product(hidden.detach(), weight.detach(), None, label="a label", function=double)
    copied = product.clone()
    assert isinstance(copied, Deferred) and copied.labels() == ["a label"]
    weights = torch.full((1, 5), 0.5, dtype=torch.float64)
    expected = double(hidden, weight).detach()
    torch.testing.assert_close(copied.last_and_combined(weights), torch.cat([expected[:, -1:], weights @ expected], dim=1))
    product.zero_()
    torch.testing.assert_close(values_of(copied), expected)
    with torch.no_grad():
        assert not isinstance(
            Deferred.product(hidden.detach(), weight.detach(), None, label="a label", function=double).clone(), Deferred
        )


def test_a_graph_may_have_saved_what_is_forgotten():
    residual, hidden, weight, _ = inputs()
    out = residual + linear(hidden, weight, label="a label")
    square = out * out
    forget(out)
    square.sum().backward()
    torch.testing.assert_close(residual.grad, 2.0 * (residual + F.linear(hidden, weight)).detach())


def test_autocast_where_it_is_read_changes_nothing():
    residual, hidden, weight, _ = (tensor.detach().float() for tensor in inputs())
    outs = [residual + Deferred.product(hidden, weight, None, label="a label") for _ in range(2)]
    weights = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values, last = outs[0].values(), outs[1].last_and_combined(weights)
    expected = residual + F.linear(hidden, weight)
    assert torch.equal(values, expected)
    torch.testing.assert_close(last[:, 0], expected[:, -1])


def test_the_input_of_a_frozen_weight_may_be_changed():
    """As by F.linear, which does not save it."""
    _, hidden, weight, _ = inputs()
    inner = hidden * 1.0
    out = linear(inner, weight.detach(), label="a label") * 2.0
    inner.mul_(3.0)
    out.sum().backward()
    torch.testing.assert_close(hidden.grad, 2.0 * weight.detach().sum(0).expand(2, 5, 3))
