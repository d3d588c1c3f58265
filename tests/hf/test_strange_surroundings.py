"""What engines and libraries do around a forward: tensor and context parallelism, hooks, copies. Exact, or refused."""

from __future__ import annotations

import types
from contextlib import contextmanager

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from streamgrad.attention.blocks import Blocks
from streamgrad.attention.varlen import PackedTokens, Segment, VarlenMask
from streamgrad.hf.decoder import _should_stream
from streamgrad.hf.patching import InstalledForward
from tiny import tiny_model, tokens


def test_tensor_parallelism_is_refused():
    model = tiny_model("qwen3")
    model._tp_size = 2
    with pytest.raises(ValueError, match=r"loaded with tensor parallelism \(tp_size=2\)"):
        streamgrad.enable(model)


def test_a_hook_that_a_module_puts_on_its_own_parameter_is_refused():
    """It would be called with the sum so far, once a chunk."""
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    norm = model.model.layers[0].input_layernorm

    def forward(hidden):
        norm.weight.register_hook(lambda gradient: 2 * gradient)
        return type(norm).forward(norm, hidden)

    norm.forward = forward
    with pytest.raises(ValueError, match="LlamaDecoderLayer 0 gives other outputs or gradients"):
        model(input_ids=tokens(1, 9), labels=tokens(1, 9))


def test_an_attention_kernel_that_was_replaced_is_refused(monkeypatch):
    """As torch's context_parallel does it: every rank would attend to its own tokens alone."""
    model = streamgrad.enable(tiny_model("llama"), chunk_size=4)
    plain = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args, **kwargs: plain(*args, **kwargs))
    with pytest.raises(ValueError, match="scaled_dot_product_attention has been replaced"):
        model(input_ids=tokens(1, 9))


def test_a_head_with_adapters_has_gradients_where_no_token_has_a_label():
    """Zeros, as without streaming: engines wait for a gradient from every rank."""
    model = with_lora(tiny_model("qwen3", tie_word_embeddings=False), targets=["q_proj", "lm_head"])
    ids = tokens(1, 9)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100), "num_items_in_batch": 8}
    expected = run_step(model, batch)
    assert_same_step(run_step(streamgrad.enable(model, chunk_size=4), batch), expected, 1e-12)


def test_a_forward_that_was_made_a_method():
    """By who takes a forward for a function."""
    model, ids = tiny_model("qwen3", dtype=torch.float32), tokens(1, 9)
    expected = model(input_ids=ids, labels=ids).loss
    streamgrad.enable(model, chunk_size=4)
    model.forward = types.MethodType(model.forward, model)
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
    streamgrad.disable(model)
    assert "forward" not in model.__dict__


def test_a_head_whose_output_is_copied():
    """As FSDP2 does, which casts tensors in it too with an output_dtype."""
    model, ids = tiny_model("llama", dtype=torch.float32), tokens(1, 9)
    expected = model(input_ids=ids, labels=ids).loss
    streamgrad.enable(model, chunk_size=4)
    model.lm_head.register_forward_hook(lambda module, inputs, output: dict(output))
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
    model.lm_head.register_forward_hook(lambda module, inputs, output: {name: cast.double() for name, cast in output.items()})
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
    model.lm_head.register_forward_hook(lambda module, inputs, output: {name: cast.bfloat16() for name, cast in output.items()})
    with pytest.raises(ValueError, match="rounds the logits"):
        model(input_ids=ids, labels=ids)
    model.lm_head.register_forward_hook(lambda module, inputs, output: {})
    with pytest.raises(ValueError, match="a forward hook on its head changes the logits"):
        model(input_ids=ids, labels=ids)


def test_continuous_batching_is_left_to_stock():
    """Its cache has another name, and holds other sequences."""
    decoder = streamgrad.enable(tiny_model("qwen3"), chunk_size=4).model
    call = {"input_ids": tokens(1, 9), "use_cache": False}
    with torch.no_grad():
        assert _should_stream(decoder, InstalledForward.on(decoder).stream, call)
        assert not _should_stream(decoder, InstalledForward.on(decoder).stream, call | {"cache": object()})


@pytest.fixture
def elsewhere():
    """New tensors without a device are on none: each that streaming makes says where it is."""

    @contextmanager
    def default_device():
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)

    return default_device


@pytest.mark.parametrize("chunk_size", [4, "auto"])
@pytest.mark.parametrize(
    "kind", [batches.right_padded, batches.packed, batches.embedded, batches.dense_mask], ids=lambda f: f.__name__
)
def test_another_default_device(kind, chunk_size, elsewhere):
    model = with_lora(tiny_model("gemma3_text", tie_word_embeddings=False), targets=["q_proj", "lm_head"])
    batch = kind(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size)
        with elsewhere():
            actual = run_step(model, batch)
    assert_same_step(actual, expected, 1e-10)


def test_rows_that_share_their_beginning_with_another_default_device(elsewhere):
    model, ids = streamgrad.enable(tiny_model("qwen3"), chunk_size=4), tokens(1, 9).repeat(2, 1)
    ids[1, -1] += 1

    def hidden_states():
        found = streamgrad.share_prefixes(ids)
        return found.unshared(found.hidden_states(model).sum(dim=-1))

    expected = hidden_states()
    with elsewhere():
        torch.testing.assert_close(hidden_states(), expected)


def test_segments_and_blocks_with_another_default_device(elsewhere):
    """As varlen kernels and masks by blocks read them, which no step on a CPU runs."""
    segments = [Segment(0, 0, 3, 0, 3, causal=True), Segment(0, 3, 5, 0, 3, causal=False)]
    ids = torch.tensor([[0, 0, -1, 1, 1]])

    def made():
        packed = PackedTokens.of([(0, 0, 3), (0, 3, 5)], torch.device("cpu"))
        mask = VarlenMask(tuple(segments), 1, 5).visible(5, None, torch.device("cpu"))
        return packed.cu_seqlens_C, mask, torch.tensor(Blocks(ids, None).uncut, device="cpu")

    expected = made()
    with elsewhere():
        actual = made()
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours, theirs)
