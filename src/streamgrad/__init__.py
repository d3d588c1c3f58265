"""Exact gradients of causal language models at sequence lengths that ordinary backpropagation cannot hold."""

from streamgrad.api import disable, enable, is_enabled
from streamgrad.config import StreamConfig
from streamgrad.head.cross_entropy import linear_cross_entropy
from streamgrad.head.logprobs import token_logprobs
from streamgrad.plan.estimate import estimate

__version__ = "0.1.0"

__all__ = ["StreamConfig", "disable", "enable", "estimate", "is_enabled", "linear_cross_entropy", "token_logprobs"]
