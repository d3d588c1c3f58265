"""torch's built-in FlashAttention-2 kernel (CUDA, 16-bit, no mask): dense blocks and causal ones of any shape."""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.attention.backends.base import Block
from streamgrad.core.chunk import Attended, KeyGradient

aten = torch.ops.aten


class FlashBackend:
    name = "flash"

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        return needs_plain_16_bit_cuda(query_BHLD, value_BGSD, block, largest_head=256)

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query_BHLD, key_BGSD, value_BGSD))
        # Below scaled_dot_product_attention, is_causal is aligned as `Block.causal` is: at the last query and the last key.
        out_BLHD, lse_BHL, *_ = aten._flash_attention_forward(
            query, key, value, None, None, query.shape[1], key.shape[1], 0.0, block.causal, False, scale=block.scale
        )
        return Attended(out_BLHD.transpose(1, 2), lse_BHL)

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        tensors = dout_BHLD, query_BHLD, key_BGSD, value_BGSD, done.out_BHLD
        dout, query, key, value, out = (tensor.transpose(1, 2) for tensor in tensors)
        seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
        dquery, dkey, dvalue = aten._flash_attention_backward(
            dout, query, key, value, out, done.lse_BHL, None, None, query.shape[1], key.shape[1], 0.0, block.causal,
            seed, seed[:0], scale=block.scale,
        )  # fmt: skip
        return dquery.transpose(1, 2), [(0, key.shape[1], dkey.transpose(1, 2), dvalue.transpose(1, 2))]


def needs_plain_16_bit_cuda(query_BHLD: Tensor, value_BGSD: Tensor, block: Block, largest_head: int) -> str | None:
    """Why a kernel for plain causal or dense 16-bit attention on an NVIDIA GPU cannot compute the block."""
    size = query_BHLD.shape[-1]
    if query_BHLD.device.type != "cuda" or torch.version.hip is not None:
        return f"it needs an NVIDIA GPU, not device {query_BHLD.device.type!r}"
    if query_BHLD.dtype not in (torch.bfloat16, torch.float16):
        return f"it needs bfloat16 or float16, not {query_BHLD.dtype}"
    if block.mask is not None:
        return "it takes no mask (padding, packing, a narrow window or a 4-D mask)"
    if block.softcap is not None or block.dropout > 0.0:
        return "it has no softcap and no dropout here"
    if size != value_BGSD.shape[-1] or size % 8 or size > largest_head:
        return f"it needs one head size, a multiple of 8 up to {largest_head}, for keys and values"
    return None
