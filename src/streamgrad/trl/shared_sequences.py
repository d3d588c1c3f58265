"""SFT on sequences that ranks share: what Accelerate's `sp_size` (DeepSpeed Ulysses) needs of TRL's data, and of its epochs.

P ranks each load a batch and then train on the P batches one after the other, every rank with its slice of each.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from torch import Tensor
from transformers import TrainerCallback
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

# One entry a token, so that a slice of the sequence has a slice of it.
_PER_TOKEN = ("input_ids", "labels", "position_ids", "attention_mask")


class SlicedCollator:
    """TRL's collator for batches that are cut into P slices: a multiple of P tokens, and nothing that counts whole sequences.

    What is left out (`cu_seq_lens_q` and the like, of padding-free batches) says what `position_ids` that restart say too.
    """

    def __init__(self, stock: DataCollatorForLanguageModeling, ranks: int) -> None:
        self.stock = stock
        stock.pad_to_multiple_of = math.lcm(stock.pad_to_multiple_of or 1, ranks)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = self.stock(rows)
        return {name: batch[name] for name in _PER_TOKEN if name in batch}


class WholeEpochs(TrainerCallback):
    """Lets an epoch begin with its first batch.

    DeepSpeed's loader finds out that an epoch is over when it is asked for one batch more. The Trainer counts, so it asks in the
    next epoch, and leaves out the step that it asked for: of S steps in epochs of N batches, about S N / (N + 1) are trained.
    """

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        loader = kwargs["train_dataloader"]
        if not loader.micro_batches:
            with suppress(StopIteration):  # the end, at which the loader starts anew
                loader.refill()


def prepare_shared_sequences(trainer: Any) -> None:
    """Make `trainer` ready for `sp_size` > 1 where its engine was launched with that; raise where its loss cannot be shared."""
    parallelism = trainer.accelerator.parallelism_config
    if parallelism is None or not parallelism.sp_enabled:
        return
    if not isinstance(trainer, SFTTrainer):
        raise ValueError(
            f"sp_size={parallelism.sp_size} lets ranks share sequences, which TRL supports in SFT alone, and this is a "
            f"{type(trainer).__name__}. Launch it with another configuration, such as that of ZeRO-3."
        )
    if isinstance(trainer.data_collator, DataCollatorForLanguageModeling):
        trainer.data_collator = SlicedCollator(trainer.data_collator, parallelism.sp_size)
    trainer.add_callback(WholeEpochs())
