"""TRL's trainers with streamed models: the same constructor, losses, metrics and checkpoints, plus `stream=StreamConfig(...)`.

A trainer runs TRL's own code, but for one function, which lets a model score tokens (`scoring.py`). The constructor calls it for
the policy and for the reference, wherever they come from. A reward model scores no tokens, and distillation has a head of TRL's
that holds tiles of logits: their models are only enabled.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from trl import DistillationTrainer, DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from streamgrad.config import StreamConfig
from streamgrad.engine.temporary import temporary_attribute, temporary_attributes
from streamgrad.hf.discover import unwrap
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.status import note_optimizer, peak_bytes_so_far, show_messages
from streamgrad.hf.updates.in_backward import end_updates_by_others, optimizer_in_backward
from streamgrad.parallel import failures_told
from streamgrad.parallel.launch import check_engine
from streamgrad.parallel.zero3 import enable_for_trainer
from streamgrad.trl.checkpoints import begin_checkpoint, checkpoint_at, named_if_it_fails, refuse_other_states
from streamgrad.trl.optimizer_place import check_optimizer_place, is_of_bitsandbytes, on_host
from streamgrad.trl.restoring import restored_on_error
from streamgrad.trl.scoring import makes_plain_logits, scores_tokens, streamed_head_in
from streamgrad.trl.shared_generations import SharedGenerations
from streamgrad.trl.shared_sequences import prepare_shared_sequences, shares_sequences
from streamgrad.trl.sliced_rows import rows_cut_inside


class _Streamed:
    """The constructor that the trainers share; `stock` is TRL's trainer, which follows in the method resolution order.

    With `optimizer_in_backward=True` the trainer's optimizer updates each parameter in backward, and clips by `max_grad_norm`
    and the norm of the step before. With `optimizer_on_host=True` gradients leave for the host in backward, where torchao's
    `CPUOffloadOptimizer` keeps the optimizer's states and updates parameters.
    """

    stock: Any
    share_prompts = False
    model: Any
    args: Any
    state: Any

    def __init__(
        self,
        *args: Any,
        stream: StreamConfig | None = None,
        optimizer_in_backward: bool = False,
        optimizer_on_host: bool = False,
        **kwargs: Any,
    ) -> None:
        self.optimizer_in_backward, self.optimizer_on_host = optimizer_in_backward, optimizer_on_host
        given = inspect.signature(self.stock.__init__).bind_partial(self, *args, **kwargs).arguments
        check_optimizer_place(given.get("args"), in_backward=optimizer_in_backward, on_host=optimizer_on_host)
        check_engine(given.get("args"))
        if getattr(given.get("args"), "activation_offloading", False):
            raise ValueError(
                "activation_offloading=True moves every tensor that autograd keeps to the host, even those that a streamed layer "
                "makes and drops within its own backward. Set it to False. To offload what layers keep, pass "
                'stream=StreamConfig(offload="host"), or --offload host.'
            )
        with restored_on_error(_changed(given)), self._streaming(stream, given):
            super().__init__(*args, **kwargs)
            prepare_shared_sequences(self)
        self._scores_tokens = scores_tokens(unwrap(self.model))
        if self.args.process_index == 0:
            show_messages()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as TRL does; beside a training loss and at the end, add the most memory that this process has had so far."""
        if {"loss", "train_runtime"} & logs.keys():
            logs = logs | {"peak_memory_gib": round(peak_bytes_so_far(self.args.device) / 2**30, 3)}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does. Where another rank fails, rank 0 says why as well."""
        if self._scores_tokens and not scores_tokens(unwrap(self.model)):
            raise ValueError(
                f"{type(unwrap(self.model)).__name__} was disabled, or enabled anew, after this {type(self).__name__} was made, "
                f"and scores no tokens any more. Make the trainer again, or a {self.stock.__name__} to train without streaming."
            )
        with failures_told():
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def _streaming(self, stream: StreamConfig | None, given: dict[str, Any]) -> AbstractContextManager[None]:
        """Return a block in which TRL's constructor makes or takes models that are then streamed; `given` are its arguments."""
        return streamed_head_in(self.stock, stream, share_prompts=self.share_prompts)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Create the trainer's own optimizer with its groups, as one in backward or on the host where that was asked for."""
        trainer: Any = self
        end_updates_by_others(trainer.model.parameters(), trainer.optimizer)
        if trainer.optimizer is None and (self.optimizer_in_backward or self.optimizer_on_host):
            kind, options = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
            limit = self.args.max_grad_norm or None
            make = on_host if self.optimizer_on_host else functools.partial(optimizer_in_backward, max_grad_norm=limit)
            trainer.optimizer_cls_and_kwargs = (_made_by(make, kind), options)
        made = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        note_optimizer(self.model, made)
        return made

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            trainer: Any = self
            refuse_other_states(checkpoint, by_bitsandbytes=is_of_bitsandbytes(trainer.optimizer))
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        output, processes = self.args.output_dir, self.args.world_size
        path = checkpoint_at(output, self.state.global_step)
        with named_if_it_fails(path, output, processes):
            if self.args.should_save:
                begin_checkpoint(path)
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]


def _made_by(make: Callable[..., Any], kind: Any) -> type:
    """Return a class that makes an optimizer out of `kind`. A Trainer takes what is not a class for a factory."""

    def made(cls: type, params: Any, **options: Any) -> Any:
        return make(params, kind, **options)

    # Its module's name tells transformers whose optimizer it is.
    return type(kind.__name__, (torch.optim.Optimizer,), {"__new__": made, "__module__": kind.__module__})


class Sharing(_Streamed):
    """A trainer whose rows may have equal prompts, which are computed once."""

    def __init__(self, *args: Any, share_prompts: bool = True, **kwargs: Any) -> None:
        self.share_prompts = share_prompts
        super().__init__(*args, **kwargs)


