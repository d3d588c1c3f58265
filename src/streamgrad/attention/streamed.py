"""Attention of one chunk of queries over all keys so far; the gradients of earlier keys are summed in the key/value stream.

    scores = query @ keys[0:stop]^T * scale,  -inf where the mask hides a key
    out = softmax(scores) @ values[0:stop]

Only keys that some query of the chunk sees are read. A (chunk x keys) mask is built only if causality, a window, documents and
padding at the ends of rows do not describe what is hidden, or if the kernel takes nothing else.

Shapes: B batch, H query heads, G key/value heads, L chunk, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from streamgrad.attention.backends import Block, choose, run_or_replace
from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.engine.kv_chunk import Attended, Chunk, KeyGradient, KeyValueStream, with_dense_rows
from streamgrad.engine.trial import LoneTokens
from streamgrad.memory.costs import KEYS_AT_ONCE
from streamgrad.ops.accumulate import as_sum
from streamgrad.ops.autograd import first_order_only


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
    """Return the attention output `out_BHLD` of `chunk`'s queries.

    Args:
        sink_H: a score per head that takes part in the softmax and has no value (gpt-oss).
    """
    # Kernels need one head size for keys and values. Columns of zeros change neither scores nor outputs.
    size, value_size = max(key_BGLD.shape[-1], value_BGLD.shape[-1]), value_BGLD.shape[-1]
    query_BHLD, key_BGLD, value_BGLD = (_widened(tensor, size) for tensor in (query_BHLD, key_BGLD, value_BGLD))
    if isinstance(chunk, LoneTokens):
        return chunk.attend(query_BHLD, key_BGLD, value_BGLD, scale)[..., :value_size]
    chunk.receive(key_BGLD, value_BGLD)
    mask = chunk.mask
    assert isinstance(mask, CausalMask | DenseMask)
    if isinstance(mask, DenseMask):
        mask.check_shape(*query_BHLD.shape[:2])
    part = mask.part(*chunk.span, query_BHLD.shape[0])
    block = Block(
        scale=scale,
        causal=part.causal,
        window=part.window,
        varlen=part.varlen,
        mask=mask.visible(*chunk.span, part.first, query_BHLD.device) if part.masked else None,
        softcap=softcap,
        dropout=dropout,
    )
    keys = part.first, part.last
    if sink_H is not None:
        sink_H = chunk.sharing.own_heads(sink_H)
    out_BHLD = _StreamedAttention.apply(chunk, keys, block, query_BHLD, key_BGLD, value_BGLD, sink_H)
    return out_BHLD if value_size == size else out_BHLD[..., :value_size]


def _widened(tensor_BHLD: Tensor, size: int) -> Tensor:
    missing = size - tensor_BHLD.shape[-1]
    return torch.nn.functional.pad(tensor_BHLD, (0, missing)) if missing else tensor_BHLD


class _StreamedAttention(torch.autograd.Function):
    """Attention that reads keys and values from the stream; the chunk's own are inputs so that their gradient flows on.

    Inputs, output and their gradients hold this rank's tokens; everything in between holds its heads (`engine.ulysses`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunk: Chunk,
        keys: tuple[int, int],
        block: Block,
        query_BHLD: Tensor,
        key_BGLD: Tensor,
        value_BGLD: Tensor,
        sink_H: Tensor | None,
    ) -> Tensor:
        query_BHLD = with_dense_rows(chunk.sharing.to_heads(query_BHLD))
        done = chunk.kept
        if done is None:
            keys_and_values = chunk.stream.read(*keys)
            done = run_or_replace(chunk.backends, query_BHLD, *keys_and_values, block)
            if sink_H is not None:
                done = _add_sink(done, sink_H)
            if chunk.keep_attention and block.dropout == 0.0:
                chunk.kept = done
        ctx.backends, ctx.sharing, ctx.span, ctx.keys, ctx.block = chunk.backends, chunk.sharing, chunk.span, keys, block
        # A chunk that is the whole sequence reads only its own keys. Its graph may be kept and run backward more than once, so
        # autograd saves them, and each backward pass sums gradients in a stream of its own.
        ctx.stream = None if chunk.is_whole else chunk.stream
        own = chunk.stream.tensors if chunk.is_whole else ()
        # A detached alias, so that a kept tensor does not itself become the output and join this graph.
        out_BHLD = done.out_BHLD.detach()
        ctx.save_for_backward(query_BHLD, out_BHLD, done.lse_BHL, done.dropped_BHLS, sink_H, *own)
        return chunk.sharing.to_tokens(out_BHLD)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout_BHLD: Tensor) -> tuple[Tensor | None, ...]:
        query_BHLD, out_BHLD, lse_BHL, dropped_BHLS, sink_H, *own = ctx.saved_tensors
        stream: KeyValueStream = ctx.stream or KeyValueStream(ctx.span[1], (own[0], own[1]))
        dout_BHLD = with_dense_rows(ctx.sharing.to_heads(dout_BHLD))
        done = Attended(out_BHLD, lse_BHL, dropped_BHLS)
        dquery_BHLD: Tensor | None = None
        for (start, stop), block in _split_keys(ctx.keys, ctx.block, query_BHLD.shape[2]):
            key, value = stream.read(start, stop)
            backend = choose(ctx.backends, query_BHLD, key, value, block)
            term_BHLD, pieces = backend.backward(dout_BHLD, query_BHLD, key, value, done, block)
            dquery_BHLD = term_BHLD if dquery_BHLD is None else as_sum(dquery_BHLD).add_(term_BHLD)
            # Includes the chunk's own keys, whose gradient is then complete and collected below.
            _deposit(stream, start, pieces)
            del term_BHLD, pieces  # free them before the next kernel call
        assert dquery_BHLD is not None
        dkey_BGLD, dvalue_BGLD = stream.collect(*ctx.span)
        dsink_H = None
        if sink_H is not None:
            weight_BHL = (sink_H.to(lse_BHL.dtype)[None, :, None] - lse_BHL).exp()
            delta_BHL = (dout_BHLD.to(lse_BHL.dtype) * out_BHLD.to(lse_BHL.dtype)).sum(dim=-1)
            dsink_H = -(weight_BHL * delta_BHL).sum(dim=(0, 2)).to(sink_H.dtype)
        inputs = dquery_BHLD.to(query_BHLD.dtype), dkey_BGLD, dvalue_BGLD
        return None, None, None, *map(ctx.sharing.to_tokens, inputs), dsink_H


