"""Compares what a launcher was asked for with what Accelerate made of it."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

_ENGINES = ("FSDP", "DEEPSPEED")
_WITHOUT_ENGINE = ("NO", "MULTI_CPU")


def check_launch(state: Any) -> None:
    """Raise if Accelerate has silently ignored what its launcher was asked for: the engine, or the other processes.

    `state` is an `Accelerator` or a `PartialState`. On processors, whether for want of GPUs or by ACCELERATE_USE_CPU and
    `use_cpu`, Accelerate knows DDP alone, whatever the configuration file says.
    """
    kind = state.distributed_type.value
    for engine in _ENGINES:
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true" and kind in _WITHOUT_ENGINE:
            raise ValueError(
                f"the launcher was asked for {engine}, which Accelerate runs on GPUs only, but torch sees none, or was told to "
                "use the CPU (ACCELERATE_USE_CPU, --use_cpu). To train with DDP on CPUs, launch with torchrun and say so; to "
                f"train with {engine}, leave it out."
            )
    if int(os.environ.get("WORLD_SIZE", "1")) > state.num_processes:
        raise ValueError(
            f"{os.environ['WORLD_SIZE']} processes were started, but Accelerate found no GPU, so each would train alone. Pass "
            "--use_cpu, or set ACCELERATE_USE_CPU=true, to train together on CPUs."
        )


def check_engine(args: Any) -> None:
    """Raise where a DeepSpeed configuration says otherwise than a Trainer's arguments, as transformers does when training begins.

    A reference model is given to DeepSpeed before, which then compares the sizes of batches alone, and names neither option.
    """
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is None:
        return
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    compared = object.__new__(HfTrainerDeepSpeedConfig)  # made in full, it would be the one that from_pretrained asks for ZeRO-3
    compared.config, compared.mismatches = deepcopy(plugin.deepspeed_config), []
    compared.trainer_config_process(args, getattr(args, "auto_find_batch_size", False))
    if compared.mismatches:
        both = "; ".join(each.removeprefix("- ds ").replace(" vs hf ", " there, ") + " here" for each in compared.mismatches)
        raise ValueError(
            f"DeepSpeed's configuration and the trainer's arguments differ: {both}. Give both the same value; accelerate launch "
            "takes --gradient_accumulation_steps and --gradient_clipping for the configuration."
        )
