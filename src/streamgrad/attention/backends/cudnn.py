"""cuDNN's fused attention through torch (CUDA, 16-bit, no mask): the fastest kernel on Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.attention.backends.base import Block
from streamgrad.attention.backends.flash import _needs_plain_16_bit_cuda

aten = torch.ops.aten


class CudnnBackend:
    name = "cudnn"

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        if not torch.backends.cudnn.is_available():
            return "cuDNN is not available"
        if query_BHLD.shape[2] == 1 or key_BGSD.shape[2] == 1:
            return "its backward does not take a single query or key"
        return _needs_plain_16_bit_cuda(query_BHLD, value_BGSD, block, largest_head=128)

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> tuple[Tensor, Tensor, None]:
        out_BHLD, lse_BHL1, *_ = aten._scaled_dot_product_cudnn_attention(
            query_BHLD, key_BGSD, value_BGSD, None, True, 0.0, block.causal, False, scale=block.scale
        )
        return out_BHLD, lse_BHL1.view(query_BHLD.shape[:3]), None

    def backward(
        self,
        dout_BHLD: Tensor,
        query_BHLD: Tensor,
        key_BGSD: Tensor,
        value_BGSD: Tensor,
        out_BHLD: Tensor,
        lse_BHL: Tensor,
        block: Block,
        state: object,
    ) -> tuple[Tensor, Tensor, Tensor]:
        seed = torch.zeros((), dtype=torch.long, device=query_BHLD.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout_BHLD, query_BHLD, key_BGSD, value_BGSD, out_BHLD, lse_BHL.unsqueeze(-1).contiguous(), seed, seed,
            None, None, None, query_BHLD.shape[2], key_BGSD.shape[2], 0.0, block.causal, scale=block.scale,
        )  # fmt: skip
