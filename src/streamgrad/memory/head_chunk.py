"""Returns how many tokens the head processes at a time, for the head and for the plan of a step."""

from __future__ import annotations

import math

# Logits get one part in so many of what is free on a GPU; the rest is for everything else.
FREE_SHARE = 8
SHORTEST_CHUNK, LONGEST_CHUNK, CHUNK_MULTIPLE = 256, 4096, 128


def head_chunk_within(budget_bytes: int, tokens: int, vocabulary: int, itemsize: int) -> int:
    """Return the tokens a chunk, of `vocabulary * itemsize` bytes of logits each: as many as fit, in chunks of equal length.

    Whatever the budget, a chunk has at least 256 tokens, below which GEMMs wait for the weight to be read, and at most 4096,
    beyond which they gain nothing.
    """
    longest = min(max(budget_bytes // (vocabulary * itemsize), SHORTEST_CHUNK), LONGEST_CHUNK)
    longest -= longest % CHUNK_MULTIPLE
    equal = math.ceil(tokens / math.ceil(tokens / longest)) if tokens else 1
    return max(SHORTEST_CHUNK, math.ceil(equal / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
