"""A reward that raises on the second rank."""

from __future__ import annotations

import os


def reward(completions: list[str], **_) -> list[float]:
    if os.environ["RANK"] == "1":
        raise ValueError("no reward for you")
    return [0.0 for _ in completions]
