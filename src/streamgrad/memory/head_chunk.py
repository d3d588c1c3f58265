"""How many tokens' logits exist at a time: the arithmetic, for the head and for a plan of it."""

from __future__ import annotations

import math

# The budget for logits is one part in so many of what is free on a GPU: something else needs the rest.
FREE_SHARE = 8
SHORTEST_CHUNK, LONGEST_CHUNK, CHUNK_MULTIPLE = 256, 4096, 128


def head_chunk_within(budget_bytes: int, tokens: int, vocabulary: int, itemsize: int) -> int:
    """Tokens a chunk, for `vocabulary * itemsize` bytes of logits a token: as many as the budget holds, chunks of equal length.

    Whatever the budget is, chunks have 256 tokens at least, or the GEMMs would wait for the weight to be read, and 4096 at most,
    beyond which they gain nothing.
    """
    longest = min(max(budget_bytes // (vocabulary * itemsize), SHORTEST_CHUNK), LONGEST_CHUNK)
    longest -= longest % CHUNK_MULTIPLE
    equal = math.ceil(tokens / math.ceil(tokens / longest)) if tokens else 1
    return max(SHORTEST_CHUNK, math.ceil(equal / CHUNK_MULTIPLE) * CHUNK_MULTIPLE)
