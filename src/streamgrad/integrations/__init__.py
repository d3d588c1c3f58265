"""Plugs into training frameworks: `StreamgradCallback`, for `transformers.Trainer` and every trainer built on it."""

from streamgrad.integrations.callback import StreamgradCallback

__all__ = ["StreamgradCallback"]
