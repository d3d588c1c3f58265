"""Layers with states (linear attention, state spaces, convolutions): the gradients of plain backpropagation, or a refusal."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import batches
import streamgrad
from families import LAYERS_TAKE_STATES_UP, small_model
from gradients import assert_same_step, no_float32, run_step, total_gradient_error
from lora import with_lora
from streamgrad.engine.layer import StreamedCall
from streamgrad.engine.recurrent_chunk import RecurrentCall, RecurrentChunk
from streamgrad.engine.saved import SavedOnHost
from streamgrad.hf.dry_run import model_shape
from streamgrad.memory.live_bytes import LiveBytes
from tiny import tokens

pytestmark = pytest.mark.skipif(not LAYERS_TAKE_STATES_UP, reason="layers of transformers before 5.22 are refused")

# The gated delta rule, Mamba 2, and a convolution alone; each with a layer of attention.
FAMILIES = ["qwen3_next", "granitemoehybrid", "lfm2"]
INTO_AND_OUT_OF_STATES = ["in_proj_qkvz", "in_proj", "out_proj", "q_proj"]


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("batch", [batches.plain, batches.right_padded, batches.left_padded])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_exact(family, batch, keep):
    model = small_model(family)
    inputs = batch(model)
    with no_float32():
        expected = run_step(model, inputs)
        for chunk_size in (5, 11, 64):  # of 23 tokens: the last of 11 would be alone in a chunk
            streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=7, keep=keep)
            assert_same_step(run_step(model, inputs), expected, 1e-10)
            streamgrad.disable(model)


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_short_sequences(family, length):
    model, ids = small_model(family), tokens(2, length)
    batch = {"input_ids": ids, "labels": ids, "num_items_in_batch": 2}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=2)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid"])
def test_lora(family, dropout):
    """On the projections into the states, too; with dropout, one chunk and the ordinary graph draw alike."""
    model = with_lora(small_model(family), targets=INTO_AND_OUT_OF_STATES, dropout=dropout)
    batch = batches.plain(model)
    with no_float32():
        torch.manual_seed(3)
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=64 if dropout else 5)
        torch.manual_seed(3)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_dropout_is_drawn_again_as_it_was():
    """The step in chunks is a function whose slope is the gradient, whatever was drawn."""
    model = with_lora(small_model("qwen3_next"), targets=INTO_AND_OUT_OF_STATES, dropout=0.3)
    streamgrad.enable(model, chunk_size=5)
    batch = batches.plain(model)
    weight = next(parameter for name, parameter in model.named_parameters() if "lora_B" in name)

    def loss() -> torch.Tensor:
        torch.manual_seed(3)
        return model(**batch).loss

    with no_float32():
        loss().backward()
        direction, step = torch.randn_like(weight), 1e-5
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                weight.add_(direction, alpha=sign * step)
            values.append(loss().item())
            with torch.no_grad():
                weight.sub_(direction, alpha=sign * step)
    slope = (values[0] - values[1]) / (2 * step)
    assert slope == pytest.approx((weight.grad * direction).sum().item(), rel=1e-6)


def test_backward_twice_through_a_retained_graph():
    model = small_model("qwen3_next")
    batch = batches.plain(model)
    with no_float32():
        once = run_step(model, batch).gradients
        streamgrad.enable(model, chunk_size=5)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward(retain_graph=True)
        loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], rtol=1e-9, atol=1e-12)


def test_bf16_errors_are_those_of_plain_bf16():
    errors = {"plain": [], "streamed": []}
    for seed in range(8):
        torch.manual_seed(seed)
        model = small_model("qwen3_next").float()
        batch = batches.plain(model)
        reference = run_step(model, batch).gradients
        model.bfloat16()
        errors["plain"].append(total_gradient_error(run_step(model, batch).gradients, reference))
        streamgrad.enable(model, chunk_size=5)
        errors["streamed"].append(total_gradient_error(run_step(model, batch).gradients, reference))
    assert sum(errors["streamed"]) < 1.02 * sum(errors["plain"])


def test_memory_grows_by_inputs_alone():
    """A step with twice the tokens adds what layers keep, and what the head and embeddings hold, per token."""
    model = small_model("qwen3_next", num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"])

    def growth() -> int:
        peaks = []
        for length in (128, 256):
            model.zero_grad(set_to_none=True)
            with LiveBytes() as live:
                ids = tokens(1, length)
                model(input_ids=ids, labels=ids).loss.backward()
            peaks.append(live.peak_bytes)
        return peaks[1] - peaks[0]

    plain = growth()
    streamgrad.enable(model, chunk_size=16, head_chunk_size=16)
    width, itemsize = model.config.hidden_size, 8
    assert growth() < 2 * (4 + 4) * 128 * width * itemsize < plain / 4


class _Shelf:
    """One that is no further away, and holds its readers to the order that was announced."""

    def __init__(self):
        self.items, self.order, self.place = {}, [], 0

    def put(self, name, tensors):
        self.items[name] = [tensor.clone() for tensor in tensors]

    def will_be_got(self, order):
        self.order = order

    def rewind(self):
        self.place = 0

    def get(self, name):
        assert self.order[self.place] == name
        self.place += 1
        return self.items[name]


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("family", ["qwen3_next", "llama"])
def test_what_is_kept_on_the_host_is_read_in_order(family, keep):
    model, shelves = small_model(family), []

    def kept(call, h_BTE):
        store = mock.Mock(shelf=lambda: shelves.append(_Shelf()) or shelves[-1])
        length = h_BTE.shape[1]
        return SavedOnHost(h_BTE, call.spans(length), len(call.spans_to_restore(length)), store)

    batch = batches.plain(model)
    with no_float32(), mock.patch.object(StreamedCall, "kept", kept):
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=5, keep=keep)
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert len(shelves) == 2 and all(shelf.place == len(shelf.order) for shelf in shelves)


def test_a_layer_that_leaves_the_state_out_is_refused():
    model, ids = small_model("qwen3_next"), tokens(1, 23)
    torch.nn.init.constant_(model.model.layers[0].linear_attn.A_log, -3.0)  # a state that forgets at once would not be missed
    streamgrad.enable(model, chunk_size=5)
    read = RecurrentChunk.get_recurrent_state
    with (
        mock.patch.object(RecurrentChunk, "get_recurrent_state", return_value=None),
        pytest.raises(ValueError, match="do not read the states that they have written"),
    ):
        model(input_ids=ids)
    with (
        mock.patch.object(RecurrentChunk, "get_recurrent_state", lambda *args, **kwargs: (read(*args, **kwargs), None)[1]),
        pytest.raises(ValueError, match="Qwen3NextDecoderLayer 0 gives other outputs"),
    ):
        model(input_ids=ids)


def test_a_layer_that_leaves_the_state_out_is_refused_although_the_first_tokens_are_padding():
    model, ids = small_model("qwen3_next"), tokens(1, 23)
    torch.nn.init.constant_(model.model.layers[0].linear_attn.A_log, -3.0)
    streamgrad.enable(model, chunk_size=5)
    read = RecurrentChunk.get_recurrent_state
    with (
        mock.patch.object(RecurrentChunk, "get_recurrent_state", lambda *args, **kwargs: (read(*args, **kwargs), None)[1]),
        pytest.raises(ValueError, match="gives other outputs"),
    ):
        model(input_ids=ids, attention_mask=torch.arange(23)[None] >= 9)


def test_forward_holds_the_states_before_one_chunk():
    model = small_model("qwen3_next", layer_types=["linear_attention", "full_attention"])
    streamgrad.enable(model, chunk_size=8)
    most = 0

    def hand_on(chunk):
        nonlocal most
        plain(chunk)
        most = max(most, len(chunk.stream.before))

    plain = RecurrentChunk._hand_on
    with mock.patch.object(RecurrentChunk, "_hand_on", hand_on), torch.no_grad():
        model(input_ids=tokens(1, 128), use_cache=False)
    assert most == 1


def test_what_is_refused(subtests):
    model, ids = small_model("qwen3_next"), tokens(1, 23)
    boundaries = torch.tensor([0, 9, 23], dtype=torch.int32)
    streamgrad.enable(model, chunk_size=5)
    with subtests.test("documents"), pytest.raises(ValueError, match="called with cu_seq_lens_q"):
        model(input_ids=ids, cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries, max_length_q=14, max_length_k=14)
    streamgrad.disable(model)
    for family in FAMILIES:
        with subtests.test(family), pytest.raises(ValueError, match="cannot be planned for: its layers are of several kinds"):
            model_shape(small_model(family).config, dtype=torch.bfloat16)


@pytest.mark.parametrize(("length", "chunk_size", "sizes"), [(23, 11, [11, 12]), (1, 4, [1]), (7, 1, [2, 2, 3]), (8, 4, [4, 4])])
def test_no_token_is_alone_in_a_chunk(length, chunk_size, sizes):
    call = RecurrentCall(None, None, None, [], chunk_size, None, None)
    assert [stop - start for start, stop in call.spans(length)] == sizes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("offload", ["none", "host"])
def test_on_a_gpu(offload):
    model = small_model("qwen3_next").cuda()
    batch = {name: value.cuda() for name, value in batches.plain(model).items()}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=5, offload=offload)
        assert_same_step(run_step(model, batch), expected, 1e-10)
