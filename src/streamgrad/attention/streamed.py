"""Attention of one chunk of queries over all keys so far; the gradients of earlier keys are summed in the key/value stream.

    scores = query @ keys[0:stop]^T * scale,  -inf where the mask hides a key
    out = softmax(scores) @ values[0:stop]

Only keys that some query of the chunk sees are read. A (chunk x keys) mask is built only if causality, a window, documents and
padding at the ends of rows do not describe what is hidden, or if the kernel takes nothing else.

Shapes: B batch, H query heads, G key/value heads, L chunk, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamgrad.attention.backends import Block, differentiate_or_replace, run_or_replace
from streamgrad.attention.backends.block import merge
from streamgrad.attention.masks import CausalMask, DenseMask, Part
from streamgrad.attention.trees import TreeMask, band_mask
from streamgrad.attention.varlen import VarlenMask
from streamgrad.engine.checks.trial import attend_alone
from streamgrad.engine.kv_chunk import Attended, Chunk, KeyValueStream, SeamError, Span, with_dense_rows
from streamgrad.memory.costs import KEYS_AT_ONCE
from streamgrad.ops.accumulate import accumulator_dtype, as_sum
from streamgrad.ops.autograd import Function, first_order_only

_NO_SEGMENTS = VarlenMask((), 1, 0)


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
    size, value_size = key_BGLD.shape[-1], value_BGLD.shape[-1]
    if size != value_size:
        size = max(size, value_size)
        query_BHLD, key_BGLD, value_BGLD = (_widened(tensor, size) for tensor in (query_BHLD, key_BGLD, value_BGLD))
    if chunk.alone:
        return attend_alone(chunk, query_BHLD, key_BGLD, value_BGLD, scale)[..., :value_size]
    chunk.receive(key_BGLD, value_BGLD)
    pieces = _pieces(chunk, query_BHLD, key_BGLD, value_BGLD, _Terms(scale, softcap, dropout))
    if sink_H is not None:
        sink_H = chunk.sharing.own_heads(sink_H)
    out_BHLD, chunk.attended = _StreamedAttention.apply(chunk, pieces, query_BHLD, key_BGLD, value_BGLD, sink_H)
    if chunk.kept is not None:
        operands = query_BHLD, key_BGLD, value_BGLD
        for end in chunk.ends:
            chunk.attended_with.append([tensor[:, :, end].detach().to(torch.float32, copy=True) for tensor in operands])
    return out_BHLD if value_size == size else out_BHLD[..., :value_size]


class Piece(NamedTuple):
    """Some of a chunk's queries, counted from its first, over some keys of the sequence; a chunk's attention is made of them."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    block: Block
    opens: bool  # no piece before has these queries

    def of_queries(self, tensor_BHLx: Tensor) -> Tensor:
        """Return the piece's queries, or what belongs to them: the tensor itself if these are all."""
        first, last = self.queries
        return tensor_BHLx if last - first == tensor_BHLx.shape[2] else tensor_BHLx[:, :, first:last]


class _Terms(NamedTuple):
    """What a layer's attention does with scores, whichever keys are seen."""

    scale: float
    softcap: float | None
    dropout: float


def _pieces(chunk: Chunk, query_BHLD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, terms: _Terms) -> list[Piece]:
    """Return the pieces, the same for all layers but for a mask's tensor, which is too large to be kept."""
    found = []
    for part, queries, span in _parts(chunk, query_BHLD, key_BGLD, value_BGLD, terms):
        piece: Piece | None = part.pieces.get((terms, queries))
        if piece is None:
            mask = _mask_of(chunk, part, span, query_BHLD.device)
            block = Block(terms.scale, part.causal, part.window, part.varlen, mask, terms.softcap, terms.dropout)
            piece = Piece(queries, (part.first, part.last), block, opens=part.queries is None or part.causal)
            if mask is None:
                part.pieces[terms, queries] = piece
        found.append(piece)
    if terms.dropout > 0.0 and len(found) > 1:
        raise SeamError("attention dropout is on, and its sequences share their beginnings or are shared by a ring of ranks")
    return found if chunk.sharing.ring_ranks == 1 else _earlier_keys_first(found, chunk.span[0])


def _parts(
    chunk: Chunk, query_BHLD: Tensor, key_BGLD: Tensor, value_BGLD: Tensor, terms: _Terms
) -> Iterator[tuple[Part, Span, Span]]:
    """Yield the parts of the chunk's mask, each with its queries, counted from the chunk's first, and their positions."""
    mask, batch = chunk.mask, query_BHLD.shape[0]
    if isinstance(mask, TreeMask):
        varlen = Block(terms.scale, False, mask.window, _NO_SEGMENTS, None, terms.softcap, terms.dropout)
        joining = [backend for backend in chunk.backends if backend.joins_segments]
        joined = any(backend.refusal(query_BHLD, key_BGLD, value_BGLD, varlen) is None for backend in joining)
        start, stop = chunk.span
        for part in mask.parts(start, stop, batch, joined=joined):
            yield part, part.queries or (0, stop - start), chunk.span
        return
    if not isinstance(mask, CausalMask | DenseMask):
        raise SeamError("one of its layers has attention, and is said to be without")
    if isinstance(mask, DenseMask):
        mask.check_shape(*query_BHLD.shape[:2])
    done = 0
    for start, stop in chunk.query_spans:
        yield mask.part(start, stop, batch), (done, done + stop - start), (start, stop)
        done += stop - start


