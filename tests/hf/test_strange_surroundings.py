"""What engines and libraries do around a forward: tensor and context parallelism, hooks, copies. Exact, or refused."""

from __future__ import annotations

import types

import pytest
import torch

import streamgrad
from gradients import assert_same_step, run_step
from lora import with_lora
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
    """As Accelerate does when it unwraps a model."""
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
    with pytest.raises(ValueError, match="treats the logits differently"):
        model(input_ids=ids, labels=ids)


def test_continuous_batching_is_left_to_stock():
    """Its cache has another name, and holds other sequences."""
    decoder = streamgrad.enable(tiny_model("qwen3"), chunk_size=4).model
    call = {"input_ids": tokens(1, 9), "use_cache": False}
    with torch.no_grad():
        assert _should_stream(decoder, InstalledForward.on(decoder).stream, call)
        assert not _should_stream(decoder, InstalledForward.on(decoder).stream, call | {"cache": object()})
