"""One block of attention, and the interface of its kernels: forward with a log-sum-exp, and backward from it.

    scores = query @ key^T * scale (softcapped, masked);   lse = logsumexp(scores);   out = exp(scores - lse) @ value

`backward` may be given the `out` and `lse` of a LARGER softmax that contains the block: the block's probabilities are
exp(scores - lse) either way, and delta = rowsum(dout * out) belongs to the whole row. So a softmax may extend beyond the block
(a sink), and a kernel may compute a block in pieces and merge them, as ring attention does.

Shapes: B batch, H query heads, G key/value heads (H a multiple of G), L queries, S keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from streamgrad.attention.varlen import Segment, VarlenMask
from streamgrad.engine.kv_chunk import Attended, KeyGradient
from streamgrad.ops.triton_support import kernels_for


@dataclass(frozen=True)
class Block:
    """How the scores of one block are computed; `causal` (and `window`), `varlen` or `mask` says which keys a query sees.

    Args:
        scale: factor on query @ key^T.
        causal: the queries are the last L of the S tokens: query i sees keys 0 .. S - L + i. (torch's `is_causal` differs when
            L != S: it hides all keys after i.)
        window: in a causal block or segment, a query sees only the last `window` of these keys.
        varlen: which queries of which row see which keys; a query in no segment sees none.
        mask: (B or 1, H or 1, L, S), boolean (True: visible) or additive; None: everything is visible.
        softcap: scores become softcap * tanh(scores / softcap).
        dropout: probability with which a weight is dropped after softmax.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    varlen: VarlenMask | None = None
    mask: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        assert sum((self.causal, self.varlen is not None, self.mask is not None)) <= 1
        assert self.window is None or self.causal or self.varlen is not None

    @cached_property
    def traits(self) -> tuple[bool, ...]:
        """Return all that decides, beside shapes, which kernels can compute the block."""
        optional = self.window, self.varlen, self.mask, self.softcap
        has_ancestors = self.varlen is not None and self.varlen.has_ancestors
        return self.causal, self.dropout > 0.0, has_ancestors, *(part is not None for part in optional)

    @property
    def is_plain(self) -> bool:
        """Return whether nothing but causality hides or drops keys, so that the block may be computed in parts of its keys."""
        return self.mask is None and self.varlen is None and self.window is None and self.dropout == 0.0

    @property
    def kind(self) -> str:
        """Short name for logs: "causal", "segments with a window", "mask and softcap", ..."""
        name = "causal" if self.causal else "dense"
        name = "segments" if self.varlen is not None else "mask" if self.mask is not None else name
        name += "" if self.window is None else " with a window"
        return name + ("" if self.softcap is None else " and softcap") + (" and dropout" if self.dropout > 0.0 else "")

    def of_segment(self, segment: Segment) -> Block:
        """Return the block of one segment alone."""
        return replace(self, varlen=None, causal=segment.causal, window=self.window if segment.causal else None)


class Backend(Protocol):
    """A kernel; `joins_segments` says whether it computes all segments of a kind in one call."""

    name: str
    joins_segments: bool

    def refusal(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> str | None:
        """Return why this kernel cannot compute the block, or None if it can."""
        ...

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Attended:
        """Return the block's output and log-sum-exp."""
        ...

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Block
    ) -> tuple[Tensor, list[KeyGradient]]:
        """Return `dquery_BHLD`, and the gradients of keys and values in one or more pieces to be added up."""
        ...


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask as a bias of `dtype`: 0 where visible and -inf where hidden, or the user's own values."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return mask.to(dtype)


def visible_mask(block: Block, rows: int, keys: int, device: torch.device) -> Tensor | None:
    """Return the block's mask, for kernels that take nothing else; None if every query sees every key."""
    if block.varlen is not None:
        return block.varlen.visible(keys, block.window, device)
    if not block.causal:
        return block.mask
    seen_LS = torch.ones(rows, keys, dtype=torch.bool, device=device).tril_(diagonal=keys - rows)
    if block.window is not None:
        seen_LS.triu_(diagonal=keys - rows - block.window + 1)
    return seen_LS[None, None]


def split_causal(block: Block, rows: int, keys: int) -> list[tuple[int, int, bool]]:
    """Split a block without mask, segments or window, for kernels that are causal only for as many queries as keys.

    Returns `(first, last, causal)` of each piece: a dense one over the keys before the queries' own, a causal one over those.
    """
    if not block.causal or rows == keys:
        return [(0, keys, block.causal)]
    return [(0, keys - rows, False), (keys - rows, keys, True)]


def merge(a: Attended, b: Attended) -> Attended:
    """Merge attention over two sets of keys into attention over their union: weights exp(lse_i - lse).

    Every row must see a key in at least one set. `a` may be overwritten.
    """
    kernels = kernels_for(a.out_BHLD, "streamgrad.attention.merge_kernel") if a.out_BHLD.dtype.itemsize == 2 else None
    if kernels is not None:
        kernels.merge_(a.out_BHLD, a.lse_BHL, b.out_BHLD, b.lse_BHL)
        return a
    lse_BHL = torch.logaddexp(a.lse_BHL, b.lse_BHL)
    share_a, share_b = ((part.lse_BHL - lse_BHL).exp().unsqueeze(-1) for part in (a, b))
    return Attended((a.out_BHLD * share_a + b.out_BHLD * share_b).to(a.out_BHLD.dtype), lse_BHL)
