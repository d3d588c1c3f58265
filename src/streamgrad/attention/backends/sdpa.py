"""torch's fused attention with a mask: the flash kernel on CPU, memory-efficient attention on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from streamgrad.attention.backends.block import Block, additive, merge, split_causal, visible_mask
from streamgrad.engine.kv_chunk import Attended, KeyGradient

aten = torch.ops.aten


class SdpaBackend:
    name = "sdpa"
    joins_segments = False

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        device = query_BHLD.device.type
        if block.softcap is not None:
            return "torch's scaled_dot_product_attention has no softcap"
        if block.dropout > 0.0:
            return "its dropout mask cannot be shared between blocks"
        if device not in ("cpu", "cuda"):
            return f"no fused kernel for device {device!r}"
        if key_BGSD.shape[-1] != value_BGSD.shape[-1]:
            return "keys and values differ in head size"
        if device == "cuda" and query_BHLD.dtype == torch.float64:
            return "no CUDA kernel for float64"
        if block.varlen is not None and block.varlen.has_ancestors:
            return "it takes no varlen batches, only masks, and the keys of a segment are no interval"
        return None

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        merged: Attended | None = None
        for first, last, causal, mask in _pieces(query_BHLD, key_BGSD, block):
            key, value = key_BGSD[:, :, first:last], value_BGSD[:, :, first:last]
            piece = _forward(query_BHLD, key, value, causal, additive(mask, query_BHLD.dtype), block.scale)
            if mask is not None:
                # Kernels disagree on the log-sum-exp of a row that sees no key; over no terms it is -inf.
                sees_BHL = mask.any(dim=-1) if mask.dtype == torch.bool else mask.amax(dim=-1) > float("-inf")
                piece.lse_BHL = piece.lse_BHL.masked_fill(~sees_BHL, float("-inf"))
            merged = piece if merged is None else merge(merged, piece)
        assert merged is not None
        # A mask is as large; in 16 bits every chunk but the first has one.
        merged.held_scores = mask is not None or query_BHLD.dtype.itemsize == 2
        return merged

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        # In a row that sees no key, +inf instead of -inf makes the probabilities exp(-inf - inf) = 0 instead of NaN.
        done = Attended(done.out_BHLD, done.lse_BHL.masked_fill(done.lse_BHL == float("-inf"), float("inf")))
        dquery_BHLD = torch.zeros_like(query_BHLD)
        gradients: list[KeyGradient] = []
        for first, last, causal, mask in _pieces(query_BHLD, key_BGSD, block):
            key, value = key_BGSD[:, :, first:last], value_BGSD[:, :, first:last]
            bias = additive(mask, query_BHLD.dtype)
            for heads, dquery, dkey, dvalue in _backward(dout_BHLD, query_BHLD, key, value, done, causal, bias, block.scale):
                dquery_BHLD[:, heads] += dquery
                gradients.append((first, last, dkey, dvalue))
        return dquery_BHLD, gradients


_Piece = tuple[int, int, bool, Tensor | None]  # keys [first, last), torch's is_causal, mask


def _pieces(query_BHLD: Tensor, key_BGSD: Tensor, block: Block) -> list[_Piece]:
    """Split the block into kernel calls: the kernel's `is_causal` equals `Block.causal` only for as many queries as keys.

    Merging pieces would round 16-bit outputs twice, so for those causality is written into a mask instead.
    """
    rows, keys = query_BHLD.shape[2], key_BGSD.shape[2]
    if not block.is_plain or (block.causal and rows != keys and query_BHLD.dtype.itemsize == 2):
        return [(0, keys, False, visible_mask(block, rows, keys, query_BHLD.device))]
    return [(*piece, None) for piece in split_causal(block, rows, keys)]


def _forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None, scale: float) -> Attended:
    if query.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return Attended(*kernel(query, key, value, 0.0, causal, attn_mask=bias, scale=scale))
    done = Attended(torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32))
    for heads in _head_slices(query, key):
        done.out_BHLD[:, heads], lse, _, _ = aten._scaled_dot_product_efficient_attention(
            query[:, heads], key, value, _aligned(bias, heads, query, key), True, 0.0, causal, scale=scale
        )
        done.lse_BHL[:, heads] = lse[:, :, : query.shape[2]]  # the kernel pads its rows
    return done


def _backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, done: Attended, causal: bool, bias: Tensor | None, scale: float
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield `(query heads, dquery of these heads, dkey, dvalue)` of each kernel call."""
    if query.device.type == "cpu":
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        grads = kernel(dout, query, key, value, done.out_BHLD, done.lse_BHL, 0.0, causal, attn_mask=bias, scale=scale)
        yield slice(None), *grads
        return
    seed = torch.zeros((), dtype=torch.long, device=query.device)
    lse_BHL = torch.nn.functional.pad(done.lse_BHL, (0, -query.shape[2] % 32), value=float("inf"))
    for heads in _head_slices(query, key):
        grads = aten._scaled_dot_product_efficient_attention_backward(
            dout[:, heads], query[:, heads], key, value, _aligned(bias, heads, query, key),
            _as_forward_makes_it(done.out_BHLD[:, heads]), lse_BHL[:, heads].contiguous(),
            seed, seed, 0.0, [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        yield heads, *grads[:3]


def _as_forward_makes_it(out_BHLD: Tensor) -> Tensor:
    """Return the output laid out as (B, L, H, D): the CUDA backward kernel assumes these strides and does not read them."""
    return out_BHLD.transpose(1, 2).contiguous().transpose(1, 2)


def _head_slices(query_BHLD: Tensor, key_BGSD: Tensor) -> list[slice]:
    """Return query heads r, r + R, r + 2R, ... for each r < R = H / G: one per key head, so that no key is repeated."""
    repeats = query_BHLD.shape[1] // key_BGSD.shape[1]
    return [slice(first, None, repeats) for first in range(repeats)]


def _aligned(bias: Tensor | None, heads: slice, query_BHLD: Tensor, key_BGSD: Tensor) -> Tensor | None:
    """Return the bias of these heads, with rows that begin at multiples of the 8 elements that the CUDA kernel reads at a time.

    A chunk's part of a user's own mask is a view, whose rows begin where those of the whole mask do.
    """
    if bias is None:
        return None
    if bias.shape[1] > 1:
        bias = bias[:, heads]
    keys = bias.shape[-1]
    if any(count % 8 for count in (keys, bias.storage_offset(), *bias.stride()[:-1])) or bias.stride(-1) != 1:
        rows = bias.new_zeros(*bias.shape[:-1], keys + -keys % 8)
        rows[..., :keys] = bias
        bias = rows[..., :keys]
    return bias.expand(query_BHLD.shape[0], key_BGSD.shape[1], query_BHLD.shape[2], keys)
