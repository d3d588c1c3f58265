"""Reads the paper's own figures from `paper.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_paper() -> dict[str, Any]:
    """Return the figures, under the names of their tables."""
    return json.loads(Path(__file__).with_name("paper.json").read_text())
