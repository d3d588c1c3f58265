"""What a streamed attention kernel must offer: a block of attention forward with its log-sum-exp, and backward from it.

    scores = query @ key^T * scale (softcapped, masked);   lse = logsumexp(scores);   out = exp(scores - lse) @ value

`backward` may be given the `out` and `lse` of a LARGER softmax that the block is a part of: the block's probabilities are
exp(scores - lse) either way, and delta = rowsum(dout * out) belongs to the whole row. So a softmax may have a part outside of the
block (a sink), and a kernel may compute a block in pieces and merge them, as ring attention does.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), L queries, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamgrad.core.chunk import Attended, KeyGradient


@dataclass(frozen=True)
class Block:
    """How the scores of one block are made.

    Args:
        scale: factor on query @ key^T.
        causal: the queries are the last L of the S tokens: query i sees keys 0 .. S - L + i. (Not what torch's `is_causal`
            means when L != S: that one hides all keys after i.)
        mask: (B or 1, H or 1, L, S), boolean (True: visible) or additive; None: everything is visible.
        softcap: scores become softcap * tanh(scores / softcap).
        dropout: probability with which a weight is dropped after softmax.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0


class Backend(Protocol):
    name: str

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        """Why this kernel cannot compute the block, or None if it can."""
        ...

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        """The block's output and log-sum-exp."""
        ...

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        """`dquery_BHLD`, and the gradients of keys and values in one or more pieces that are to be added up."""
        ...


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as a bias of `dtype`: 0 where visible and -inf where not, or the user's own values."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.to(dtype)


def visible_mask(block: Block, rows: int, keys: int, device: torch.device) -> Tensor | None:
    """The block's mask with causality written into it, for kernels that have no causal mask of this alignment."""
    if not block.causal:
        return block.mask
    assert block.mask is None
    return torch.ones(rows, keys, dtype=torch.bool, device=device).tril_(diagonal=keys - rows)[None, None]


def split_causal(block: Block, rows: int, keys: int) -> list[tuple[int, int, bool]]:
    """A block without a mask as pieces of it for kernels that are causal only for as many queries as keys.

    Keys `[first, last)` of each piece, and whether it is causal: the keys before the queries' own, and those.
    """
    if not block.causal or rows == keys:
        return [(0, keys, block.causal)]
    return [(0, keys - rows, False), (keys - rows, keys, True)]


def merge(a: Attended, b: Attended) -> Attended:
    """Attention over the union of two sets of keys from attention over each: weights exp(lse_i - lse)."""
    lse_BHL = torch.logaddexp(a.lse_BHL, b.lse_BHL)
    share_a, share_b = ((part.lse_BHL - lse_BHL).exp().unsqueeze(-1) for part in (a, b))
    return Attended((a.out_BHLD * share_a + b.out_BHLD * share_b).to(a.out_BHLD.dtype), lse_BHL)
