"""torch's own fused attention that takes a mask: the flash kernel on CPU, memory-efficient attention on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.attention.backends.base import Block, KeyGradient, additive, visible_mask
from streamgrad.core.chunk import Attended

aten = torch.ops.aten


class SdpaBackend:
    name = "sdpa"

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
        return None

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        mask, causal = _kernel_mask(query_BHLD, key_BGSD, block)
        bias = additive(mask, query_BHLD.dtype)
        if query_BHLD.device.type == "cpu":
            out_BHLD, lse_BHL = aten._scaled_dot_product_flash_attention_for_cpu(
                query_BHLD, key_BGSD, value_BGSD, 0.0, causal, attn_mask=bias, scale=block.scale
            )
        else:
            out_BHLD = torch.empty_like(query_BHLD)
            lse_BHL = query_BHLD.new_empty(query_BHLD.shape[:3], dtype=torch.float32)
            for heads in _head_slices(query_BHLD, key_BGSD):
                out_BHLD[:, heads], lse, _, _ = aten._scaled_dot_product_efficient_attention(
                    query_BHLD[:, heads], key_BGSD, value_BGSD, _aligned(bias, heads, query_BHLD, key_BGSD),
                    True, 0.0, causal, scale=block.scale,
                )  # fmt: skip
                lse_BHL[:, heads] = lse[:, :, : query_BHLD.shape[2]]  # the kernel pads its rows
        if mask is not None and mask.dtype == torch.bool:
            # The kernels disagree on the log-sum-exp of a row that sees no key; of no terms it is -inf.
            lse_BHL = lse_BHL.masked_fill(~mask.any(dim=-1), float("-inf"))
        return Attended(out_BHLD, lse_BHL)

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        mask, causal = _kernel_mask(query_BHLD, key_BGSD, block)
        bias = additive(mask, query_BHLD.dtype)
        keys = key_BGSD.shape[2]
        # A row that sees no key: +inf instead of -inf makes its probabilities exp(-inf - inf) = 0 instead of NaN.
        lse_BHL = done.lse_BHL.masked_fill(done.lse_BHL == float("-inf"), float("inf"))
        if query_BHLD.device.type == "cpu":
            dquery_BHLD, dkey, dvalue = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dout_BHLD, query_BHLD, key_BGSD, value_BGSD, done.out_BHLD, lse_BHL, 0.0, causal,
                attn_mask=bias, scale=block.scale,
            )  # fmt: skip
            return dquery_BHLD, [(0, keys, dkey, dvalue)]
        seed = torch.zeros((), dtype=torch.long, device=query_BHLD.device)
        dquery_BHLD = torch.empty_like(query_BHLD)
        pieces: list[KeyGradient] = []
        lse_BHL = torch.nn.functional.pad(lse_BHL, (0, -lse_BHL.shape[-1] % 32), value=float("inf"))
        for heads in _head_slices(query_BHLD, key_BGSD):
            dquery_BHLD[:, heads], dkey, dvalue, _ = aten._scaled_dot_product_efficient_attention_backward(
                dout_BHLD[:, heads], query_BHLD[:, heads], key_BGSD, value_BGSD,
                _aligned(bias, heads, query_BHLD, key_BGSD), _as_forward_makes_it(done.out_BHLD[:, heads]),
                lse_BHL[:, heads].contiguous(), seed, seed, 0.0, [True, True, True, False], causal, scale=block.scale,
            )  # fmt: skip
            pieces.append((0, keys, dkey, dvalue))
        return dquery_BHLD, pieces


def _kernel_mask(query_BHLD: Tensor, key_BGSD: Tensor, block: Block) -> tuple[Tensor | None, bool]:
    """The mask to pass, and torch's `is_causal`, which means what `Block.causal` does only for as many queries as keys."""
    rows, keys = query_BHLD.shape[2], key_BGSD.shape[2]
    if block.causal and rows == keys:
        return None, True
    return visible_mask(block, rows, keys, query_BHLD.device), False


def _as_forward_makes_it(out_BHLD: Tensor) -> Tensor:
    """Laid out as (B, L, H, D): the CUDA backward kernel computes the output's strides instead of reading them."""
    return out_BHLD.transpose(1, 2).contiguous().transpose(1, 2)


def _head_slices(query_BHLD: Tensor, key_BGSD: Tensor) -> list[slice]:
    """Query heads r, r + R, r + 2R, ... for r < R = H / G: as many as there are key heads, so that none is repeated."""
    repeats = query_BHLD.shape[1] // key_BGSD.shape[1]
    return [slice(first, None, repeats) for first in range(repeats)]


def _aligned(bias: Tensor | None, heads: slice, query_BHLD: Tensor, key_BGSD: Tensor) -> Tensor | None:
    """The bias of these heads, its rows padded in memory to the 8 elements that the CUDA kernel reads at a time."""
    if bias is None:
        return None
    if bias.shape[1] > 1:
        bias = bias[:, heads]
    keys = bias.shape[-1]
    bias = torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys]
    return bias.expand(query_BHLD.shape[0], key_BGSD.shape[1], query_BHLD.shape[2], keys)
