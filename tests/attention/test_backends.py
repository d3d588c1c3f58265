"""Attention kernels: they compute segments and windows as their masks say, no mask is made beside them, and the right one runs.

FlashAttention's operators run on GPUs only (tests/engine/test_gpu.py). Here a stand-in in float64 with their contract takes their
place, so that everything around them is tested against plain backpropagation on a CPU too.
"""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from streamgrad.attention import backends
from streamgrad.attention.backends import Block, backends_named, choose, cudnn, flash, run_or_replace
from streamgrad.attention.backends.cudnn_plans import PlanPrices
from streamgrad.attention.masks import CausalMask
from streamgrad.attention.varlen import Segment, VarlenMask
from streamgrad.engine.kv_chunk import Attended, spans
from tensor_shapes import Shapes
from tiny import tiny_model, tokens

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_autocast_does_not_reach_the_kernels(name):
    """Operands are in 16 bits already. Eager attention sums in fp32, and must not be cast back in forward alone."""
    query, key, value = (torch.randn(1, 2, 6, 8, dtype=torch.bfloat16) for _ in range(3))
    block = Block(scale=0.3, causal=True)
    plain = run_or_replace(backends_named(name), query, key, value, block, {}, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run_or_replace(backends_named(name), query, key, value, block, {}, 0)
    assert cast.lse_BHL.dtype == torch.float32
    assert torch.equal(cast.lse_BHL, plain.lse_BHL) and torch.equal(cast.out_BHLD, plain.out_BHLD)


# --- kernels -----------------------------------------------------------------------------------------------------------

SEGMENTS = (
    Segment(0, 0, 3, 2, 7, True), Segment(0, 3, 4, 7, 8, True), Segment(0, 4, 6, 2, 8, False),
    Segment(2, 1, 6, 0, 5, True),
)  # fmt: skip


def segments_block(window: int | None = None, **options):
    """A row with two documents and padding after them, a row that sees nothing, and one with padding before it."""
    operands = [torch.randn(3, heads, length, 4, dtype=torch.float64) for heads, length in ((4, 6), (2, 8), (2, 8))]
    return operands, Block(scale=0.6, window=window, varlen=VarlenMask(SEGMENTS, batch=3, queries=6), **options)


def outcome(backend, operands, block, *, larger: bool = False):
    """Everything a kernel makes of a block; `larger`: as a part of a softmax that has other terms too."""
    torch.manual_seed(7)
    dout = torch.randn_like(operands[0])
    done = backend.forward(*operands, block)
    given = Attended(done.out_BHLD * 0.5, done.lse_BHL + 0.7) if larger else done
    dquery, pieces = backend.backward(dout, *operands, given, block)
    dkey, dvalue = torch.zeros_like(operands[1]), torch.zeros_like(operands[2])
    for first, last, dkey_piece, dvalue_piece in pieces:
        dkey[:, :, first:last] += dkey_piece
        dvalue[:, :, first:last] += dvalue_piece
    return done.out_BHLD, done.lse_BHL, dquery, dkey, dvalue


def assert_same_outcome(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("larger", [False, True])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("name", ["eager", "sdpa", "flash"])
def test_kernels_compute_segments_as_they_compute_their_mask(name, window, larger, fake_flash):
    operands, block = segments_block(window)
    (backend,), (eager,) = backends_named(name), backends_named("eager")
    by_mask = Block(scale=0.6, mask=block.varlen.visible(8, window, CPU))
    ours = outcome(backend, operands, block, larger=larger)
    assert_same_outcome(ours, outcome(eager, operands, by_mask, larger=larger))
    assert ours[0][1].abs().max() == 0 and ours[1][1].isneginf().all() and ours[2][1].abs().max() == 0


@pytest.mark.parametrize("name", ["eager", "sdpa", "flash"])
def test_no_segment_at_all(name, fake_flash):
    operands, _ = segments_block()
    (backend,) = backends_named(name)
    out, lse, *gradients = outcome(backend, operands, Block(scale=0.6, varlen=VarlenMask((), batch=3, queries=6)))
    assert lse.isneginf().all()
    assert all(tensor.abs().max() == 0 for tensor in (out, *gradients))


@pytest.mark.parametrize(("rows", "keys", "window"), [(5, 5, 2), (3, 9, 4), (1, 6, 3), (4, 4, 1)])
@pytest.mark.parametrize(("name", "softcap"), [("eager", None), ("eager", 1.3), ("sdpa", None), ("flash", None)])
def test_kernels_compute_windows_as_they_compute_their_mask(name, rows, keys, window, softcap, fake_flash):
    operands = [torch.randn(2, heads, length, 4, dtype=torch.float64) for heads, length in ((4, rows), (2, keys), (2, keys))]
    own = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None]
    mask = ((key <= own) & (key > own - window))[None, None]
    (backend,), (eager,) = backends_named(name), backends_named("eager")
    ours = outcome(backend, operands, Block(scale=0.6, causal=True, window=window, softcap=softcap))
    assert_same_outcome(ours, outcome(eager, operands, Block(scale=0.6, mask=mask, softcap=softcap)))


class FakeFlash:
    """aten's two FlashAttention operators as their schema and kernels have it, in any dtype on any device.

    Varlen: tokens first, int32 offsets, lengths that bound segments, a log-sum-exp of (heads, tokens), and gradients that are
    garbage (here NaN) for keys of no segment.
    """

    def __init__(self):
        self.calls = []

    def _flash_attention_forward(
        self, query, key, value, cum_q, cum_k, max_q, max_k, dropout, is_causal, debug, *, scale, **window
    ):  # fmt: skip
        self.calls.append("forward" if cum_q is None else "varlen forward")
        out, lse = (
            torch.full_like(query, math.nan),
            query.new_full((*query.shape[:-3], query.shape[-2], query.shape[-3]), math.nan),
        )
        for of_query, of_key in sequences(query, key, cum_q, cum_k, max_q, max_k):
            scores = scores_of(query[of_query], key[of_key], is_causal, scale, **window)
            lse[lse_index(of_query)] = scores.logsumexp(-1)
            weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
            out[of_query] = torch.einsum("hij,jhd->ihd", weights, repeated(value[of_key], query))
        return out, lse, None, None, None

    def _flash_attention_backward(
        self, dout, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout, is_causal, seed, unused, *, scale, **window
    ):  # fmt: skip
        self.calls.append("backward" if cum_q is None else "varlen backward")
        assert lse.is_contiguous()
        gradients = [torch.full_like(tensor, math.nan) for tensor in (query, key, value)]
        for of_query, of_key in sequences(query, key, cum_q, cum_k, max_q, max_k):
            q, k, v, do = query[of_query], repeated(key[of_key], query), repeated(value[of_key], query), dout[of_query]
            scores = scores_of(q, key[of_key], is_causal, scale, **window)
            weights = (scores - lse[lse_index(of_query)][..., None]).exp()
            delta = (do * out[of_query]).sum(-1).T[..., None]
            dscores = weights * (torch.einsum("ihd,jhd->hij", do, v) - delta) * scale
            gradients[0][of_query] = torch.einsum("hij,jhd->ihd", dscores, k)
            for gradient, term in ((gradients[1], (dscores, q)), (gradients[2], (weights, do))):
                whole = torch.einsum("hij,ihd->jhd", *term)
                gradient[of_key] = whole.unflatten(1, (gradient.shape[-2], -1)).sum(2)
        return tuple(gradients)


def sequences(query, key, cum_q, cum_k, max_q, max_k):
    """`(index of the queries, index of the keys)` of each sequence of a padded or a varlen batch."""
    if cum_q is None:
        assert (max_q, max_k) == (query.shape[1], key.shape[1])
        yield from ((row, row) for row in range(len(query)))
        return
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert (cum_q[-1], cum_k[-1]) == (len(query), len(key)) and len(cum_q) == len(cum_k)
    assert max_q > 1, "one query a sequence takes FlashAttention-2 another way"
    for index in range(len(cum_q) - 1):
        of_query, of_key = (slice(int(cum[index]), int(cum[index + 1])) for cum in (cum_q, cum_k))
        assert 0 < of_query.stop - of_query.start <= max_q and 0 < of_key.stop - of_key.start <= max_k
        yield of_query, of_key


def lse_index(of_query):
    return of_query if isinstance(of_query, int) else (slice(None), of_query)


def repeated(key_SGD, query):
    return key_SGD.repeat_interleave(query.shape[-2] // key_SGD.shape[-2], dim=1)


def scores_of(query_LHD, key_SGD, is_causal, scale, window_size_left=None, window_size_right=None):
    scores = scale * torch.einsum("ihd,jhd->hij", query_LHD, repeated(key_SGD, query_LHD))
    rows, keys = scores.shape[1:]
    ahead = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    if is_causal:
        scores = scores.masked_fill(ahead > 0, -math.inf)
    if window_size_left is not None:
        scores = scores.masked_fill((ahead < -window_size_left) | (ahead > window_size_right), -math.inf)
    return scores


@pytest.fixture
def fake_flash(monkeypatch):
    fake = FakeFlash()
    monkeypatch.setattr(flash, "aten", fake)
    monkeypatch.setattr(
        flash,
        "needs_16_bit_cuda",
        lambda query, value, block, largest: "no mask, no softcap" if block.mask is not None or block.softcap else None,
    )
    return fake


# --- models ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize("kind", ["right_padded", "left_padded", "packed", "packed_flat", "plain"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_models_on_the_flash_path(family, kind, chunk_size, fake_flash):
    """Also where some chunks have no segments and take a mask (a window over padding), which another kernel then computes."""
    if (family, kind) == ("gpt_oss", "packed_flat"):
        pytest.skip("stock gpt-oss with eager attention ignores the boundaries")
    model = tiny_model(family)
    batch = batches.KINDS[kind](model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=5)
        del model.model._streamgrad.stream.backends[0]  # cudnn, which stands before flash
        assert_same_step(run_step(model, batch), expected, 1e-10)
    has_documents = "packed" in kind and family != "gpt_oss"  # which gives its mask function no positions
    has_plain_padding = "padded" in kind and family == "llama"
    if chunk_size > 1 and (has_documents or has_plain_padding):
        assert {"varlen forward", "varlen backward"} <= set(fake_flash.calls)


@pytest.mark.parametrize("chunk_size", [3, 23])
@pytest.mark.parametrize("attention", ["eager", "auto"])
def test_last_chunks_that_see_no_key(attention, chunk_size, fake_flash):
    """Padding longer than the window: the first chunks of backward have nothing to do and nothing to give."""
    model = tiny_model("mistral")
    ids = tokens(1, batches.LENGTH)
    real = torch.arange(batches.LENGTH)[None] < 9
    batch = {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size, attention=attention)
        if attention == "auto":
            del model.model._streamgrad.stream.backends[0]  # cudnn, which stands before flash
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize("kind", ["packed", "left", "right", "window", "padded_window"])
def test_no_mask_is_made_where_a_kernel_takes_segments(kind, attention, fake_flash, monkeypatch):
    """Neither by the mask nor from the segments, whatever of the batch hides keys; and each chunk is worked out once a mask."""
    length, chunk_size = 61, 16
    model = tiny_model("mistral" if "window" in kind else "llama", sliding_window=20 if "window" in kind else None)
    ids = tokens(2, length)
    batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    position = torch.arange(length).expand(2, -1)
    if kind == "packed":
        batch["position_ids"] = position % torch.tensor([[9], [23]])
    elif kind in ("left", "padded_window"):
        batch["attention_mask"] = (position >= torch.tensor([[0], [37]])).long()
        batch["labels"] = batch["labels"].masked_fill(position <= 37, -100)
    elif kind == "right":
        batch["attention_mask"] = (position < torch.tensor([[50], [19]])).long()
        batch["labels"] = batch["labels"].masked_fill(position >= 19, -100)
    parts = []
    plain_part = CausalMask._part
    monkeypatch.setattr(CausalMask, "_part", lambda mask, *span: parts.append(span) or plain_part(mask, *span))

    def refuse(*args, **kwargs):
        raise AssertionError("a mask was made")

    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size, keep="input", attention=attention)
        monkeypatch.setattr(CausalMask, "visible", refuse)
        monkeypatch.setattr(VarlenMask, "visible", refuse)
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert parts == [(*span, 2) for span in spans(length, chunk_size)]


@pytest.mark.parametrize(("attention", "expected"), [("sdpa", True), ("eager", False), ("flash", False)])
def test_nothing_of_chunk_times_keys_is_made_for_short_documents(attention, expected, fake_flash):
    """Neither masks nor scores; and where a mask is taken instead, this way of looking for it finds it."""
    length, chunk_size = 128, 32
    model = tiny_model("llama")
    ids = tokens(2, length)
    positions = torch.arange(length) % torch.tensor([[9], [13]])
    streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=8, keep="input", attention=attention)
    with Shapes() as shapes:
        model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    wide = [shape for shape in shapes.made if len(shape) > 3 and min(shape[-2:]) >= chunk_size]
    assert bool(wide) is expected, wide


