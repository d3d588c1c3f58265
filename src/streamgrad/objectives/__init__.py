"""Losses as functions of token log-probabilities, such as `streamgrad.token_logprobs` gives; no trainer is needed.

Names, options and defaults are those of TRL's trainers, which the tests hold them to.
"""

from streamgrad.objectives.dpo import dpo_loss
from streamgrad.objectives.grpo import grpo_loss
from streamgrad.objectives.sft import sft_loss

__all__ = ["dpo_loss", "grpo_loss", "sft_loss"]
