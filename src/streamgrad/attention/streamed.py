"""Attention of one chunk of queries over all keys so far, whose gradient for earlier keys goes into the stream.

    scores = query @ keys[0:stop]^T * scale,  hidden where the mask says so
    out = softmax(scores) @ values[0:stop]

Without a mask beyond causality, the chunk's scores are a dense block over the keys before it and a causal block over its own
keys; each runs on a kernel that returns its log-sum-exp, and the two are merged. With a mask there is one block, over the keys
from the first that any query of the chunk can see.

Shapes: B batch, H query heads, G key/value heads, L chunk, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamgrad.attention.backends import Backend, Block, choose, retire
from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.core.chunk import Chunk, KeptAttention, SeamError

_Part = tuple[int, int, Block]  # keys [first, last) and how their scores are made


def streamed_attention(
    chunk: Chunk,
    query_BHLD: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    sink_H: Tensor | None = None,
) -> Tensor:
    """`out_BHLD` for `chunk`'s queries.

    Args:
        sink_H: a score per head that takes part in the softmax and carries no value (gpt-oss).
    """
    if key_BGLD is not chunk.own_key or value_BGLD is not chunk.own_value:
        raise SeamError("its attention changes keys or values after past_key_values.update (as latent attention does)")
    chunk.attention_calls += 1
    query_BHLD = _with_dense_rows(query_BHLD)
    parts = _parts(chunk, Block(scale=scale, softcap=softcap, dropout=dropout), query_BHLD.device)
    return _StreamedAttention.apply(chunk, parts, query_BHLD, key_BGLD, value_BGLD, sink_H)


def _parts(chunk: Chunk, block: Block, device: torch.device) -> list[_Part]:
    mask = chunk.mask
    assert isinstance(mask, CausalMask | DenseMask)
    start, stop, first = chunk.start, chunk.stop, mask.first_key(chunk.start)
    # Two blocks share a softmax but not a dropout mask's bookkeeping: with dropout, one block is simpler and rare enough.
    if mask.is_plain(first, stop) and block.dropout == 0.0:
        own = (start, stop, Block(scale=block.scale, softcap=block.softcap, causal=True))
        return [(first, start, block), own] if first < start else [own]
    visible = mask.visible(start, stop, first, device)
    return [(first, stop, Block(block.scale, mask=visible, softcap=block.softcap, dropout=block.dropout))]


class _StreamedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        chunk: Chunk,
        parts: list[_Part],
        query_BHLD: Tensor,
        key_BGLD: Tensor,
        value_BGLD: Tensor,
        sink_H: Tensor | None,
    ) -> Tensor:
        ctx.states = [None] * len(parts)
        if chunk.kept is not None:
            # An alias: the output gets this node as its grad_fn, and the node holds the chunk. The kept tensor itself as
            # output would close that circle, and the step's memory would wait for the garbage collector.
            out_BHLD, lse_BHL = chunk.kept.out_BHLD.detach(), chunk.kept.lse_BHL
        else:
            out_BHLD, lse_BHL, ctx.states = _attend(chunk, parts, query_BHLD)
            if sink_H is not None:
                out_BHLD, lse_BHL = _add_sink(out_BHLD, lse_BHL, sink_H)
            if chunk.keep_attention and not any(block.dropout for _, _, block in parts):
                chunk.kept = KeptAttention(out_BHLD, lse_BHL)
        ctx.chunk, ctx.parts = chunk, parts
        ctx.save_for_backward(query_BHLD, out_BHLD, lse_BHL, sink_H)
        return out_BHLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BHLD: Tensor) -> tuple[Tensor | None, ...]:
        chunk: Chunk = ctx.chunk
        query_BHLD, out_BHLD, lse_BHL, sink_H = ctx.saved_tensors
        dout_BHLD = _with_dense_rows(dout_BHLD)
        dquery_BHLD: Tensor | None = None
        for (first, last, block), state in zip(ctx.parts, ctx.states, strict=True):
            key, value = chunk.stream.read(first, last)
            backend = choose(chunk.backends, query_BHLD, key, value, block)
            dquery, dkey, dvalue = backend.backward(dout_BHLD, query_BHLD, key, value, out_BHLD, lse_BHL, block, state)
            # For every key of the part, own ones included: those are complete now and are collected just below.
            chunk.stream.deposit(first, last, dkey, dvalue)
            dquery_BHLD = dquery if dquery_BHLD is None else dquery_BHLD + dquery
        assert dquery_BHLD is not None

        dkey_BGLD, dvalue_BGLD = chunk.stream.collect(chunk.start, chunk.stop)
        dsink_H = None
        if sink_H is not None:
            weight_BHL = (sink_H.to(lse_BHL.dtype)[None, :, None] - lse_BHL).exp()
            delta_BHL = (dout_BHLD.to(lse_BHL.dtype) * out_BHLD.to(lse_BHL.dtype)).sum(dim=-1)
            dsink_H = -(weight_BHL * delta_BHL).sum(dim=(0, 2)).to(sink_H.dtype)
        return None, None, dquery_BHLD.to(query_BHLD.dtype), dkey_BGLD, dvalue_BGLD, dsink_H


def _with_dense_rows(tensor_BHLD: Tensor) -> Tensor:
    """Kernels read a head's values as consecutive; called below scaled_dot_product_attention, they do not check it."""
    return tensor_BHLD if tensor_BHLD.stride(-1) == 1 else tensor_BHLD.contiguous()


def _attend(chunk: Chunk, parts: list[_Part], query_BHLD: Tensor) -> tuple[Tensor, Tensor, list[object]]:
    """Every part on its kernel, merged: `(out_BHLD, lse_BHL, states)`."""
    results = []
    for first, last, block in parts:
        key, value = chunk.stream.read(first, last)
        results.append(_run_or_replace(chunk, query_BHLD, key, value, block))
    out_BHLD, lse_BHL, _ = results[0]
    for part_out_BHLD, part_lse_BHL, _ in results[1:]:
        out_BHLD, lse_BHL = _merge(out_BHLD, lse_BHL, part_out_BHLD, part_lse_BHL)
    return out_BHLD, lse_BHL, [state for _, _, state in results]


def _run_or_replace(chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor, object]:
    """The block on the first kernel that takes it; one that raises is retired, with a warning, and the next is tried."""
    while True:
        backend: Backend = choose(chunk.backends, query, key, value, block)
        try:
            return backend.forward(query, key, value, block)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            retire(chunk.backends, backend, error)  # type: ignore[arg-type]


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys from attention over each: weights exp(lse_i - lse)."""
    lse_BHL = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = (lse_a - lse_BHL).exp().unsqueeze(-1), (lse_b - lse_BHL).exp().unsqueeze(-1)
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse_BHL


def _add_sink(out_BHLD: Tensor, lse_BHL: Tensor, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """Merge with a key of score `sink_H` and value 0."""
    total_BHL = torch.logaddexp(lse_BHL, sink_H.to(lse_BHL.dtype)[None, :, None])
    return (out_BHLD * (lse_BHL - total_BHL).exp().unsqueeze(-1)).to(out_BHLD.dtype), total_BHL
