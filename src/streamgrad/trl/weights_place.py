"""Where a training command's weights wait: on the GPU, or on the host, by FSDP2 as Accelerate's launcher would set it up."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import Trainer

# What `accelerate launch` tells its processes for FSDP2 with `fsdp_offload_params`.
_ENGINE = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # fmt: skip
# What a launcher tells a process that is the only one. At port 0 torch takes any that is free.
_ALONE = {
    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip


def keep_weights(place: str, *, use_cpu: bool) -> None:
    """Let Accelerate keep weights at `place`; for "host" this changes the environment, which it reads when it starts."""
    if place not in ("device", "host"):
        raise ValueError(f"--weights must be device or host, got {place!r}.")
    if place == "device":
        return
    if use_cpu or not torch.accelerator.is_available():
        raise ValueError("--weights host moves weights from a GPU to its host, and this is training on the CPU. Leave it out.")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError(
            "--weights host is FSDP2's, and the launcher was asked for DeepSpeed. Name offload_param in DeepSpeed's "
            "configuration instead, or launch without DeepSpeed."
        )
    for name, needed in _ENGINE.items():
        if os.environ.get(name, needed).lower() != needed.lower():
            raise ValueError(
                f"--weights host needs {name}={needed}, and the launcher was asked for {os.environ[name]}. Change that in its "
                "configuration, launch with torchrun, which says nothing about FSDP, or leave out --weights host."
            )
    os.environ.update(_ENGINE | ({} if "LOCAL_RANK" in os.environ else _ALONE))


@contextmanager
def environment_of_before_if_refused() -> Iterator[None]:
    """Take back what `keep_weights` has told Accelerate if the block raises: a later run in this process has other options."""
    before = {name: os.environ.get(name) for name in _ENGINE | _ALONE}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        raise


def accumulate_on_host(training: Any) -> None:
    """Let each batch's gradients go to the host: else FSDP2 keeps the whole model's on the GPU until the last batch of a step."""
    config = training.accelerator_config
    config.gradient_accumulation_kwargs = {"sync_each_batch": True} | (config.gradient_accumulation_kwargs or {})


def check_with_weights_on_host(optimizer: str, training: Any, model: Any) -> None:
    """Raise for what cannot be trained where weights, and so gradients and states of the optimizer, are on the host."""
    if optimizer not in ("adamw", "host"):
        raise ValueError(
            f"--weights host keeps gradients and states of the optimizer there too, where they are stepped, so --optimizer "
            f"{optimizer} has no gradients on the GPU to use. Pass --optimizer host, or leave one of the two out."
        )
    kind, _ = Trainer.get_optimizer_cls_and_kwargs(training)
    if not kind.__module__.startswith("torch."):
        raise ValueError(
            f"--weights host needs an optimizer that steps FSDP2's shards on the host, as torch's do (--optim adamw_torch_fused, "
            f"sgd), and --optim {training.optim.value} is {kind.__module__}.{kind.__name__}. Leave one of the two out."
        )
    if model.load_in_4bit or model.load_in_8bit:
        raise ValueError(
            "--weights host with weights in 4 or 8 bits, which FSDP2 cannot move and leaves on the GPU. Leave one of the two out."
        )
