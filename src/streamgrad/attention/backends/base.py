"""What a streamed attention kernel must offer: one block of attention forward with its log-sum-exp, and backward from it.

    scores = query @ key^T * scale (softcapped, masked);   lse = logsumexp(scores);   out = exp(scores - lse) @ value

`backward` may be given the `out` and `lse` of a LARGER softmax that the block is a part of: the block's probabilities are
exp(scores - lse) either way, and delta = rowsum(dout * out) belongs to the whole row. So blocks of one row can be computed
by different calls and merged, as in ring attention.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), L queries, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Block:
    """How the scores of one block are made.

    Args:
        scale: factor on query @ key^T.
        causal: query i sees keys 0..i; only for L == S.
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

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> tuple[Tensor, Tensor, object]:
        """`(out_BHLD, lse_BHL, state)`; `state` is handed to `backward` (a dropout mask, or None)."""
        ...

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
        """`(dquery_BHLD, dkey_BGSD, dvalue_BGSD)`."""
        ...


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as a bias of `dtype`: 0 where visible and -inf where not, or the user's own values."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.to(dtype)
