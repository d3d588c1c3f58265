"""TRL's trainers with streamed models: the same constructor, losses, metrics and checkpoints, plus `stream=StreamConfig(...)`.

A trainer runs TRL's own code, but for one function, which lets a model score tokens (`scoring.py`). The constructor calls it for
the policy and for the reference, wherever they come from.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from trl import DPOTrainer, GRPOTrainer, SFTTrainer

from streamgrad.config import StreamConfig
from streamgrad.hf.discover import unwrap
from streamgrad.trl.scoring import streamed_head_in
from streamgrad.trl.shared_sequences import prepare_shared_sequences


class _Streamed:
    """The constructor that the trainers share; `stock` is TRL's trainer, which follows in the method resolution order."""

    stock: Any

    def __init__(self, *args: Any, stream: StreamConfig | None = None, **kwargs: Any) -> None:
        arguments = inspect.signature(self.stock.__init__).bind_partial(self, *args, **kwargs).arguments.get("args")
        if getattr(arguments, "activation_offloading", False):
            raise ValueError(
                "activation_offloading=True moves every tensor that autograd keeps to the host, even those that a streamed layer "
                "makes and drops within its own backward. Set it to False. To offload what layers keep, pass "
                'stream=StreamConfig(offload="host"), or --offload host.'
            )
        with streamed_head_in(self.stock, stream):
            super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.aux_loss_enabled:
            raise ValueError(
                f"router_aux_loss_coef={trainer.router_aux_loss_coef} asks for the load-balancing loss of a mixture of experts, "
                "which needs the router logits of all tokens at once and cannot be streamed. Pass router_aux_loss_coef=0.0 in "
                "the trainer's arguments to train without it."
            )
        prepare_shared_sequences(trainer)


class StreamSFTTrainer(_Streamed, SFTTrainer):
    """[`trl.SFTTrainer`] with a streamed model.

    ```diff
    - trainer = SFTTrainer(model="Qwen/Qwen3-8B", args=args, train_dataset=dataset)
    + trainer = StreamSFTTrainer(model="Qwen/Qwen3-8B", args=args, train_dataset=dataset)
    ```

    Args:
        *args, **kwargs: as for [`trl.SFTTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.

    `label_smoothing_factor`, for which TRL makes full logits in a second forward pass, is streamed as well. Your own
    `compute_loss_func` or `compute_metrics` gets full logits, as TRL warns.
    """

    stock = SFTTrainer

    def __init__(self, *args: Any, stream: StreamConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, stream=stream, **kwargs)
        trainer: Any = self
        smoother = trainer.label_smoother
        if smoother is not None and trainer.compute_loss_func is None and self.args.loss_type == "nll":
            # The smoothed loss is a sum over tokens like the plain one, so the head can compute it. TRL's ordinary path, which
            # sums `log_probs`, then gives what its LabelSmoother would compute from full logits.
            forward = unwrap(self.model).forward
            forward.scoring = replace(forward.scoring, label_smoothing=smoother.epsilon)
            trainer.label_smoother = None


class StreamDPOTrainer(_Streamed, DPOTrainer):
    """[`trl.DPOTrainer`] with a streamed policy and reference.

    The reference may be a model of its own, the policy without its adapters, or log-probabilities computed beforehand.

    Args:
        *args, **kwargs: as for [`trl.DPOTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
    """

    stock = DPOTrainer


class StreamGRPOTrainer(_Streamed, GRPOTrainer):
    """[`trl.GRPOTrainer`] with a streamed policy and reference. Completions are generated as usual, with a key/value cache.

    Args:
        *args, **kwargs: as for [`trl.GRPOTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
    """

    stock = GRPOTrainer
