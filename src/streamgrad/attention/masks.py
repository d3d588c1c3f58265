"""Which keys a query may see, built for one chunk of queries at a time: (chunk x keys), never (T x T).

Shapes: B batch, H heads, T sequence, L queries of a chunk, S keys `[first_key, stop)` that the chunk can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# An additive mask of -1e4 or less is zero after softmax in every floating dtype.
HIDDEN_BIAS = -1e4


@dataclass(frozen=True, eq=False)
class CausalMask:
    """`visible(b, q, k) = k <= q and rule(b, 0, q, k) and padding_BT[b, k]`.

    Args:
        rule: index function over broadcast index tensors, or None for no rule beyond causality.
        padding_BT: True for real tokens, or None when all are.
        window: the rule hides every key with `k <= q - window`; lets a chunk skip those keys altogether.
        documents_BT: the rule hides keys of other documents; ids must not decrease along T.
        has_other_rule: the rule does more than `window` and `documents_BT` say.
        batch: rows of the batch that the rule is asked about; it may treat them differently.
    """

    rule: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    padding_BT: Tensor | None = None
    window: int | None = None
    documents_BT: Tensor | None = None
    has_other_rule: bool = False
    batch: int = 1

    def is_plain(self, first_key: int, stop: int) -> bool:
        """Whether causality alone decides within `[first_key, stop)`, so that no mask need be built."""
        return (
            self.padding_BT is None
            and self.documents_BT is None
            and not self.has_other_rule
            and (self.window is None or stop - first_key <= self.window)
        )

    def first_key(self, start: int) -> int:
        """The earliest key that a query at or after `start` can see."""
        first = 0 if self.window is None else max(0, start - self.window + 1)
        if self.documents_BT is not None:
            first = max(first, self._document_starts[start])
        return first

    def visible(self, start: int, stop: int, first_key: int, device: torch.device) -> Tensor:
        """Boolean (B or 1, 1, L, S); True where the key takes part."""
        query_L1 = torch.arange(start, stop, device=device)[None, None, :, None]
        key_1S = torch.arange(first_key, stop, device=device)[None, None, None, :]
        seen = key_1S <= query_L1
        if self.rule is not None:
            batch_B = torch.arange(self.batch, device=device)[:, None, None, None]
            head = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
            seen = seen & self.rule(batch_B, head, query_L1, key_1S)
        if self.padding_BT is not None:
            seen = seen & self.padding_BT[:, None, None, first_key:stop].to(device)
        return seen

    @cached_property
    def _document_starts(self) -> list[int]:
        """For each position, the start of its document; the earliest one over the batch."""
        assert self.documents_BT is not None
        position_T = torch.arange(self.documents_BT.shape[1], device=self.documents_BT.device)
        begins_BT = torch.ones_like(self.documents_BT, dtype=torch.bool)
        begins_BT[:, 1:] = self.documents_BT[:, 1:] != self.documents_BT[:, :-1]
        starts_BT = torch.where(begins_BT, position_T, 0).cummax(dim=1).values
        return starts_BT.amin(dim=0).tolist()


@dataclass(frozen=True, eq=False)
class DenseMask:
    """A user's own (B or 1, H or 1, T, T) mask: boolean, True where the key takes part, or additive."""

    values_BHTT: Tensor

    def is_plain(self, first_key: int, stop: int) -> bool:
        return False

    def first_key(self, start: int) -> int:
        return 0

    def visible(self, start: int, stop: int, first_key: int, device: torch.device) -> Tensor:
        return self.values_BHTT[:, :, start:stop, first_key:stop].to(device)

    @property
    def length(self) -> int:
        return self.values_BHTT.shape[-2]

    def first_look_ahead(self, chunk_size: int) -> tuple[int, int] | None:
        """A (query, key) with key > query that the mask lets through, or None if it is causal."""
        for start in range(0, self.length, chunk_size):
            rows_BHLT = self.values_BHTT[:, :, start : start + chunk_size]
            ahead_LT = is_visible(rows_BHLT).any(dim=(0, 1)).triu(diagonal=start + 1)
            found = ahead_LT.nonzero()
            if len(found):
                return start + int(found[0, 0]), int(found[0, 1])
        return None


def is_visible(mask: Tensor) -> Tensor:
    """A boolean or additive mask as a boolean one."""
    return mask if mask.dtype == torch.bool else mask > HIDDEN_BIAS


def rows_without_keys(attention_mask: Tensor, window: int | None) -> Tensor:
    """(B, T), True for a query from which every key is hidden by the mask, (B, T) of real tokens or (B, H, T, T).

    `window` is the narrowest sliding window of the model's layers; it acts together with a (B, T) mask.
    """
    if attention_mask.ndim == 2:
        seen_BT = attention_mask.long().cumsum(dim=1)
        if window is not None and window < seen_BT.shape[1]:
            seen_BT = seen_BT - torch.nn.functional.pad(seen_BT, (window, 0))[:, :-window]
        return seen_BT == 0
    blocks = attention_mask.split(1024, dim=2)  # not all rows at once: their visibility is a copy of the mask
    return torch.cat([~is_visible(rows_BHLT).any(dim=(1, 3)) for rows_BHLT in blocks], dim=1)
