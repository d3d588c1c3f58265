"""cuDNN's fused attention through torch (CUDA, 16-bit, dense or causal): the fastest kernel on Hopper GPUs.

torch exposes cuDNN's causal mask only for as many queries as keys. A chunk's queries over all keys so far are therefore computed
in pieces, dense ones over the keys before the chunk and a causal one over its own, merged by their log-sum-exps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamgrad.attention.backends.block import Block, merge, split_causal
from streamgrad.attention.backends.flash import needs_16_bit_cuda
from streamgrad.engine.kv_chunk import Attended, KeyGradient
from streamgrad.memory.costs import KEYS_AT_ONCE

aten = torch.ops.aten


class CudnnBackend:
    name = "cudnn"
    joins_segments = False

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        if not torch.backends.cudnn.is_available():
            return "cuDNN is not available"
        if block.varlen is not None or block.window is not None:
            return "torch exposes neither its varlen batches nor its sliding window"
        rows, keys = query_BHLD.shape[2], key_BGSD.shape[2]
        if rows == 1 or any(last - first == 1 for first, last, _ in pieces_of(block, rows, keys)):
            return "its backward does not take a single query or key"
        return needs_16_bit_cuda(query_BHLD, value_BGSD, block, largest_head=128)

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        merged: Attended | None = None
        for first, last, causal in pieces_of(block, query_BHLD.shape[2], key_BGSD.shape[2]):
            key, value = _keys(key_BGSD, first, last), _keys(value_BGSD, first, last)
            out_BHLD, lse_BHL1, *_ = aten._scaled_dot_product_cudnn_attention(
                query_BHLD, key, value, None, True, 0.0, causal, False, scale=block.scale
            )
            piece = Attended(out_BHLD, lse_BHL1.view(query_BHLD.shape[:3]))
            merged = piece if merged is None else merge(merged, piece)
        assert merged is not None
        return merged

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        seed = torch.zeros((), dtype=torch.long, device=query_BHLD.device)
        lse_BHL1 = done.lse_BHL.unsqueeze(-1).contiguous()
        dquery_BHLD: Tensor | None = None
        pieces: list[KeyGradient] = []
        for first, last, causal in pieces_of(block, query_BHLD.shape[2], key_BGSD.shape[2]):
            key, value = _keys(key_BGSD, first, last), _keys(value_BGSD, first, last)
            dquery, dkey, dvalue = aten._scaled_dot_product_cudnn_attention_backward(
                dout_BHLD, query_BHLD, key, value, done.out_BHLD, lse_BHL1, seed, seed, None, None, None, query_BHLD.shape[2],
                last - first, 0.0, causal, scale=block.scale,
            )  # fmt: skip
            # torch adds 16-bit tensors in fp32 and rounds once.
            dquery_BHLD = dquery if dquery_BHLD is None else dquery_BHLD.add_(dquery)
            pieces.append((first, last, dkey, dvalue))
        assert dquery_BHLD is not None
        return dquery_BHLD, pieces


def pieces_of(block: Block, rows: int, keys: int) -> list[tuple[int, int, bool]]:
    """Return the pieces of `split_causal`, `(first, last, causal)` each, with dense ones cut after the last whole `KEYS_AT_ONCE`.

    No two chunks of a sequence have the same number of keys before them, and cuDNN makes a plan for each number that it meets:
    4,096 for a million tokens in chunks of 256. With the cut there are 32 numbers before it and 128 after it, which chunks share.
    """
    pieces = []
    for first, last, causal in split_causal(block, rows, keys):
        cut = first if causal else first + (last - first) // KEYS_AT_ONCE * KEYS_AT_ONCE
        pieces += [(first, cut, False), (cut, last, causal)]
    return [piece for piece in pieces if piece[1] > piece[0]]


def _keys(tensor_BGSD: Tensor, first: int, last: int) -> Tensor:
    """Return the keys `[first, last)`, with strides that do not depend on how many keys there are beside them.

    torch looks cuDNN's plans up by shapes and strides, that of a batch of one row among them, and makes a new one in 40 ms.
    """
    part_BGSD = tensor_BGSD[:, :, first:last]
    return part_BGSD if part_BGSD.shape[0] > 1 else part_BGSD.squeeze(0).unsqueeze(0)
