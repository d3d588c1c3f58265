"""Embeddings and head that are one weight: one gradient of both uses, exact, and never a second one of the vocabulary's size."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn import functional as F

import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step
from streamgrad.head import tied_weight
from streamgrad.head.tied_weight import embedded_with_tied_weight
from streamgrad.hf.tied_embeddings import HeadWeight
from streamgrad.memory.live_bytes import LiveBytes
from tiny import tiny_model, tokens

ROWS, WIDTH = 23, 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Let blocks be so small that a tiny vocabulary has several, the last one shorter."""
    monkeypatch.setattr(tied_weight, "tied_block_rows", lambda vocabulary, width, itemsize: 7)
    with no_float32():
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("uses", ["both", "embeddings", "head"])
def test_gradient_is_autograds(uses, padding, dtype):
    """Bit by bit: rows of equal ids are summed, and that sum added to the head's gradient, as autograd does."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, dtype=dtype)
    ids = torch.randint(ROWS, (2, 40))
    factor, hidden = torch.randn(2, 40, WIDTH, dtype=dtype), torch.randn(9, WIDTH, dtype=dtype)

    def gradient(embedded_with):
        leaf = weight.clone().requires_grad_()
        embedded, of_head = embedded_with(ids, leaf, padding)
        terms = {"embeddings": (embedded * factor).sum(), "head": F.linear(hidden, of_head).square().sum()}
        loss = sum(terms.values()) if uses == "both" else terms[uses]
        loss.backward()
        return leaf.grad

    expected = gradient(lambda ids, leaf, padding: (F.embedding(ids, leaf, padding), leaf))
    assert torch.equal(gradient(embedded_with_tied_weight), expected)


def tied_model(family="qwen3", **changes):
    return tiny_model(family, tie_word_embeddings=True, dtype=torch.float64, **changes)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "cohere", "granite"])
def test_model(family):
    """Families that scale their embeddings or logits among them; more than one step, adding to gradients that are there."""
    model, batch = tied_model(family), {"input_ids": tokens(2, 40), "labels": tokens(2, 40)}
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch), expected, tolerance=1e-10)
    model(**batch).loss.backward()
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, 2 * expected.gradients[name]) < 1e-10, name


def test_program_that_uses_the_weight_itself():
    """It looks tokens up twice, has a penalty on the weight, and runs backward twice."""
    model, ids = tied_model(), tokens(2, 24)

    def forward(model, batch):
        others = model.get_input_embeddings()(batch["input_ids"].flip(0)).square().mean()
        loss = model(**batch).loss + others + model.lm_head.weight.square().mean()
        loss.backward(retain_graph=True)
        return loss

    batch = {"input_ids": ids, "labels": ids}
    expected = run_step(model, batch, forward=forward)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch, forward=forward), expected, tolerance=1e-10)


def test_embeddings_of_the_program():
    """The model looks nothing up: the head's gradient is then the weight's, with what the program's own lookup adds."""
    model, ids = tied_model(), tokens(2, 24)

    def forward(model, batch):
        return model(inputs_embeds=model.get_input_embeddings()(ids), labels=ids).loss

    expected = run_step(model, {}, forward=forward)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, {}, forward=forward), expected, tolerance=1e-10)


@pytest.mark.parametrize("change", ["sparse", "scale_grad_by_freq"])
def test_lookups_that_differ_are_left_alone(change):
    model, ids = tied_model(), tokens(2, 24)
    setattr(model.get_input_embeddings(), change, True)
    batch = {"input_ids": ids, "labels": ids}
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch), expected, tolerance=1e-10)


def test_adapters_leave_it_frozen():
    model = tied_model()
    model.lm_head.weight.requires_grad_(False)
    batch = {"input_ids": tokens(2, 24), "labels": tokens(2, 24)}
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch), expected, tolerance=1e-10)


def test_one_gradient_less():
    """Counted: at the end of backward, at least one gradient of the vocabulary's size fewer than with each use's own."""
    model = tied_model(vocab_size=4096, num_hidden_layers=1, pad_token_id=None)
    ids = torch.randint(4096, (1, 32))
    streamgrad.enable(model, chunk_size=8)
    peaks = {}
    for tied in (True, False):
        with mock.patch.object(HeadWeight, "is_tied", tied):
            model.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            with LiveBytes() as live:
                loss.backward()
            peaks[tied] = live.peak_bytes
    # Two where autograd does not add in place, as under a mode that counts.
    assert peaks[False] - peaks[True] > 0.95 * model.lm_head.weight.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("count", [50, 5000], ids=["few tokens", "sorted tokens"])
def test_as_exact_as_autograd_on_a_gpu(count):
    """torch has two kernels there, by the number of tokens. Rows of equal ids are many, and their order is the kernels' own."""
    torch.manual_seed(0)
    weight = torch.randn(ROWS, WIDTH, device="cuda")
    ids, factor = torch.randint(ROWS, (1, count), device="cuda"), torch.randn(1, count, WIDTH, device="cuda")
    hidden = torch.randn(9, WIDTH, device="cuda")

    def gradient(embedded_with, dtype):
        leaf = weight.to(torch.bfloat16).to(dtype).requires_grad_()
        embedded, of_head = embedded_with(ids, leaf, None)
        term, product = embedded * factor.to(torch.bfloat16).to(dtype), F.linear(hidden.to(torch.bfloat16).to(dtype), of_head)
        (term.sum() + product.sum()).backward()
        return leaf.grad

    def plainly(ids, leaf, padding):
        return F.embedding(ids, leaf, padding), leaf

    truth = gradient(plainly, torch.float64)
    plain, ours = (relative_error(gradient(each, torch.bfloat16), truth) for each in (plainly, embedded_with_tied_weight))
    assert ours <= 1.2 * plain < 0.02
