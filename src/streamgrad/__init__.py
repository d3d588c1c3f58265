"""Exact gradients of causal language models at sequence lengths that ordinary backpropagation cannot hold."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamgrad.api import disable, enable, is_enabled
    from streamgrad.config import StreamConfig
    from streamgrad.head.cross_entropy import linear_cross_entropy
    from streamgrad.head.divergence import linear_divergence
    from streamgrad.head.token_scores import token_logprobs
    from streamgrad.head.topk import linear_topk, linear_topk_divergence
    from streamgrad.hf.estimates.estimate import estimate
    from streamgrad.hf.shared_prefixes import share_prefixes
    from streamgrad.hf.status import status
    from streamgrad.hf.updates.in_backward import optimizer_in_backward

__version__ = "0.2.0"

__all__ = [
    "StreamConfig",
    "disable",
    "enable",
    "estimate",
    "is_enabled",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_topk",
    "linear_topk_divergence",
    "optimizer_in_backward",
    "share_prefixes",
    "status",
    "token_logprobs",
]

# Imported when first used: transformers takes seconds, and some commands do not need it.
_HOMES = {
    "StreamConfig": "config",
    "disable": "api",
    "enable": "api",
    "estimate": "hf.estimates.estimate",
    "is_enabled": "api",
    "linear_cross_entropy": "head.cross_entropy",
    "linear_divergence": "head.divergence",
    "share_prefixes": "hf.shared_prefixes",
    "status": "hf.status",
    "linear_topk": "head.topk",
    "linear_topk_divergence": "head.topk",
    "optimizer_in_backward": "hf.updates.in_backward",
    "token_logprobs": "head.token_scores",
}


_PACKAGES = ("distributed", "integrations", "objectives", "parallel", "trl")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"streamgrad.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'streamgrad' has no attribute {name!r}")
    return getattr(importlib.import_module(f"streamgrad.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