def _mask_of(chunk: Chunk, part: Part, span: Span, device: torch.device) -> Tensor | None:
    if part.band is not None:
        return band_mask(part, device)
    if not part.masked:
        return None
    assert isinstance(chunk.mask, CausalMask | DenseMask)
    return chunk.mask.visible(*span, part.first, device)


def _earlier_keys_first(pieces: list[Piece], start: int) -> list[Piece]:
    """Split what can be split into a piece over the keys before `start`, which are there, and one over those that arrive."""
    earlier, others = [], []
    for piece in pieces:
        (first, last), block = piece.keys, piece.block
        if first < start and block.causal and block.is_plain:
            earlier.append(piece._replace(keys=(first, start), block=replace(block, causal=False)))
            piece = piece._replace(keys=(start, last), opens=False)
        others.append(piece)
    return earlier + others


def _widened(tensor_BHLD: Tensor, size: int) -> Tensor:
    missing = size - tensor_BHLD.shape[-1]
    return torch.nn.functional.pad(tensor_BHLD, (0, missing)) if missing else tensor_BHLD


class _StreamedAttention(Function):
    """Attention that reads keys and values from the stream; the chunk's own are inputs so that their gradient flows on.

    A second output, without elements, is where backward can begin: later queries owe gradients to the chunk's keys also where the
    layer's output does not depend on the chunk's own attention.

    Inputs, output and their gradients hold this rank's tokens; everything in between holds its heads (`engine.ulysses`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        chunk: Chunk,
        pieces: list[Piece],
        query_BHLD: Tensor,
        key_BGLD: Tensor,
        value_BGLD: Tensor,
        sink_H: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.materialize_grads = False
        query_BHLD = with_dense_rows(chunk.sharing.to_heads(query_BHLD))
        done = chunk.kept
        if done is None:
            done = _attended(chunk, pieces, query_BHLD)
            if sink_H is not None:
                done = _add_sink(done, sink_H)
            if chunk.keep_attention and pieces[0].block.dropout == 0.0:
                chunk.kept = done
        ctx.backends, ctx.sharing, ctx.span, ctx.pieces = chunk.backends, chunk.sharing, chunk.span, pieces
        ctx.tokens = chunk.start, chunk.stop
        ctx.key_heads = key_BGLD.shape[1]
        # A chunk that is the whole sequence reads only its own keys. Its graph may be kept and run backward more than once, so
        # autograd saves them, and each backward pass sums gradients in a stream of its own.
        ctx.stream = None if chunk.is_whole else chunk.stream
        own = chunk.stream.tensors if chunk.is_whole else ()
        # A detached alias, so that a kept tensor does not itself become the output and join this graph.
        out_BHLD = done.out_BHLD.detach()
        # Masks too, so that autograd notices if a program changes its own before backward.
        masks = [piece.block.mask for piece in pieces if piece.block.mask is not None]
        ctx.save_for_backward(query_BHLD, out_BHLD, done.lse_BHL, done.dropped_BHLS, sink_H, *own, *masks)
        tokens_BHLD = chunk.sharing.to_tokens(out_BHLD)
        ctx.out_shape = tokens_BHLD.shape
        return tokens_BHLD, tokens_BHLD.new_empty(0)

    @staticmethod
    @partial(first_order_only, even_undefined=True)
    def backward(ctx: Any, dout_BHLD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout_BHLD is None:
            if ctx.sharing.ranks == 1 and (ctx.stream is None or not ctx.stream.is_owed):
                return (None,) * 6
            dout_BHLD = ctx.saved_tensors[1].new_zeros(ctx.out_shape)  # for later queries, or for the other ranks
        query_BHLD, out_BHLD, lse_BHL, dropped_BHLS, sink_H, *saved = ctx.saved_tensors
        stream: KeyValueStream = ctx.stream or KeyValueStream(ctx.span[1], (saved[0], saved[1]))
        dout_BHLD = with_dense_rows(ctx.sharing.to_heads(dout_BHLD))
        done, (start, stop) = Attended(out_BHLD, lse_BHL, dropped_BHLS), ctx.span
        dquery_BHLD: Tensor | None = None
        pieces = [part for whole in ctx.pieces for part in _split_keys(whole)]
        # The chunk's own keys first: their gradient is then complete, and may travel while that of earlier keys is computed.
        for piece in (piece for piece in pieces if piece.keys[1] > start):
            dquery_BHLD = _differentiated(piece, ctx.backends, stream, dout_BHLD, query_BHLD, done, dquery_BHLD)
        arriving = ctx.sharing.sum_over_ring(*ctx.tokens, stream.sums)
        for piece in (piece for piece in pieces if piece.keys[1] <= start):
            dquery_BHLD = _differentiated(piece, ctx.backends, stream, dout_BHLD, query_BHLD, done, dquery_BHLD)
        assert dquery_BHLD is not None
        dkey_BGLD, dvalue_BGLD = stream.collect(start, stop, arriving)
        dsink_H = None
        if sink_H is not None:
            weight_BHL = (sink_H.to(lse_BHL.dtype)[None, :, None] - lse_BHL).exp()
            delta_BHL = (dout_BHLD.to(lse_BHL.dtype) * out_BHLD.to(lse_BHL.dtype)).sum(dim=-1)
            dsink_H = -(weight_BHL * delta_BHL).sum(dim=(0, 2)).to(sink_H.dtype)
        dquery_BHLD = ctx.sharing.to_tokens(dquery_BHLD.to(query_BHLD.dtype))
        keys = (ctx.sharing.keys_to_tokens(gradient, ctx.key_heads) for gradient in (dkey_BGLD, dvalue_BGLD))
        return None, None, dquery_BHLD, *keys, dsink_H


def _differentiated(
    piece: Piece,
    backends: list[Any],
    stream: KeyValueStream,
    dout_BHLD: Tensor,
    query_BHLD: Tensor,
    done: Attended,
    dquery_BHLD: Tensor | None,
) -> Tensor:
    """Deposit what a piece's queries owe to its keys; return the sum of the queries' gradients so far and the piece's."""
    start, stop = piece.keys
    key, value = stream.read(start, stop)
    dout, query = piece.of_queries(dout_BHLD), piece.of_queries(query_BHLD)
    own_lse = piece.of_queries(done.lse_BHL)
    own_lse = own_lse if own_lse is done.lse_BHL else own_lse.contiguous()
    own = Attended(piece.of_queries(done.out_BHLD), own_lse, done.dropped_BHLS)
    term_BHLD, gradients = differentiate_or_replace(backends, dout, query, key, value, own, piece.block)
    dquery_BHLD = _with_term(dquery_BHLD, piece, term_BHLD, query_BHLD.shape)
    for first, last, dkey, dvalue in gradients:
        stream.deposit(start + first, start + last, dkey, dvalue)
    return dquery_BHLD


