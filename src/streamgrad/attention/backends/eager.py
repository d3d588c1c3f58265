"""Attention written out in torch: the reference, and the only kernel with softcap and dropout.

It holds (chunk x keys) scores of every head, in fp32 for 16-bit inputs; with segments, those of one segment at a time. The
R = H / G query heads that read one key head are stacked along the query axis, so keys and values are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.attention.backends.block import Block, additive, visible_mask
from streamgrad.engine.kv_chunk import Attended, KeyGradient
from streamgrad.ops.accumulate import accumulator_dtype, zeros_for_sum


class EagerBackend:
    name = "eager"
    joins_segments = False

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        return None

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        if _by_segment(block):
            return self._forward_by_segment(query_BHLD, key_BGSD, value_BGSD, block)
        scores_BHLS, _ = _scores(query_BHLD, key_BGSD, block)
        lse_BHL = scores_BHLS.logsumexp(dim=-1)
        weights_BHLS = _probabilities(scores_BHLS, lse_BHL)
        dropped = None
        if block.dropout > 0.0:
            dropped = torch.rand_like(weights_BHLS) < block.dropout
            weights_BHLS = weights_BHLS.masked_fill_(dropped, 0.0).div_(1.0 - block.dropout)
        value_BGSD = value_BGSD.to(weights_BHLS.dtype)
        out_BHLD = (_stack_heads(weights_BHLS, value_BGSD) @ value_BGSD).view(*weights_BHLS.shape[:3], -1)
        return Attended(out_BHLD.to(query_BHLD.dtype), lse_BHL, dropped, held_scores=True)

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        if _by_segment(block):
            return self._backward_by_segment(dout_BHLD, query_BHLD, key_BGSD, value_BGSD, done, block)
        scores_BHLS, slope_BHLS = _scores(query_BHLD, key_BGSD, block)
        dtype = scores_BHLS.dtype
        weights_BHLS = _probabilities(scores_BHLS, done.lse_BHL)
        dout_BHLD = dout_BHLD.to(dtype)
        dout_stacked = _stack_heads(dout_BHLD, value_BGSD)
        dweights_BHLS = (dout_stacked @ value_BGSD.to(dtype).mT).view(weights_BHLS.shape)
        used_BHLS = weights_BHLS
        if done.dropped_BHLS is not None:
            keep = 1.0 / (1.0 - block.dropout)
            dweights_BHLS = dweights_BHLS.masked_fill_(done.dropped_BHLS, 0.0).mul_(keep)
            used_BHLS = weights_BHLS.masked_fill(done.dropped_BHLS, 0.0).mul_(keep)
        dvalue_BGSD = _stack_heads(used_BHLS, value_BGSD).mT @ dout_stacked
        # delta = rowsum(dout * out) = rowsum(dweights * weights) over the whole row, also when dropout acted on it.
        delta_BHL1 = (dout_BHLD * done.out_BHLD.to(dtype)).sum(dim=-1, keepdim=True)
        dscores_BHLS = dweights_BHLS.sub_(delta_BHL1).mul_(weights_BHLS)
        if slope_BHLS is not None:
            dscores_BHLS.mul_(slope_BHLS)
        dscores_stacked = _stack_heads(dscores_BHLS.mul_(block.scale), key_BGSD)
        dquery_BHLD = (dscores_stacked @ key_BGSD.to(dtype)).view(query_BHLD.shape)
        dkey_BGSD = dscores_stacked.mT @ _stack_heads(query_BHLD.to(dtype), key_BGSD)
        return dquery_BHLD, [(0, key_BGSD.shape[2], dkey_BGSD, dvalue_BGSD)]

    def _forward_by_segment(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        assert block.varlen is not None
        out_BHLD = query_BHLD.new_zeros(*query_BHLD.shape[:3], value_BGSD.shape[-1])
        lse_BHL = query_BHLD.new_full(query_BHLD.shape[:3], float("-inf"), dtype=accumulator_dtype(query_BHLD.dtype))
        for segment in block.varlen.segments:
            operands = segment.of_queries(query_BHLD), segment.of_keys(key_BGSD), segment.of_keys(value_BGSD)
            done = self.forward(*operands, block.of_segment(segment))
            segment.of_queries(out_BHLD).copy_(done.out_BHLD)
            segment.of_queries(lse_BHL).copy_(done.lse_BHL)
        return Attended(out_BHLD, lse_BHL, held_scores=True)

    def _backward_by_segment(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        assert block.varlen is not None
        dquery_BHLD, dkey_BGSD, dvalue_BGSD = (zeros_for_sum(tensor) for tensor in (query_BHLD, key_BGSD, value_BGSD))
        for segment in block.varlen.segments:
            operands = segment.of_queries(query_BHLD), segment.of_keys(key_BGSD), segment.of_keys(value_BGSD)
            of_segment = Attended(segment.of_queries(done.out_BHLD), segment.of_queries(done.lse_BHL))
            dquery, pieces = self.backward(segment.of_queries(dout_BHLD), *operands, of_segment, block.of_segment(segment))
            segment.of_queries(dquery_BHLD).copy_(dquery)
            for _, _, dkey, dvalue in pieces:
                segment.add_to_keys(dkey_BGSD, dkey)
                segment.add_to_keys(dvalue_BGSD, dvalue)
        return dquery_BHLD, [(0, key_BGSD.shape[2], dkey_BGSD, dvalue_BGSD)]


def _by_segment(block: Block) -> bool:
    """Return whether to compute segment by segment: not with dropout, whose draws are one tensor for the whole block."""
    return block.varlen is not None and block.dropout == 0.0


def _stack_heads(rows_BHLX: Tensor, key_BGSD: Tensor) -> Tensor:
    """Reshape (B, H, L, X) to (B, G, R * L, X): one matrix per key head."""
    batch, _, _, width = rows_BHLX.shape
    return rows_BHLX.reshape(batch, key_BGSD.shape[1], -1, width)


def _scores(query_BHLD: Tensor, key_BGSD: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """Return the masked scores, and d(capped)/d(uncapped) if there is a softcap."""
    dtype = accumulator_dtype(query_BHLD.dtype)
    stacked = _stack_heads(query_BHLD.to(dtype), key_BGSD) @ key_BGSD.to(dtype).mT
    scores_BHLS = stacked.view(*query_BHLD.shape[:3], -1).mul_(block.scale)
    slope_BHLS = None
    if block.softcap is not None:
        tanh_BHLS = scores_BHLS.div_(block.softcap).tanh_()
        slope_BHLS = 1.0 - tanh_BHLS.square()
        scores_BHLS = tanh_BHLS.mul_(block.softcap)
    bias = additive(visible_mask(block, scores_BHLS.shape[2], scores_BHLS.shape[3], scores_BHLS.device), dtype)
    if bias is not None:
        scores_BHLS = scores_BHLS.add_(bias)
    return scores_BHLS, slope_BHLS


def _probabilities(scores_BHLS: Tensor, lse_BHL: Tensor) -> Tensor:
    """Overwrite the scores with exp(scores - lse); zeros for a row that sees no key (its lse is -inf)."""
    finite_BHL1 = lse_BHL.masked_fill(lse_BHL == float("-inf"), 0.0).unsqueeze(-1)
    return scores_BHLS.sub_(finite_BHL1).exp_()
