"""The paper's own figures, from `paper.json`."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any


def read_paper() -> dict[str, Any]:
    """Under the names of its tables."""
    return json.loads(resources.files("streamgrad.bench").joinpath("paper.json").read_text())
