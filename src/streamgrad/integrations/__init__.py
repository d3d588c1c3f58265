"""Plugs into training frameworks: `StreamgradCallback` for every trainer of transformers' kind, and one module a framework.

A framework's module imports it, and so is imported only by that framework: `streamgrad.integrations.swift`.
"""

from streamgrad.integrations.callback import StreamgradCallback

__all__ = ["StreamgradCallback"]
