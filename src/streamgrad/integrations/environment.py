"""Options of `StreamConfig` from the environment, for frameworks that refuse settings which they do not know."""

from __future__ import annotations

import json
import os

from streamgrad.config import StreamConfig


def config_from_environment() -> StreamConfig:
    """Return the configuration that the variable STREAMGRAD holds as JSON; without it, the defaults."""
    text = os.environ.get("STREAMGRAD") or "{}"
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"STREAMGRAD={text!r} is not JSON ({error}). Write STREAMGRAD='{{\"chunk_size\": 4096}}'.") from error
    if not isinstance(options, dict):
        raise ValueError(f"STREAMGRAD={text!r} names no options. Write STREAMGRAD='{{\"chunk_size\": 4096}}'.")
    return StreamConfig.resolve(None, options)
