"""Batches whose rows begin alike, as `share_prefixes` takes them."""

from __future__ import annotations

import torch

from streamgrad.hf.shared_prefixes import SHORTEST
from tiny import tokens


def batch_of(rows: list[list[int]], prompts: list[int], *, side: str = "right") -> dict:
    """Rows of tokens, of which the first `prompts` are no targets. With `side="both"`, prompts are padded at the left."""
    widest = max(prompts)
    length = (
        max(map(len, rows))
        if side != "both"
        else widest + max(len(row) - prompt for row, prompt in zip(rows, prompts, strict=True))
    )
    batch = {
        name: torch.zeros(len(rows), length, dtype=torch.long) for name in ("input_ids", "attention_mask", "completion_mask")
    }
    for index, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        start = {"left": length - len(row), "right": 0, "both": widest - prompt}[side]
        batch["input_ids"][index, start : start + len(row)] = torch.tensor(row)
        batch["attention_mask"][index, start : start + len(row)] = 1
        batch["completion_mask"][index, start + prompt : start + len(row)] = 1
    return batch


def group(prompt: int, completions: list[int], *, seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """A prompt, and completions of these lengths."""
    drawn = tokens(1, prompt + sum(completions), seed=seed)[0].tolist()
    start, rest = drawn[:prompt], iter(drawn[prompt:])
    return [start + [next(rest) for _ in range(length)] for length in completions], [prompt] * len(completions)


def tree_of_turns() -> tuple[list[list[int]], list[int]]:
    """Rollouts of one history of 23 tokens; three of them share 17 more, of which the first has no others."""
    drawn = tokens(1, 80, seed=5)[0].tolist()
    history, turn = drawn[:23], drawn[23:40]
    rows = [history + turn, history + turn + drawn[40:45], history + turn + drawn[45:48], history + drawn[50:59], drawn[60:70]]
    return rows, [6, 6, 6, 6, 1]


BATCHES = {
    "four completions": batch_of(*group(9, [5, 1, 0, 8])),
    "nine completions": batch_of(*group(5, [3, 2, 7, 1, 1, 4, 6, 2, 5])),
    "one row": batch_of(*group(6, [7])),
    "prompts of one token": batch_of(*group(1, [4, 6, 3])),
    "identical completions": batch_of(*[part * 3 for part in group(4, [SHORTEST + 3])]),
    "identical short completions": batch_of(*[part * 3 for part in group(4, [5])]),
    "two groups": batch_of(*[a + b for a, b in zip(group(8, [4, 3]), group(6, [5, 2], seed=3), strict=True)]),
    "prompts padded at the left": batch_of(
        *[a + b for a, b in zip(group(8, [4, 3]), group(6, [5, 2], seed=3), strict=True)], side="both"
    ),
    "nothing in common": batch_of(*[a + b for a, b in zip(group(8, [4]), group(6, [5], seed=3), strict=True)]),
    "turns": batch_of(*tree_of_turns()),
}
