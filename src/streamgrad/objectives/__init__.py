"""Losses as functions of token log-probabilities, such as `streamgrad.token_logprobs` returns; no trainer is needed.

Names, options and defaults are those of TRL's trainers, against which the losses are tested.
"""

from streamgrad.objectives.dpo import dpo_loss
from streamgrad.objectives.grpo import grpo_loss
from streamgrad.objectives.sft import sft_loss

__all__ = ["dpo_loss", "grpo_loss", "sft_loss"]
