"""Describes steps that may run plain (`whole.plain_pass`), and the memory they need when every layer keeps its graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from streamgrad.memory.planner import Plan

# Share of a plain graph that a compiled one may take in addition, and bytes of a number in a mask of (T x T), at most.
_SAVED_BY_COMPILERS, _SCORE_BYTES = 0.25, 8


@dataclass(frozen=True)
class WholeStep:
    """A step that may run plain, all its layers keeping their whole graph. Steps of one `manner` differ in their tokens only."""

    manner: Hashable
    rows: int
    sequence: int
    device: torch.device
    masked: bool  # whether attention may be given a mask of (T x T)
    compiled: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


@dataclass(frozen=True)
class WholePlan:
    """A plan by which all graphs are kept, for so many tokens, and the bytes it needs beyond those that were there before."""

    tokens: int
    plan: Plan
    more_bytes: float
    attention_bytes: float  # of the attention output of all layers, a token
    longest: float  # tokens of a row, beyond which layers are faster in chunks

    def more_bytes_for(self, step: WholeStep) -> float:
        """Return the bytes of a step of at most as many tokens."""
        # A compiler chooses what to save by itself: 7% more than a graph of fused parts on Qwen3-4B.
        more = self.more_bytes * (1.0 + (_SAVED_BY_COMPILERS if step.compiled else 0.0))
        if step.masked:  # keys and values are repeated for all query heads, and each layer saves the mask as numbers
            layers = len(self.plan.policies)
            more += 2 * self.attention_bytes * step.tokens + _SCORE_BYTES * layers * step.tokens * step.sequence
        return more
