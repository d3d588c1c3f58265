"""Refuses to update parameters in backward where a gradient is not final yet: by engines, accumulation, or loss scaling."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from streamgrad.hf.libraries.deepspeed import is_partitioned

_SHARED = "is whole only after processes have exchanged it, and parameters would be updated before. Use an ordinary optimizer."


def check_class(kind: Any) -> None:
    """Raise for what is no class of optimizers, or one that has no groups of parameters of its own."""
    if isinstance(kind, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer_class must be a class, got an object of {type(kind).__name__}. Pass the class, and its options by name: "
            f"optimizer_in_backward(model, {type(kind).__name__}, lr=1e-5)."
        )
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"optimizer_class must be a class of torch.optim.Optimizer, got {kind!r}.")
    if hasattr(kind, "param_groups"):  # else each optimizer has them
        raise TypeError(
            f"{kind.__name__} is made of other optimizers, whose param_groups it shows, and cannot be stepped for one parameter. "
            "Use it as an ordinary optimizer, or pass the class that it is made of."
        )


def check_trainer(max_grad_norm: float | None) -> bool:
    """Return whether a Trainer is about to run a step; raise if it clips by another limit than `max_grad_norm`."""
    trainers = sys.modules.get("transformers.trainer")
    frame = sys._getframe(1)
    for _ in range(4):  # the optimizer's own, that of Accelerate's wrapper, and the trainer's
        trainer = frame.f_locals.get("self")
        if trainers is not None and isinstance(trainer, trainers.Trainer):
            limit = trainer.args.max_grad_norm
            if limit and limit != max_grad_norm:
                raise ValueError(
                    f"max_grad_norm={limit} of the Trainer's arguments (1.0 by default) clips by the norm of all gradients, but "
                    f"parameters are updated in backward, before it is known. Pass max_grad_norm={limit} to "
                    "optimizer_in_backward, which clips by the norm of the step before; or max_grad_norm=0 to the arguments, "
                    "which clips nothing; or keep gradients on the host (docs/optimizers.md)."
                )
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def check_parameters(model: Any, parameters: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
    """Raise where parameters cannot be updated in backward; another optimizer already does so for those `taken`."""
    if taken:
        raise ValueError(
            f"{len(taken)} of {len(parameters)} parameters are already updated in backward by another optimizer. Call remove() "
            "on that one first (of a trainer: trainer.optimizer.optimizer.remove())."
        )
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    for module in modules:
        if isinstance(module, DistributedDataParallel | FullyShardedDataParallel | FSDPModule):
            raise ValueError(f"under {type(module).__name__} a gradient {_SHARED}")
    if any(isinstance(parameter, DTensor) or is_partitioned(parameter) for parameter in parameters):
        raise ValueError(f"parameters are sharded (FSDP2, tensor parallelism or ZeRO-3), and a gradient {_SHARED}")
    _check_processes()
    devices = sorted({str(parameter.device) for parameter in parameters})
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"trainable parameters are on {', '.join(devices)}. torch runs backward on each device in a thread of its own, and "
            "an optimizer in backward steps one parameter at a time. Put them on one device, or use an ordinary optimizer."
        )


def check_surroundings(others: Sequence[Tensor]) -> None:
    """Raise, before the first update of a step, where the gradient is scaled, or one of several to be added."""
    _check_processes()
    state = sys.modules.get("accelerate.state")
    if state is not None and not state.GradientState._shared_state.get("sync_gradients", True):
        raise RuntimeError(
            "Accelerate is accumulating gradients (gradient_accumulation_steps above 1, or no_sync), and an optimizer in "
            "backward updates by each of them. Set gradient_accumulation_steps=1 and pass larger batches, or use an ordinary "
            "optimizer."
        )
    if state is not None and state.AcceleratorState._shared_state.get("_mixed_precision") == "fp16":
        raise RuntimeError(
            "Accelerate scales the loss for mixed_precision='fp16' (fp16=True), and an optimizer in backward updates by scaled "
            "gradients. Train in bf16, or use an ordinary optimizer."
        )
    if any(other.grad is not None for other in others):
        raise RuntimeError(
            "some parameters have a gradient from before this backward pass, and an optimizer in backward cannot add to it. Call "
            "zero_grad() first."
        )


def _check_processes() -> None:
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError(f"with {torch.distributed.get_world_size()} processes a gradient {_SHARED}")
