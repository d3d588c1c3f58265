"""Embeddings and head that are one weight: one gradient of both uses, exact, and never a second one of the vocabulary's size."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step
from streamgrad.head import tied_weight
from streamgrad.head.tied_weight import embedded_with_tied_weight
from streamgrad.hf import step_facts
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.tied_embeddings import HeadWeight
from streamgrad.memory.live_bytes import LiveBytes
from tiny import VOCABULARY, tiny_model, tokens

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


def test_scored_tokens():
    """By the call with which TRL's trainers score tokens, whose head makes its gradient in backward."""
    pytest.importorskip("trl", reason="needs trl: pip install 'streamgrad[trl]'")
    from streamgrad.trl.scoring import add_streamed_head

    model, batch = tied_model(), {"input_ids": tokens(2, 24), "labels": tokens(2, 24)}
    expected = run_step(model, batch)
    add_streamed_head(model, streamgrad.StreamConfig(chunk_size=8, head_chunk_size=5))
    actual = run_step(model, batch, forward=lambda model, batch: model(**batch, fused_lm_head=True).loss)
    assert_same_step(actual, expected, tolerance=1e-10)


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


def quantised_while_called(module):
    """Give a module rounded weights for the time of its call, as straight-through quantisation does."""

    def before(module, args):
        module.kept = module.weight.data
        module.weight.data = (module.kept * 4).round() / 4

    def after(module, args, output):
        module.weight.data = module.kept

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def swapped_while_called(module):
    """Give a module another parameter for the time of its call, which is a function of its own."""

    def before(module, args):
        module.kept = module._parameters["weight"]
        module._parameters["weight"] = module.kept * 2.0

    def after(module, args, output):
        module._parameters["weight"] = module.kept

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


@pytest.mark.parametrize("change", [quantised_while_called, swapped_while_called])
@pytest.mark.parametrize("changed", ["head", "embeddings"])
def test_weights_that_differ_in_one_of_the_two_calls(changed, change):
    model, batch = tied_model(), {"input_ids": tokens(2, 24), "labels": tokens(2, 24)}
    change(model.lm_head if changed == "head" else model.get_input_embeddings())
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch), expected, tolerance=1e-10)


def looks_up_and_differentiates(model):
    """A hook in the middle of the model looks tokens up itself, and runs backward through them at once."""
    embeddings = model.get_input_embeddings()
    model.model.norm.register_forward_pre_hook(lambda *_: embeddings(tokens(1, 5)).square().sum().backward())


def input_is_a_leaf(model):
    """The layers get a leaf in the place of the embeddings, which have a loss of their own."""
    kept = []

    def hook(module, args, output):
        kept.append(output)
        return output.detach().requires_grad_()

    model.get_input_embeddings().register_forward_hook(hook)
    model.register_forward_hook(lambda *_: kept.pop().square().sum().backward())


def checkpointed(model):
    """A program of its own checkpoints the lookup, with what follows it."""
    embeddings = model.get_input_embeddings()

    class Checkpointed(type(embeddings)):
        def __call__(self, ids):
            return checkpoint(lambda ids: super(Checkpointed, self).__call__(ids).sin(), ids, use_reentrant=False)

    embeddings.__class__ = Checkpointed


@pytest.mark.parametrize("change", [looks_up_and_differentiates, input_is_a_leaf, checkpointed])
def test_programs_that_reach_the_lookup(change):
    model, batch = tied_model(), {"input_ids": tokens(2, 24), "labels": tokens(2, 24)}
    change(model)
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch), expected, tolerance=1e-10)


def test_second_derivative_of_embeddings_alone():
    """A penalty on the embeddings' own gradient has no streamed layer in it."""
    model, batch = tied_model(), {"input_ids": tokens(2, 24), "labels": tokens(2, 24), "output_hidden_states": True}

    def forward(model, batch):
        out = model(**batch)
        weight = model.lm_head.weight
        (gradient,) = torch.autograd.grad(out.hidden_states[0].pow(3).sum(), weight, create_graph=True)
        return out.loss + gradient.square().sum()

    expected = run_step(model, batch, forward=forward)
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch, forward=forward), expected, tolerance=1e-10)


def test_ids_that_are_changed_before_backward():
    model, ids = tied_model(), tokens(2, 24)
    streamgrad.enable(model, chunk_size=8)
    loss = model(input_ids=ids, labels=ids.clone()).loss
    ids.add_(1)
    with pytest.raises(RuntimeError, match="an input of the embeddings was modified in place between forward and backward"):
        loss.backward()


def test_compiled_embeddings_are_left_alone():
    model, batch = tied_model(), {"input_ids": tokens(2, 24), "labels": tokens(2, 24)}
    expected = run_step(model, batch)
    model.get_input_embeddings().compile(backend="eager")
    streamgrad.enable(model, chunk_size=8)
    assert_same_step(run_step(model, batch), expected, tolerance=1e-10)


def test_module_of_two_models_is_as_it_was():
    """The one is called while the other runs."""
    outer, inner = tied_model(), tied_model()
    shared, ids = outer.get_input_embeddings(), tokens(2, 24)
    inner.set_input_embeddings(shared)
    inner.lm_head.weight = shared.weight
    for model in (outer, inner):
        streamgrad.enable(model, chunk_size=8)
    losses = []
    hook = outer.model.norm.register_forward_pre_hook(lambda *_: losses.append(inner(input_ids=ids, labels=ids).loss))
    (outer(input_ids=ids, labels=ids).loss + losses[0]).backward()
    actual, shared.weight.grad = shared.weight.grad, None
    assert "forward" not in vars(shared)
    hook.remove()
    for model in (outer, inner):
        streamgrad.disable(model)
        model(input_ids=ids, labels=ids).loss.backward()
    assert relative_error(actual, shared.weight.grad) < 1e-10


class OwnLookup(torch.nn.Embedding):
    def forward(self, ids):
        return self.weight[ids]


def usual(embeddings):
    pass


def by_frequency(embeddings):
    embeddings.scale_grad_by_freq = True


def own_lookup(embeddings):
    embeddings.__class__ = OwnLookup


@pytest.mark.parametrize(("change", "rows"), [(usual, 7), (by_frequency, VOCABULARY), (own_lookup, VOCABULARY)])
def test_plan_knows_what_will_be_shared(change, rows, monkeypatch):
    """By the time of the first layer, when the plan is made."""
    monkeypatch.setattr(step_facts, "tied_block_rows", lambda vocabulary, width, itemsize: 7)
    model, seen = tied_model(), []
    change(model.get_input_embeddings())
    streamgrad.enable(model, chunk_size=8)
    decoder = model.get_decoder()
    decoder.layers[0].register_forward_pre_hook(lambda *_: seen.append(InstalledForward.on(decoder).stream.head))
    model(input_ids=tokens(2, 24), labels=tokens(2, 24)).loss.backward()
    assert seen[0].embedding_gradient_bytes == rows * model.config.hidden_size * 8
    assert InstalledForward.on(decoder).stream.head is None


def test_one_gradient_less():
    """Counted: at the end of backward, at least one gradient of the vocabulary's size fewer than with each use's own."""
    model = tied_model(vocab_size=4096, num_hidden_layers=1, pad_token_id=None)
    ids = torch.randint(4096, (1, 32))
    streamgrad.enable(model, chunk_size=8)
    peaks = {}
    for tied in (True, False):
        with mock.patch.object(HeadWeight, "_may_be_shared", lambda self, embeddings, tied=tied: tied):
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
