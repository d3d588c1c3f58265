"""Forward runs several chunks at a time: the same gradients, in fewer calls of a layer, and alone where chunks must be."""

from __future__ import annotations

import pytest
import torch

import batches
import streamgrad
from families import small_model
from gradients import assert_same_step, no_float32, run_step, total_gradient_error
from lora import with_lora
from streamgrad.attention import streamed
from streamgrad.engine.forward import Stretch, stretches
from streamgrad.hf.discover import decoder_layers
from stretches import CHUNK, SummedInTwoParts, calls_in_step, chunks_in_forward
from tiny import FAMILIES, tiny_model


def streamed_step(model, batch, count, **options):
    streamgrad.enable(model, chunk_size=CHUNK, **options)
    with chunks_in_forward(count):
        step = run_step(model, batch)
    streamgrad.disable(model)
    return step


def test_stretches_have_these_sizes():
    spans = [(0, 4), (4, 8), (8, 12), (12, 15)]
    alone = [Stretch(index, [span]) for index, span in enumerate(spans)]
    assert stretches(spans, [1, 1, 1, 1]) == alone
    assert stretches(spans, [1, 2, 2, 2]) == [Stretch(0, spans[:1]), Stretch(1, spans[1:3]), Stretch(3, spans[3:])]
    assert stretches(spans, [1, 9]) == [Stretch(0, spans[:1]), Stretch(1, spans[1:])]
    assert stretches(spans[:1], [1, 3]) == [Stretch(0, spans[:1])] and stretches([], [1, 3]) == []
    assert Stretch(1, spans[1:]).apart == alone[1:] and Stretch(1, spans[1:]).span == (4, 15)


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
    assert calls == [CHUNK, 3 * CHUNK, *[CHUNK] * 5, *[CHUNK] * 5, *[CHUNK] * 6]
    assert_same_step(actual, expected, tolerance=1e-6)


def test_layers_below_run_again_in_the_same_stretches():
    """Those that ran chunk by chunk do so again, where nobody draws, and the rest together."""
    model = tiny_model("qwen3", num_hidden_layers=4)
    mlp = decoder_layers(model.get_decoder())[0].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: draw_in_stretch(output))
    calls, _ = calls_in_step(model, 7 * CHUNK, 3, recompute_layers=4)
    after = torch.rand(1)
    handle.remove()
    forward, again, keys = [CHUNK, 3 * CHUNK, *[CHUNK] * 3, *[CHUNK] * 3], [CHUNK] * 7, [CHUNK] * 6
    assert calls == [*forward, *again, *keys, *[CHUNK] * 7]
    torch.manual_seed(1)
    assert torch.equal(torch.rand(6)[5:], after)  # five numbers, in the stretch that was tried


def out_of_memory_in_stretch(module, args, output):
    if output.shape[1] == 3 * CHUNK:
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("keep", ["input", "attention", "auto"])
def test_memory_that_runs_out_in_a_stretch_is_answered_by_single_chunks(keep, caplog):
    model = tiny_model("qwen3")
    _, expected = calls_in_step(model, 6 * CHUNK, 1)
    handle = decoder_layers(model.get_decoder())[0].mlp.register_forward_hook(out_of_memory_in_stretch)
    with caplog.at_level("WARNING", "streamgrad"):
        calls, actual = calls_in_step(model, 6 * CHUNK, 3, keep=keep)
    handle.remove()
    assert sum("from now on they run one by one" in message for message in caplog.messages) == 1
    assert max(calls) == CHUNK  # in the second step
    assert_same_step(actual, expected, tolerance=1e-6)


def test_ranks_do_not_run_chunks_once_more(monkeypatch):
    """Other ranks would wait for what this one has sent already."""
    model = tiny_model("qwen3")
    decoder_layers(model.get_decoder())[0].mlp.register_forward_hook(out_of_memory_in_stretch)
    monkeypatch.setattr("streamgrad.engine.forward.is_only_process", lambda: False)
    with pytest.raises(torch.OutOfMemoryError):
        calls_in_step(model, 6 * CHUNK, 3, keep="input")


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "llama"])
def test_guards_allow_what_a_stretch_rounds_otherwise(family, keep):
    """As on a GPU, whose products of more tokens are summed in another order. On a CPU they are the same."""
    model = tiny_model(family, dtype=torch.bfloat16, num_hidden_layers=6)
    with SummedInTwoParts(CHUNK) as rounding:
        calls, joined = calls_in_step(model, 9 * CHUNK, 4, keep=keep)
    assert max(calls) == 4 * CHUNK and rounding.count
    _, alone = calls_in_step(model, 9 * CHUNK, 1, keep=keep)
    assert any(not torch.equal(gradient, alone.gradients[name]) for name, gradient in joined.gradients.items())
    assert total_gradient_error(joined.gradients, alone.gradients) < 0.1  # two roundings in 16 bits, on any processor


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