# --- which kernel ------------------------------------------------------------------------------------------------------


class Named:
    """A kernel that takes everything."""

    def __init__(self, name):
        self.name = name

    def refusal(self, *args):
        return None


def test_flash_goes_first_where_a_newer_one_is_active(monkeypatch):
    monkeypatch.setattr(PlanPrices, "is_worth_a_plan", lambda *_, backward: True)
    candidates = [Named("cudnn"), Named("flash"), Named("sdpa")]
    query = torch.zeros(1, 1, 1, 8)
    assert choose(candidates, query, query, query, Block(scale=1.0)).name == "cudnn"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert choose(candidates, query, query, query, Block(scale=1.0)).name == "flash"
    assert [backend.name for backend in candidates] == ["cudnn", "flash", "sdpa"]


def test_what_newer_flash_kernels_lack_is_refused(monkeypatch):
    (backend,) = backends_named("flash")
    operands = [SimpleNamespace(shape=(1, 1, 4, 192), device=torch.device("cuda"), dtype=torch.bfloat16)] * 3
    plain, windowed = Block(scale=1.0, causal=True), Block(scale=1.0, causal=True, window=2)
    assert backend.refusal(*operands, plain) is None
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    assert "up to 128" in backend.refusal(*operands, plain)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    assert backend.refusal(*operands, plain) is None
    assert "without a sliding window" in backend.refusal(*operands, windowed)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    assert backend.refusal(*operands, windowed) is None