def _changed(given: dict[str, Any]) -> list[Any]:
    """Return the arguments of a trainer that its constructor may change."""
    rewards = given.get("reward_funcs")
    named = (given.get(name) for name in ("model", "ref_model", "teacher_model", "args", "processing_class", "peft_config"))
    parts = [*named, *(rewards if isinstance(rewards, list) else [rewards])]
    return [part for part in parts if isinstance(getattr(part, "__dict__", None), dict)]


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

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss.

        A smoothed loss is a sum over tokens like the plain one, so the head can compute it: TRL's ordinary path, which sums
        `log_probs`, then gives what its LabelSmoother would compute from full logits, without a loss for the balance of experts.
        """
        trainer: Any = self
        smoother, model = trainer.label_smoother, unwrap(trainer.model)
        is_smoothed = smoother is not None and trainer.compute_loss_func is None and self.args.loss_type == "nll"
        if not is_smoothed or not makes_plain_logits(model):
            return super().compute_loss(*args, **kwargs)
        installed = InstalledForward.on(model)
        assert installed is not None, "its head makes plain logits"
        by_the_head = (trainer, "label_smoother", None), (installed.stream, "label_smoothing", smoother.epsilon)
        with temporary_attributes([*by_the_head, (trainer, "router_aux_loss_coef", 0.0)]):
            return super().compute_loss(*args, **kwargs)


class StreamDPOTrainer(Sharing, DPOTrainer):
    """[`trl.DPOTrainer`] with a streamed policy and reference.

    The reference may be a model of its own, the policy without its adapters, or log-probabilities computed beforehand.

    Args:
        *args, **kwargs: as for [`trl.DPOTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
        share_prompts (`bool`, *optional*, defaults to `True`):
            Whether rows with equal prompts compute them once, to the same losses, metrics and gradients.
    """

    stock = DPOTrainer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss. Where ranks share sequences (`sp_size`), each computes its slice of the rows that all are given."""
        trainer: Any = self
        if not shares_sequences(trainer) or not trainer.model.training:
            return super().compute_loss(*args, **kwargs)
        models = (trainer.model, trainer.ref_model)
        with rows_cut_inside(*(model for model in models if model is not None)):
            return super().compute_loss(*args, **kwargs)


class StreamGRPOTrainer(Sharing, SharedGenerations, GRPOTrainer):
    """[`trl.GRPOTrainer`] with a streamed policy and reference. Completions are generated as usual, with a key/value cache.

    Args:
        *args, **kwargs: as for [`trl.GRPOTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
        share_prompts (`bool`, *optional*, defaults to `True`):
            Whether rows with equal prompts compute them once, to the same losses, metrics and gradients.
    """

    stock = GRPOTrainer


class StreamKTOTrainer(Sharing, KTOTrainer):
    """[`trl.KTOTrainer`] with a streamed policy and reference.

    The reference may be a model of its own, the policy without its adapters, or log-probabilities computed beforehand.

    Args:
        *args, **kwargs: as for [`trl.KTOTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
        share_prompts (`bool`, *optional*, defaults to `True`):
            Whether rows with equal prompts compute them once, to the same losses, metrics and gradients.
    """

    stock = KTOTrainer


class StreamRLOOTrainer(Sharing, SharedGenerations, RLOOTrainer):
    """[`trl.RLOOTrainer`] with a streamed policy and reference. Completions are generated as usual, with a key/value cache.

    Args:
        *args, **kwargs: as for [`trl.RLOOTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
        share_prompts (`bool`, *optional*, defaults to `True`):
            Whether rows with equal prompts compute them once, to the same losses, metrics and gradients.
    """

    stock = RLOOTrainer


class StreamRewardTrainer(_Streamed, RewardTrainer):
    """[`trl.RewardTrainer`] with a streamed reward model. Its head gives one number per sequence and runs as usual.

    Args:
        *args, **kwargs: as for [`trl.RewardTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
    """

    stock = RewardTrainer

    @contextmanager
    def _streaming(self, stream: StreamConfig | None, given: dict[str, Any]) -> Iterator[None]:
        yield
        enable_for_trainer(self.model, stream)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss. TRL passes the pairs' margins to the model as well, where they are no argument of its layers."""

        def without_margin(*, margin: Any = None, **inputs: Any) -> Any:
            return model(**inputs)

        return super().compute_loss(without_margin, *args, **kwargs)


class StreamDistillationTrainer(_Streamed, DistillationTrainer):
    """[`trl.DistillationTrainer`] with a streamed student and teacher. Completions are generated as usual, with a cache.

    The divergence is TRL's, which never holds full logits of either model, but tiles of 4,096 tokens x 32,768 words, whatever
    `head_chunk_size` is.

    Args:
        *args, **kwargs: as for [`trl.DistillationTrainer`].
        stream ([`StreamConfig`], *optional*):
            How to stream. By default, a model that is enabled keeps its configuration, and any other gets the defaults.
    """

    stock = DistillationTrainer

    @contextmanager
    def _streaming(self, stream: StreamConfig | None, given: dict[str, Any]) -> Iterator[None]:
        """Enable the models that are given, and those that TRL loads, before an engine takes the teacher."""
        module = importlib.import_module(self.stock.__module__)
        load = module.create_model_from_path

        def loaded(*args: Any, **kwargs: Any) -> Any:
            model = load(*args, **kwargs)
            enable_for_trainer(model, stream)
            return model

        for name in ("model", "teacher_model"):
            if not isinstance(given.get(name), str | None):
                enable_for_trainer(given[name], stream)
        with temporary_attribute(module, "create_model_from_path", loaded):
            yield
