"""Forward runs several chunks at a time: the same gradients, in fewer calls of a layer, and alone where chunks must be."""

from __future__ import annotations

import pytest
import torch

import batches
import streamgrad
from families import small_model
from fuzzing import inner_of
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from streamgrad.attention import streamed
from streamgrad.engine.forward import Stretch, stretches
from streamgrad.hf.discover import decoder_layers
from stretches import chunks_in_forward
from tiny import FAMILIES, tiny_model, tokens

CHUNK = 4


def streamed_step(model, batch, count, **options):
    streamgrad.enable(model, chunk_size=CHUNK, **options)
    with chunks_in_forward(count):
        step = run_step(model, batch)
    streamgrad.disable(model)
    return step


def test_first_chunk_is_a_stretch_of_its_own():
    spans = [(0, 4), (4, 8), (8, 12), (12, 15)]
    assert stretches(spans, 1) == [Stretch(index, [span]) for index, span in enumerate(spans)]
    assert stretches(spans, 2) == [Stretch(0, spans[:1]), Stretch(1, spans[1:3]), Stretch(3, spans[3:])]
    assert stretches(spans, 9) == [Stretch(0, spans[:1]), Stretch(1, spans[1:])]
    assert stretches(spans[:1], 3) == [Stretch(0, spans[:1])] and stretches([], 3) == []
    assert Stretch(1, spans[1:]).apart == stretches(spans, 1)[1:] and Stretch(1, spans[1:]).span == (4, 15)


@pytest.mark.parametrize("kind", batches.KINDS)
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_gradients_equal_plain_backprop(family, kind):
    model = tiny_model(family)
    batch = batches.KINDS[kind](model)
    with no_float32():
        expected = run_step(model, batch)
        for count, keep in ((2, "input"), (3, "attention"), (99, "input"), (99, "attention")):
            assert_same_step(streamed_step(model, batch, count, keep=keep), expected, tolerance=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_adapters_equal_plain_backprop(family):
    model = with_lora(tiny_model(family))
    batch = batches.packed(model)
    with no_float32():
        expected = run_step(model, batch)
        assert_same_step(streamed_step(model, batch, 2, keep="attention"), expected, tolerance=1e-10)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_layers_with_states_run_chunk_by_chunk(family):
    model = small_model(family).double()
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        assert_same_step(streamed_step(model, batch, 3), expected, tolerance=1e-9)


@pytest.mark.parametrize("recompute_layers", [1, 2])
@pytest.mark.parametrize("keep", ["input", "attention"])
def test_segments_run_again_in_stretches(keep, recompute_layers):
    model = tiny_model("qwen3", num_hidden_layers=5)
    batch = batches.right_padded(model)
    with no_float32():
        expected = run_step(model, batch)
        actual = streamed_step(model, batch, 3, keep=keep, recompute_layers=recompute_layers)
        assert_same_step(actual, expected, tolerance=1e-10)


def calls_in_step(model, length, count, **options):
    """The tokens of each call of the first layer's norm in a second step, after the trial, and that step."""
    seen, ids = [], tokens(1, length)
    norm = decoder_layers(inner_of(model).get_decoder())[0].input_layernorm
    handle = norm.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    streamgrad.enable(model, chunk_size=CHUNK, **options)
    with chunks_in_forward(count):
        for _ in range(2):
            seen.clear()
            torch.manual_seed(1)
            step = run_step(model, {"input_ids": ids, "labels": ids})
    streamgrad.disable(model)
    handle.remove()
    return seen, step


def test_layers_are_called_once_a_stretch():
    """Six chunks: one and two stretches forward, the first five chunks' keys likewise, and six re-runs."""
    model = tiny_model("qwen3", dtype=torch.float32)
    one_by_one, _ = calls_in_step(model, 6 * CHUNK, 1)
    together, _ = calls_in_step(model, 6 * CHUNK, 3)
    assert one_by_one == [CHUNK] * (6 + 5 + 6)
    assert together == [CHUNK, 3 * CHUNK, 2 * CHUNK, CHUNK, 3 * CHUNK, CHUNK, *[CHUNK] * 6]


@pytest.mark.parametrize("keep", ["input", "attention"])
def test_chunks_that_draw_run_alone(keep):
    """Random numbers are drawn as without stretches, so gradients are the same bit by bit."""
    model = with_lora(tiny_model("qwen3", dtype=torch.float32), dropout=0.3)
    model.train()
    (alone, expected), (calls, actual) = (calls_in_step(model, 6 * CHUNK, count, keep=keep) for count in (1, 3))
    assert calls == alone
    assert_same_step(actual, expected, tolerance=0.0)


def draw_in_stretch(output):
    if output.shape[1] == 3 * CHUNK:
        torch.rand(5)


def test_a_stretch_in_which_numbers_are_drawn_is_run_again_chunk_by_chunk():
    """As where another thread draws meanwhile: nobody knows who drew, so the chunks run alone."""
    model = tiny_model("qwen3")
    _, expected = calls_in_step(model, 6 * CHUNK, 1)
    mlp = decoder_layers(model.get_decoder())[0].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: draw_in_stretch(output))
    calls, actual = calls_in_step(model, 6 * CHUNK, 3)
    handle.remove()
    assert calls == [CHUNK, 3 * CHUNK, *[CHUNK] * 3, 2 * CHUNK, CHUNK, 3 * CHUNK, CHUNK, *[CHUNK] * 6]
    assert_same_step(actual, expected, tolerance=1e-6)


@pytest.mark.parametrize("kind", ["softcap", "dense", "eager", "bfloat16"])
def test_attention_that_holds_scores_takes_one_chunk(kind):
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    model = tiny_model("gemma2" if kind == "softcap" else "qwen3", dtype=dtype)
    batch = (batches.dense_mask if kind == "dense" else batches.plain)(model)
    rows = []
    attended = streamed._attended

    def noted(chunk, pieces, query_BHLD):
        rows.append(query_BHLD.shape[2])
        return attended(chunk, pieces, query_BHLD)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed, "_attended", noted)
        streamed_step(model, batch, 3, attention="eager" if kind == "eager" else "auto")
    assert max(rows) == CHUNK
