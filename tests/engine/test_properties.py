"""Property tests of attention: any shape, heads, window and chunk size. Whole models: tests/project/test_fuzz.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamgrad.attention.backends import Block, backends_named
from streamgrad.attention.masks import CausalMask
from streamgrad.attention.streamed import streamed_attention
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, StopAfterWrite, spans


@settings(max_examples=80)
@given(
    length=st.integers(1, 20),
    chunk_size=st.integers(1, 22),
    batch=st.integers(1, 2),
    groups=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    size=st.sampled_from([(3, 3), (8, 8), (4, 6)]),
    window=st.none() | st.integers(1, 20),
    softcap=st.none() | st.just(1.3),
    has_sink=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_streamed_attention_alone(length, chunk_size, batch, groups, size, window, softcap, has_sink, seed):
    """Attention by chunks, in reverse with deposits, against attention written out over the whole sequence."""
    (heads, key_heads), (key_size, value_size) = groups, size
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    query, key = random(batch, heads, length, key_size), random(batch, key_heads, length, key_size)
    value, sink = random(batch, key_heads, length, value_size), random(heads) if has_sink else None
    dout = random(batch, heads, length, value_size).detach()
    leaves = [tensor for tensor in (query, key, value, sink) if tensor is not None]
    expected_out = whole_attention(query, key, value, window, softcap, sink)
    expected = torch.autograd.grad(expected_out, leaves, dout)

    rule = None if window is None else lambda b, h, q, k: k > q - window
    mask = CausalMask(rule, window=window)
    stream = KeyValueStream(length)
    for start, stop in spans(length, chunk_size):
        chunk = Chunk(start, stop, stream=stream, mask=mask, backends=[], stop_after_write=True)
        with pytest.raises(StopAfterWrite):
            streamed_attention(chunk, *(tensor[:, :, start:stop] for tensor in (query, key, value)), scale=0.7)
    totals = [torch.zeros_like(leaf) for leaf in leaves]
    for start, stop in reversed(spans(length, chunk_size)):
        own = [tensor[:, :, start:stop].detach().requires_grad_() for tensor in (query, key, value)]
        chunk = Chunk(start, stop, stream=stream, mask=mask, backends=backends_named("auto"), in_backward=True)
        own_sink = None if sink is None else sink.detach().requires_grad_()
        out = streamed_attention(chunk, *own, scale=0.7, softcap=softcap, sink_H=own_sink)
        torch.testing.assert_close(out, expected_out[:, :, start:stop], rtol=1e-10, atol=1e-12)
        out.backward(dout[:, :, start:stop])
        for total, tensor in zip(totals, own, strict=False):
            total[:, :, start:stop] = tensor.grad
        if own_sink is not None:
            totals[3] += own_sink.grad
    for total, reference in zip(totals, expected, strict=True):
        torch.testing.assert_close(total, reference, rtol=1e-9, atol=1e-11)


def whole_attention(query, key, value, window, softcap, sink):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = 0.7 * query @ key.mT
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(query.shape[2])
    seen = position[None, :] <= position[:, None]
    if window is not None:
        seen &= position[None, :] > position[:, None] - window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(-1)[..., : key.shape[2]] @ value


def test_queries_and_gradients_with_any_strides():
    """Rotary embeddings of some families leave queries whose last axis is not consecutive."""
    query, key, value, dout = torch.randn(4, 2, 6, 5, 3, dtype=torch.float64).unbind(0)
    outcomes = []
    for strided in (False, True):
        q, d = (t.mT.contiguous().mT if strided else t.contiguous() for t in (query, dout))
        q = q.detach().requires_grad_()
        stream = KeyValueStream(5)
        chunk = Chunk(0, 5, stream=stream, mask=CausalMask(), backends=backends_named("sdpa"))
        out = streamed_attention(chunk, q, key, value, scale=1.0)
        out.backward(d)
        outcomes.append((out.detach(), q.grad))
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 9),
    keys=st.integers(1, 12),
    groups=st.sampled_from([(1, 1), (4, 2)]),
    kind=st.sampled_from(["dense", "mask", "bias", "causal"]),
    seed=st.integers(0, 10**6),
)
def test_kernels_agree_on_a_block(rows, keys, groups, kind, seed):
    """Every CPU kernel: the same output, log-sum-exp and gradients, also for rows that see no key."""
    generator = torch.Generator().manual_seed(seed)
    keys = max(rows, keys) if kind == "causal" else keys
    query = torch.randn(2, groups[0], rows, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(2, groups[1], keys, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    visible = torch.rand(2, 1, rows, keys, generator=generator) < 0.5
    mask = {"mask": visible, "bias": torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e30)}.get(kind)
    if kind == "bias":
        mask[..., 0] = 0.0
    block = Block(scale=0.6, causal=kind == "causal", mask=mask)
    dout = torch.randn(2, groups[0], rows, 4, generator=generator, dtype=torch.float64)
    results = []
    for backend in (*backends_named("sdpa"), *backends_named("eager")):
        done = backend.forward(query, key, value, block)
        dquery, pieces = backend.backward(dout, query, key, value, done, block)
        dkey, dvalue = torch.zeros_like(key), torch.zeros_like(value)
        for first, last, dkey_piece, dvalue_piece in pieces:
            dkey[:, :, first:last] += dkey_piece
            dvalue[:, :, first:last] += dvalue_piece
        results.append((done.out_BHLD, done.lse_BHL, dquery, dkey, dvalue))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