def _attended(chunk: Chunk, pieces: list[Piece], query_BHLD: Tensor) -> Attended:
    """Run the pieces and merge them by their log-sum-exps."""
    whole: Attended | None = None
    for place, piece in enumerate(pieces):
        query, keys = with_dense_rows(piece.of_queries(query_BHLD)), chunk.stream.read(*piece.keys)
        done = run_or_replace(chunk.backends, query, *keys, piece.block, chunk.ran_by, (chunk.span, place))
        chunk.holds_scores |= done.held_scores
        if query.shape == query_BHLD.shape and whole is None:
            whole = done
            continue
        if whole is None:
            whole = Attended(torch.empty_like(query_BHLD), done.lse_BHL.new_full(query_BHLD.shape[:3], float("-inf")))
        own = Attended(piece.of_queries(whole.out_BHLD), piece.of_queries(whole.lse_BHL))
        merged = done if piece.opens else merge(own, done)
        if merged.out_BHLD is not own.out_BHLD:
            own.out_BHLD.copy_(merged.out_BHLD)
            own.lse_BHL.copy_(merged.lse_BHL)
    assert whole is not None
    return whole


def _with_term(dquery_BHLD: Tensor | None, piece: Piece, term_BHLD: Tensor, shape: torch.Size) -> Tensor:
    """Return the sum of the queries' gradients so far and one piece's."""
    if dquery_BHLD is None:
        if term_BHLD.shape == shape:
            return term_BHLD
        dquery_BHLD = term_BHLD.new_zeros(shape, dtype=accumulator_dtype(term_BHLD.dtype))
    dquery_BHLD = as_sum(dquery_BHLD)
    piece.of_queries(dquery_BHLD).add_(term_BHLD)
    return dquery_BHLD


def _split_keys(piece: Piece) -> list[Piece]:
    """Split a piece into pieces of a bounded number of keys, for backward.

    Kernels allocate gradients and workspace for all their keys, with grouped queries even per query head: tens of kB per key.
    """
    (first, last), block = piece.keys, piece.block
    if not block.is_plain:
        return [piece]
    rows = piece.queries[1] - piece.queries[0] if block.causal else 0
    parts = []
    while last - rows - first > KEYS_AT_ONCE:
        parts.append(piece._replace(keys=(first, first + KEYS_AT_ONCE), block=replace(block, causal=False)))
        first += KEYS_AT_ONCE
    return [*parts, piece._replace(keys=(first, last))]


def _add_sink(done: Attended, sink_H: Tensor) -> Attended:
    """Return `done` merged with one more key, of score `sink_H` and value 0."""
    total_BHL = torch.logaddexp(done.lse_BHL, sink_H.to(done.lse_BHL.dtype)[None, :, None])
    share_BHL1 = (done.lse_BHL - total_BHL).exp().unsqueeze(-1)
    return Attended((done.out_BHLD * share_BHL1).to(done.out_BHLD.dtype), total_BHL, done.dropped_BHLS)