def test_fa4_is_one_word(monkeypatch):
    """It makes FlashAttention-4 active, once, and lets every kernel compute what that does not."""
    active = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    model = tiny_model("llama")
    batch = batches.right_padded(model)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, attention="fa4", chunk_size=7)
        streamgrad.enable(model, attention="fa4", chunk_size=7)
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert active == ["FA4"]
    assert [backend.name for backend in backends.preferred(backends_named("fa4"))] == ["flash", "cudnn", "sdpa", "eager"]


def test_fa4_that_is_not_installed_leaves_the_model_alone(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError("No module named 'flash_attn'")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", missing)
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"No module named 'flash_attn'. Run: pip install \"streamgrad\[fa4\]\""):
        streamgrad.enable(model, attention="fa4")
    assert not streamgrad.is_enabled(model) and "forward" not in model.__dict__


def test_cudnn_takes_plain_blocks_only(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    operands = [SimpleNamespace(shape=(3, 4, 6, 64), device=torch.device("cuda"), dtype=torch.bfloat16)] * 3
    backend = cudnn.CudnnBackend()
    assert backend.refusal(*operands, Block(scale=1.0, causal=True)) is None
    for block in (Block(scale=1.0, causal=True, window=2), Block(scale=1.0, varlen=VarlenMask(SEGMENTS, 3, 6))):
        assert "varlen" in backend.refusal(*operands, block)


def test_the_log_says_once_which_kernel_runs(caplog):
    backends._log_choice.cache_clear()
    model = tiny_model("gemma2", dtype=torch.float32)
    streamgrad.enable(model, chunk_size=7)
    with caplog.at_level(logging.DEBUG, logger="streamgrad"):
        for _ in range(2):
            run_step(model, batches.packed(model))
    lines = [record.getMessage() for record in caplog.records if "attention kernel" in record.getMessage()]
    assert len(lines) == len(set(lines)) and lines
    assert any(
        line.startswith("attention kernel eager for segments and softcap blocks of torch.float32 on cpu (") for line in lines
    )
    assert all("softcap" in line for line in lines), lines
