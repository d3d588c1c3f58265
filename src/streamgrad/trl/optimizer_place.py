"""Where a trainer's optimizer works: on the GPU, in backward, or on the host."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from transformers.training_args import OptimizerNames

# What a trainer is given for each value of `--optimizer`.
_CHOICES: dict[str, dict[str, bool]] = {
    "adamw": {}, "adamw8bit": {}, "in-backward": {"optimizer_in_backward": True}, "host": {"optimizer_on_host": True},
}  # fmt: skip


def chosen_optimizer(name: str, training: Any) -> dict[str, bool]:
    """Return the trainer's arguments for a value of `--optimizer`, as `streamgrad plan` has them; `training` is changed too."""
    if name not in _CHOICES:
        raise ValueError(f"--optimizer must be one of {', '.join(_CHOICES)}, got {name!r}. --optim has more kinds of optimizers.")
    if name == "adamw8bit":
        if training.optim not in (type(training).optim, OptimizerNames.ADAMW_8BIT):
            raise ValueError(
                f"--optimizer adamw8bit and --optim {training.optim.value} are two optimizers. Leave one of them out."
            )
        training.optim = OptimizerNames.ADAMW_8BIT
    return dict(_CHOICES[name])


def is_by_bitsandbytes(training: Any) -> bool:
    """Return whether a trainer's `--optim` is one of bitsandbytes'; `adamw_torch_8bit` is torchao's."""
    name = str(getattr(training.optim, "value", training.optim))
    return "torch" not in name and any(part in name for part in ("bnb", "8bit", "paged", "lion", "ademamix"))


def is_of_bitsandbytes(optimizer: Any) -> bool:
    """Return whether an optimizer, perhaps wrapped by Accelerate, is one of bitsandbytes'."""
    kinds = type(getattr(optimizer, "optimizer", optimizer)).__mro__
    return any(kind.__module__.partition(".")[0] == "bitsandbytes" for kind in kinds)


def check_optimizer_place(args: Any, *, in_backward: bool, on_host: bool) -> None:
    """Raise for arguments of a trainer that need all gradients at once, where they leave one by one in backward."""
    if not (in_backward or on_host):
        return
    asked = "optimizer_in_backward=True" if in_backward else "optimizer_on_host=True"
    accumulated = getattr(args, "gradient_accumulation_steps", 1)
    if in_backward and on_host:
        raise ValueError("optimizer_in_backward=True and optimizer_on_host=True are two places. Pass one of them.")
    if accumulated > 1:
        raise ValueError(
            f"gradient_accumulation_steps={accumulated} adds gradients of several batches, and {asked} updates by each of them. "
            "Set it to 1, with a larger per_device_train_batch_size."
        )
    if getattr(args, "fp16", False):
        raise ValueError(f"fp16=True scales the loss, and {asked} takes gradients before they are unscaled. Set bf16=True.")
    if not on_host:
        return
    if find_spec("torchao") is None:
        raise ValueError(f"{asked} needs torchao, which is not installed. Run: pip install torchao")
    limit = getattr(args, "max_grad_norm", 1.0)
    if limit:
        raise ValueError(
            f"max_grad_norm={limit} clips by the norm of all gradients, but with {asked} they have left for the host by then. "
            "Set max_grad_norm=0; or pass optimizer_in_backward=True, which clips by the norm of the step before."
        )
    if getattr(args, "world_size", 1) > 1:
        raise ValueError(
            f"{asked} is for one process, got {args.world_size}. Use DeepSpeed's offload_optimizer, or FSDP2's CPUOffloadPolicy."
        )


def on_host(params: Any, kind: type[torch.optim.Optimizer], **options: Any) -> Any:
    """Return torchao's optimizer that copies each gradient to the host in backward, frees it, and steps `kind` there.

    Small parameters go there too. torchao would step them on the GPU by groups of which a copy is left after a state is loaded,
    as Accelerate does with an empty one, so that they would not follow the scheduler.
    """
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found, import-untyped, unused-ignore]

    try:
        return CPUOffloadOptimizer(params, kind, offload_gradients=True, minimal_size=0, **options)
    except AssertionError as error:
        raise ValueError(
            f"optimizer_on_host=True moves gradients from a GPU to its host, and torchao finds none: {error}."
        ) from error
