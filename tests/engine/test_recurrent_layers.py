"""Layers with states (linear attention, state spaces, convolutions): the gradients of plain backpropagation, or a refusal."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch

import batches
import streamgrad
from families import LAYERS_TAKE_STATES_UP, small_model
from gradients import assert_same_step, more, no_float32, run_step, total_gradient_error
from lora import with_lora
from streamgrad.attention.masks import CausalMask
from streamgrad.engine import layer, recurrent_chunk
from streamgrad.engine.recurrent_chunk import RecurrentCall, RecurrentChunk
from streamgrad.engine.saved import SavedOnHost
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.live_bytes import LiveBytes
from tiny import tokens

pytestmark = pytest.mark.skipif(not LAYERS_TAKE_STATES_UP, reason="layers of transformers before 5.21 are refused")

# The gated delta rule, Mamba 2, and a convolution alone; each with a layer of attention.
FAMILIES = ["qwen3_next", "granitemoehybrid", "lfm2"]
# Layers with attention and a state; these and layers that take a second per-token input; states alone; layers with neither.
OTHER_FAMILIES = ["falcon_h1", "zamba2", "mamba2", "nemotron_h", "bamba"]
INTO_AND_OUT_OF_STATES = ["in_proj_qkvz", "in_proj", "out_proj", "q_proj"]


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("batch", [batches.plain, batches.right_padded, batches.left_padded])
@pytest.mark.parametrize("family", [*FAMILIES, *(pytest.param(family, marks=more) for family in OTHER_FAMILIES)])
def test_gradients_are_exact(family, batch, keep):
    model = small_model(family)
    inputs = batch(model)
    with no_float32():
        expected = run_step(model, inputs)
        # Of 23 tokens, the last would be alone in a chunk of 11.
        for chunk_size in (1, 5, 11, 64) if keep == "input" else (5, 11):
            streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=7, keep=keep)
            assert_same_step(run_step(model, inputs), expected, 1e-10)
            streamgrad.disable(model)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_layers_with_attention_and_states_or_with_neither(family):
    """Each of the three ways to keep tensors, with padding on one side or the other."""
    model = small_model(family)
    with no_float32():
        for batch, keep in ((batches.right_padded, "input"), (batches.left_padded, "attention"), (batches.plain, "all")):
            expected = run_step(model, inputs := batch(model))
            streamgrad.enable(model, chunk_size=5, head_chunk_size=7, keep=keep)
            assert_same_step(run_step(model, inputs), expected, 1e-10)
            streamgrad.disable(model)


def test_checkpointing_of_a_layer_inside_of_a_layer():
    """Zamba 2 has such; transformers takes the cache from a layer that it checkpoints."""
    model = small_model("zamba2")
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        model.gradient_checkpointing_enable()
        streamgrad.enable(model, chunk_size=5)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def _documents_alone(model, batch) -> torch.Tensor:
    """The loss of the documents of `batch`, each in a call of its own."""
    ends, labels = batch["cu_seq_lens_q"].tolist(), batch["labels"]
    count = (labels[:, 1:] != -100).sum()
    parts = [slice(*span) for span in pairwise(ends)]
    return sum(
        model(input_ids=batch["input_ids"][:, part], labels=labels[:, part], num_items_in_batch=count, use_cache=False).loss
        for part in parts
    )


@pytest.mark.parametrize("keep", ["input", "all"])
@pytest.mark.parametrize(
    "family",
    ["qwen3_next", "falcon_h1", *(pytest.param(each, marks=more) for each in ("granitemoehybrid", "lfm2", "zamba2", "bamba"))],
)
def test_states_begin_anew_with_each_packed_document(family, keep):
    """Among them is a document of one token. Stock layers need kernels of a GPU for packed documents."""
    model = small_model(family)
    batch = batches.packed_flat(model)
    with no_float32():
        expected = run_step(model, batch, forward=_documents_alone)
        for chunk_size in (5, 64):
            streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=7, keep=keep)
            assert_same_step(run_step(model, batch), expected, 1e-10)
            streamgrad.disable(model)


@pytest.mark.parametrize("family", ["qwen3_next", pytest.param("lfm2", marks=more)])
def test_states_run_on_where_positions_alone_restart(family):
    """As in stock layers, which do not look at positions."""
    model = small_model(family)
    batch = batches.packed(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=5)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_half_of_what_says_where_documents_begin_is_refused(subtests):
    model = small_model("qwen3_next")
    batch = batches.packed_flat(model)
    streamgrad.enable(model, chunk_size=5)
    for missing in ("cu_seq_lens_q", "seq_idx"):
        half = {name: value for name, value in batch.items() if name not in (missing, missing.replace("_q", "_k"))}
        with subtests.test(missing), pytest.raises(ValueError, match=f"without {missing}.*return_seq_idx=True"):
            model(**half)
    with subtests.test("disagreement"), pytest.raises(ValueError, match="disagree about where documents begin"):
        model(**batch | {"seq_idx": torch.zeros(1, 23, dtype=torch.int32)})
    ends, ids = torch.tensor([0, 10, 23], dtype=torch.int32), tokens(2, 23)
    rows = torch.stack([torch.arange(23) > 9, torch.arange(23) > 4]).int()
    with subtests.test("rows"), pytest.raises(ValueError, match="documents of different lengths in seq_idx"):
        model(input_ids=ids, labels=ids, seq_idx=rows, cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_only_chunks_whose_states_are_taken_up_run_again_for_them():
    """With attention beside the states all do but the last, whose keys are made by then."""
    call = RecurrentCall(None, None, None, [], 4, None, None, document_starts=[3, 4, 14])
    assert call.spans(20) == [(0, 3), (3, 4), (4, 8), (8, 12), (12, 14), (14, 18), (18, 20)]
    assert call.restored(20) == [2, 3, 5]
    call.mask = CausalMask()
    assert call.restored(20) == [0, 1, 2, 3, 4, 5]


def test_images_that_see_both_ways_are_refused_beside_states():
    model, ids = streamgrad.enable(small_model("falcon_h1"), chunk_size=5), tokens(1, 9)
    with (
        mock.patch.object(CausalMask, "uncut", [(3, 7)]),
        pytest.raises(ValueError, match="some tokens see each other both ways"),
    ):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next"])
def test_rows_that_share_their_beginnings_are_refused(family):
    """Where they come to a decoder in spite of `sharing_refusal`."""
    model = streamgrad.enable(small_model(family), chunk_size=5)
    decoder = model.get_decoder()
    with (
        mock.patch.object(InstalledForward.on(decoder).stream, "tree", mock.Mock(length=9)),
        pytest.raises(ValueError, match="share their beginnings"),
    ):
        decoder(input_ids=tokens(1, 9))


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
@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        "granitemoehybrid",
        "falcon_h1",
        *(pytest.param(each, marks=more) for each in ("zamba2", "nemotron_h", "bamba", "mamba2")),
    ],
)
def test_lora(family, dropout):
    """On the projections into the states, too; with dropout, one chunk and the ordinary graph draw alike."""
    # PEFT refuses adapters on the output of some families' states.
    targets = INTO_AND_OUT_OF_STATES if family in FAMILIES else [*INTO_AND_OUT_OF_STATES[:2], "q_proj"]
    model = with_lora(small_model(family), targets=targets, dropout=dropout)
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

    def will_be_got(self, order, at_once=1):
        self.order = order

    def rewind(self):
        self.place = 0

    def get(self, name):
        assert self.order[self.place] == name
        self.place += 1
        return self.items[name]


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("family", ["qwen3_next", "llama", "falcon_h1"])
def test_what_is_kept_on_the_host_is_read_in_order(family, keep):
    model, shelves = small_model(family), []

    def kept(call, h_BTE):
        store = mock.Mock(shelf=lambda: shelves.append(_Shelf()) or shelves[-1])
        length = h_BTE.shape[1]
        return SavedOnHost(h_BTE, call.spans(length), call.restored(length), store)

    batch = batches.plain(model)
    with no_float32(), mock.patch.object(layer, "_kept", kept):
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


@pytest.mark.parametrize(("length", "chunk_size", "sizes"), [(23, 11, [11, 12]), (1, 4, [1]), (7, 1, [2, 2, 3]), (8, 4, [4, 4])])
def test_no_token_is_alone_in_a_chunk(length, chunk_size, sizes):
    call = RecurrentCall(None, None, None, [], chunk_size, None, None)
    assert [stop - start for start, stop in call.spans(length)] == sizes


@pytest.mark.parametrize("batch", [batches.plain, batches.right_padded, batches.left_padded])
@pytest.mark.parametrize(("family", "part"), [("qwen3_next", "linear_attn"), ("granitemoehybrid", "mamba"), ("lfm2", "conv")])
def test_graphs_of_chunks_are_kept(family, part, batch, monkeypatch):
    """With everything kept, a layer with states runs in chunks too, each once, and autograd goes from chunk to chunk."""
    monkeypatch.setattr(recurrent_chunk, "KEPT_TOKENS", 1)
    model, calls = small_model(family), []
    inputs = batch(model)
    with no_float32():
        expected = run_step(model, inputs)
        streamgrad.enable(model, chunk_size=5, keep="all", attention="sdpa")  # by which no step runs plain
        getattr(model.model.layers[0], part).register_forward_hook(lambda module, args, out: calls.append(1))
        run_step(model, inputs)  # which tries the layers as well
        calls.clear()
        assert_same_step(run_step(model, inputs), expected, 1e-10)
    assert len(calls) == 5


@pytest.mark.parametrize("keep", ["input", "all"])
def test_a_gradient_that_chunks_change_is_refused(keep, monkeypatch):
    """As by a hook that clips the gradient of all tokens together: outputs are the same, and so is the loss."""
    monkeypatch.setattr(recurrent_chunk, "KEPT_TOKENS", 1)
    model, ids = small_model("qwen3_next"), tokens(1, 23)
    model.model.layers[0].linear_attn.out_proj.register_full_backward_hook(
        lambda module, inputs, outputs: tuple(None if gradient is None else gradient / gradient.norm() for gradient in inputs)
    )
    streamgrad.enable(model, chunk_size=5, keep=keep, attention="sdpa")
    with pytest.raises(ValueError, match="Qwen3NextDecoderLayer 0 gives other outputs or gradients"):
        model(input_ids=ids, labels=ids)


def test_a_state_that_is_detached_is_refused():
    model, ids = small_model("qwen3_next"), tokens(1, 23)
    torch.nn.init.constant_(model.model.layers[0].linear_attn.A_log, -3.0)  # a state that forgets at once has hardly a gradient
    write = RecurrentChunk.update_recurrent_state
    streamgrad.enable(model, chunk_size=5)
    with (
        mock.patch.object(
            RecurrentChunk, "update_recurrent_state", lambda self, state, *args: write(self, state.detach(), *args)
        ),
        pytest.raises(ValueError, match="gives other outputs or gradients"),
    ):
        model(input_ids=ids, labels=ids)


@pytest.mark.parametrize(("family", "longest"), [("qwen3_next", 4096), ("granitemoehybrid", 4608), ("lfm2", 4608)])
def test_a_loop_over_blocks_of_tokens_has_short_chunks(family, longest):
    """Backward of a loop takes time with the square of the chunk. Mamba 2 and convolutions have none, and run whole."""
    model = small_model(family).float()
    streamgrad.enable(model, memory_budget="1TB")
    chunked = []
    # The first, in which rows are too short to show a loop, and the second have more tokens than the last, and run whole.
    for rows, length in ((64, 100), (3, 1600), (1, 4608), (1, 4608)):
        ids = tokens(rows, length)
        model(input_ids=ids, labels=ids).loss.backward()
        chunked.append(InstalledForward.on(model.get_decoder()).stream.planner.latest.chunk_sizes)
    assert chunked == [(size, size) for size in (100, 1600, longest, longest)]


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
