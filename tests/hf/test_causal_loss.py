"""The loss of a model: transformers' own is streamed, another one gets full logits, and other labels are refused."""

from __future__ import annotations

import functools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.loss import loss_utils

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from tiny import tiny_model, tokens

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}


def with_forward(change):
    """Return a model of a class whose forward runs that of Llama with `change(arguments)`."""
    model = tiny_model("llama")
    kind = type(model)

    def forward(self, input_ids=None, labels=None, **kwargs):
        return kind.forward(self, **change({"input_ids": input_ids, "labels": labels} | kwargs))

    model.__class__ = type("Changed", (kind,), {"forward": forward})
    return model


def masked(arguments):
    return arguments | {"labels": arguments["labels"].masked_fill(arguments["input_ids"] % 3 == 1, -100)}


def without_divisor(arguments):
    return {name: value for name, value in arguments.items() if name != "num_items_in_batch"}


CHANGES = {
    "labels": masked,
    "num_items_in_batch": without_divisor,
    "ignore_index": lambda arguments: arguments | {"ignore_index": 7},
    "shift_labels": lambda arguments: arguments | {"shift_labels": arguments["labels"]},
}


@pytest.mark.parametrize("argument", CHANGES)
def test_a_forward_that_passes_other_arguments_to_the_loss_is_refused(argument):
    model = with_forward(CHANGES[argument])
    batch = batches.plain(model) | {"num_items_in_batch": torch.tensor(77)}
    stock = run_step(tiny_model("llama"), batch)
    assert not torch.equal(run_step(model, batch).loss, stock.loss)
    model.zero_grad()
    with pytest.raises(ValueError, match=f"another {argument} than it was called with"):
        run_step(streamgrad.enable(model, **OPTIONS), batch)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_forward_that_passes_equal_labels_is_streamed():
    model = with_forward(lambda arguments: arguments | {"labels": arguments["labels"].clone()})
    batch = batches.counted(model)
    with no_float32():
        expected = run_step(model, batch)
        assert_same_step(run_step(streamgrad.enable(model, **OPTIONS), batch), expected, 1e-10)


def smoothed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
    return F.cross_entropy(source, target, ignore_index=ignore_index, label_smoothing=0.2)


PLAIN = F.cross_entropy


def doubled_cross_entropy(*args, **kwargs):
    return 2 * PLAIN(*args, **kwargs)


def replace_loss(monkeypatch):
    """Under its name, as a library does that patches transformers before streamgrad is imported."""
    stock = loss_utils.ForCausalLMLoss

    @functools.wraps(stock)
    def doubled(*args, **kwargs):
        return 2 * stock(*args, **kwargs)

    monkeypatch.setattr(loss_utils, "ForCausalLMLoss", doubled)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", doubled)


class OfAModule(nn.Module):
    def forward(self, logits, labels, **kwargs):
        return 2 * loss_utils.ForCausalLMLoss(logits, labels, **kwargs)


@pytest.mark.parametrize("name", ["loss_function", "_loss_function"])
def test_a_loss_that_is_a_module_is_what_the_stock_model_takes_it_for(name):
    """It has full logits under the second name, and is not called under the first."""
    model = tiny_model("llama")
    setattr(model, name, OfAModule())
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **OPTIONS)
        with nullcontext() if name == "loss_function" else pytest.warns(UserWarning, match="'OfAModule', needs full logits"):
            assert_same_step(run_step(model, batch), expected, 1e-10)


REPLACED = {
    "ForCausalLMLoss": replace_loss,
    "fixed_cross_entropy": lambda patch: patch.setattr(loss_utils, "fixed_cross_entropy", smoothed_cross_entropy),
    "cross_entropy": lambda patch: patch.setattr(F, "cross_entropy", doubled_cross_entropy),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_loss_that_a_library_has_replaced_is_computed_of_full_logits(name, monkeypatch):
    model = tiny_model("llama")
    batch = batches.plain(model)
    plain = run_step(model, batch)
    REPLACED[name](monkeypatch)
    expected = run_step(model, batch)
    assert not torch.equal(expected.loss, plain.loss)
    with pytest.warns(UserWarning, match=f"{name}.*The layers are streamed, the head is not"):
        actual = run_step(streamgrad.enable(model, **OPTIONS), batch)
    assert_same_step(actual, expected, 1e-10)


@pytest.mark.parametrize("divisor", [0, torch.tensor(0), 8], ids=["0", "tensor 0", "8"])
@pytest.mark.parametrize("head", ["linear", "adapter"])
def test_no_token_to_predict_gives_zero_gradients_whatever_the_divisor(head, divisor):
    """As on a rank of a batch whose labels were all masked."""
    model = tiny_model("llama") if head == "linear" else with_lora(tiny_model("llama"), targets=["q_proj", "lm_head"])
    ids = tokens(2, 17)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": divisor}
    expected = run_step(model, batch)
    assert not any(gradient.any() for gradient in expected.gradients.values() if gradient is not None)
    assert_same_step(run_step(streamgrad.enable(model, **OPTIONS), batch), expected, 1e-10)


@pytest.mark.parametrize("head", ["linear", "adapter"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_divisor_with_one_element_has_any_shape(shape, head):
    model = tiny_model("llama") if head == "linear" else with_lora(tiny_model("llama"), targets=["q_proj", "lm_head"])
    batch = batches.plain(model) | {"num_items_in_batch": torch.full(shape, 77)}
    with no_float32():
        expected = run_step(model, batch)
        actual = run_step(streamgrad.enable(model, **OPTIONS), batch)
    assert actual.loss.shape == expected.loss.shape
    assert_same_step(actual, expected, 1e-10)


@pytest.mark.parametrize("change", [lambda out: out + 1, lambda out: 1 - out, lambda out: -out, lambda out: out > 0])
def test_a_hook_that_computes_with_logits_is_named(change):
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    model.lm_head.register_forward_hook(lambda module, args, out: change(out))
    with pytest.raises(ValueError, match="computes with logits that are never made while streaming"):
        model(**batches.plain(model))
