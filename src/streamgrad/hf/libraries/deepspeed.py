"""Asks what DeepSpeed has done to a model: ZeRO-3's marks on modules and parameters, and the group of its Ulysses.

DeepSpeed itself is not imported: where a program has not done so, there is nothing to ask for.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from streamgrad.engine.module_walk import trainable_parameters

_ULYSSES_STATE = "deepspeed.runtime.sequence_parallel.parallel_state_sp"


def has_zero3_hooks(module: nn.Module) -> bool:
    """Return whether ZeRO-3 gathers at the module: it numbers a module when it puts its hooks on it."""
    return "ds_id" in module.__dict__


def is_partitioned(parameter: Tensor) -> bool:
    """Return whether ZeRO-3 has shared the parameter out, so that it is here only while its module runs."""
    return hasattr(parameter, "ds_id")


def ulysses_group() -> Any:
    """Return the ranks that share sequences by DeepSpeed's own Ulysses (Accelerate's `sp_size`); None where there are none."""
    return getattr(sys.modules.get(_ULYSSES_STATE), "_SEQUENCE_PARALLEL_GROUP", None)


def check_head(head: nn.Module) -> None:
    """Raise where ZeRO-3 gathers the parameters of a head that is more than one linear map."""
    if any(map(is_partitioned, trainable_parameters(head))):
        raise ValueError(
            f"a trainable {type(head).__name__} in the place of the language-modelling head cannot be streamed under ZeRO-3, "
            "which gathers its parameters module by module. Leave the head out of the adapters, or use ZeRO-2 or FSDP2."
        )
