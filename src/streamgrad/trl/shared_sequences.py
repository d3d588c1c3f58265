"""Preparation of TRL's trainers for sequences that ranks share by Accelerate's `sp_size` (DeepSpeed Ulysses).

P ranks each load a batch and then train on the P batches one after the other, every rank with its slice of each. SFT's batches
are cut by DeepSpeed's loader, DPO's inside the model's call (`sliced_rows`), as are completions (`shared_generations`).
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from trl import DPOTrainer, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from streamgrad.hf.libraries.deepspeed import ulysses_group
from streamgrad.parallel import check_launch
from streamgrad.trl.shared_generations import SharedGenerations, check_generations
from streamgrad.trl.sliced_rows import WholeBatches

# Arguments with one entry per token, which are cut together with the sequence.
_PER_TOKEN = ("input_ids", "labels", "position_ids", "attention_mask")


class SlicedCollator:
    """TRL's collator for batches that are cut into P slices: a multiple of P tokens, and only arguments with one entry per token.

    What is left out (such as `cu_seq_lens_q` of padding-free batches) also follows from `position_ids` that restart.
    """

    def __init__(self, stock: DataCollatorForLanguageModeling, ranks: int) -> None:
        self.stock = stock
        stock.pad_to_multiple_of = math.lcm(stock.pad_to_multiple_of or 1, ranks)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self.stock(rows)
        return {name: batch[name] for name in _PER_TOKEN if name in batch}


class WholeEpochs(TrainerCallback):
    """A callback that lets every epoch begin with its first batch.

    DeepSpeed's loader notices the end of an epoch only when asked for one more batch. The Trainer counts batches, so it asks in
    the next epoch, and skips the step that it asked for: in epochs of N batches it would train about S N / (N + 1) of S steps.
    """

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        if not loader.micro_batches:
            with suppress(StopIteration):  # the end of the epoch, at which the loader starts anew
                loader.refill()


def shares_sequences(trainer: Any) -> bool:
    """Return whether the trainer was launched with `sp_size` > 1."""
    parallelism = trainer.accelerator.parallelism_config
    return parallelism is not None and parallelism.sp_enabled


def check_averages(accelerator: Any) -> None:
    """Raise if DeepSpeed would add up the gradients of the ranks that share rows, and not average them.

    Each of these ranks computes the loss of whole rows. DeepSpeed multiplies by their number in all of its reductions but the
    one by which ZeRO-3 scatters gradients.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin is None:
        return
    config = plugin.deepspeed_config.get("zero_optimization", {})
    stage, scatters = config.get("stage", 0), config.get("reduce_scatter", True)
    if stage != 3 or not scatters:
        ranks = accelerator.parallelism_config.sp_size
        raise ValueError(
            f"ZeRO stage {stage} with reduce_scatter={scatters} adds up the gradients of the sp_size={ranks} ranks that share "
            f"rows, and each has that of the whole loss: gradients would be {ranks} times as large. Set zero_stage: 3, and "
            "leave reduce_scatter on."
        )


def prepare_shared_sequences(trainer: Any) -> None:
    """Prepare `trainer` for `sp_size` > 1 if it was launched with that; raise if it cannot be.

    Raise also where Accelerate has left out the engine that the launcher was asked for.
    """
    check_launch(trainer.accelerator)
    if not shares_sequences(trainer):
        return
    ranks = trainer.accelerator.parallelism_config.sp_size
    if isinstance(trainer, DPOTrainer | SharedGenerations):
        check_averages(trainer.accelerator)
    if isinstance(trainer, SharedGenerations):
        check_generations(trainer.args, ranks)
        trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: loader  # of prompts, which are not cut
        return
    if isinstance(trainer, DPOTrainer):
        # In the place of DeepSpeed's loader, which cuts batches: TRL would add up the tokens of a slice, not of an answer.
        trainer.accelerator.deepspeed_ulysses_dl_adapter = lambda loader, model: WholeBatches(loader, ulysses_group())
        trainer._tp_size *= ranks  # as many ranks are given one batch, and TRL counts its tokens on each
        return
    if not isinstance(trainer, SFTTrainer):
        raise ValueError(
            f"sp_size={ranks} lets ranks share sequences, for which batches are cut in SFT, DPO, GRPO and RLOO only, and this "
            f"is a {type(trainer).__name__}. Launch it with another configuration, such as that of ZeRO-3, or write your own "
            "loop: streamgrad.parallel.whole_sequence gives the scores of whole sequences, from which any loss is computed."
        )
    if isinstance(trainer.data_collator, DataCollatorForLanguageModeling):
        trainer.data_collator = SlicedCollator(trainer.data_collator, ranks)
    trainer.add_callback(WholeEpochs())
