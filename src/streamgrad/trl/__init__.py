"""TRL's trainers with streamed models. They need trl: `pip install "streamgrad[trl]"`."""

import trl
from trl.trainer import dpo_trainer, grpo_trainer, kto_trainer, rloo_trainer, sft_trainer

from streamgrad.versions import needed

# Before anything else is imported from trl, so that another version is named as the cause.
if not all(
    hasattr(module, "add_fused_lm_head") for module in (dpo_trainer, grpo_trainer, kto_trainer, rloo_trainer, sft_trainer)
):
    raise ImportError(
        f"streamgrad's trainers build on add_fused_lm_head, which the trainers of trl {trl.__version__} do not have: "
        f"{needed('trl')}",
        name="trl",
    )

from streamgrad.trl.trainers import (
    StreamDistillationTrainer,
    StreamDPOTrainer,
    StreamGRPOTrainer,
    StreamKTOTrainer,
    StreamRewardTrainer,
    StreamRLOOTrainer,
    StreamSFTTrainer,
)

__all__ = [
    "StreamDPOTrainer",
    "StreamDistillationTrainer",
    "StreamGRPOTrainer",
    "StreamKTOTrainer",
    "StreamRLOOTrainer",
    "StreamRewardTrainer",
    "StreamSFTTrainer",
]