def _deposit(stream: KeyValueStream, start: int, pieces: list[KeyGradient]) -> None:
    for first, last, dkey, dvalue in pieces:
        stream.deposit(start + first, start + last, dkey, dvalue)


def _split_keys(keys: tuple[int, int], block: Block, rows: int) -> list[tuple[tuple[int, int], Block]]:
    """Split a block into blocks of a bounded number of keys, for backward.

    Kernels allocate gradients and workspace for all their keys, with grouped queries even per query head: tens of kB per key.
    """
    first, last = keys
    if not block.causal or block.window is not None or block.dropout > 0.0:
        return [(keys, block)]
    parts = []
    while last - rows - first > KEYS_AT_ONCE:
        parts.append(((first, first + KEYS_AT_ONCE), replace(block, causal=False)))
        first += KEYS_AT_ONCE
    return [*parts, ((first, last), block)]


def _add_sink(done: Attended, sink_H: Tensor) -> Attended:
    """Return `done` merged with one more key, of score `sink_H` and value 0."""
    total_BHL = torch.logaddexp(done.lse_BHL, sink_H.to(done.lse_BHL.dtype)[None, :, None])
    share_BHL1 = (done.lse_BHL - total_BHL).exp().unsqueeze(-1)
    return Attended((done.out_BHLD * share_BHL1).to(done.out_BHLD.dtype), total_BHL, done.dropped_BHLS)
