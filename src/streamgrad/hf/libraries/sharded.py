"""Parameters of which FSDP2 keeps shards until their layer runs; with its `CPUOffloadPolicy`, on the host."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def waits_on_host(parameter: Tensor) -> bool:
    """Return whether a parameter, its gradient and the optimizer's states of it are on the host, and its layer runs elsewhere."""
    return isinstance(parameter, DTensor) and parameter.device.type == "cpu" != parameter.device_mesh.device_type


def device_at_work(parameter: Tensor) -> torch.device:
    """Return the device on which a parameter is used, wherever it waits."""
    if isinstance(parameter, DTensor) and waits_on_host(parameter):
        return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
    return parameter.device


def own_bytes(parameter: Tensor) -> int:
    """Return the bytes that this rank has of a parameter: of a sharded one, torch's `nbytes` counts the shards of all ranks."""
    if not isinstance(parameter, DTensor):
        return parameter.nbytes
    with torch.no_grad():
        return parameter.to_local().nbytes


def bytes_on_their_way(layers: Iterable[nn.Module]) -> float:
    """Return the bytes of whole weights and gradients that are there beside the running layer's: one arrives, one leaves."""
    return 2.0 * max(
        (sum(each.sharded_param.nbytes for group in fsdp_groups_of(layer) for each in group.fsdp_params) for layer in layers),
        default=0,
    )


def whole_gradient_bytes(layer: nn.Module) -> float | None:
    """Return the bytes of gradients that backward leaves whole on the device, if FSDP2 is told to share none of the layer's.

    That is `set_requires_gradient_sync(False)`, as Accelerate has it for all but the last of several batches in a step. Gradients
    of earlier batches are there already, and not counted.
    """
    groups = [group for group in fsdp_groups_of(layer) if not group.reduce_grads]
    if not groups:
        return None
    trained = [each for group in groups for each in group.fsdp_params if each.sharded_param.requires_grad]
    return float(sum(each.sharded_param.nbytes for each in trained if not _has_whole_gradient(each)))


def fsdp_groups_of(layer: nn.Module) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers for a layer."""
    if not isinstance(layer, FSDPModule):
        return []
    state: Any = layer._get_fsdp_state()
    found = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in found if group is not None]


def gathers_first(layer: nn.Module) -> bool:
    """Return whether FSDP2's hook, for this layer alone, is the first of those that run before the layer is called."""
    state: Any = layer._get_fsdp_state() if isinstance(layer, FSDPModule) else None
    own = getattr(state, "_pre_forward_hook_handle", None)  # several of them where layers are gathered together
    return own is not None and next(iter(layer._forward_pre_hooks), None) == getattr(own, "id", -1)


def _has_whole_gradient(gathered: Any) -> bool:
    unsharded = getattr(gathered, "_unsharded_param", None)  # made when it is gathered for the first time
    return gathered.unsharded_accumulated_grad is not None or (unsharded is not None and unsharded.grad is not None)


class StatesToCome:
    """Counts what training adds on the host to parameters that wait there: gradients and, in the first step, AdamW's moments.

    A step has been made if there was a backward pass and all gradients are gone. A shard's version does not tell: optimizers that
    update many parameters at once leave it as it is.
    """

    def __init__(self) -> None:
        self._had_backward = self._had_step = False

    def host_bytes(self, parameters: Iterable[Tensor], h_BTE: Tensor) -> float:
        """Return these bytes of a step whose first layer is about to run on `h_BTE`."""
        waiting = [each for each in parameters if isinstance(each, DTensor) and each.requires_grad and waits_on_host(each)]
        self._had_step = self._had_step or (self._had_backward and all(parameter.grad is None for parameter in waiting))
        if waiting and h_BTE.requires_grad:
            h_BTE.register_hook(self._note_backward)
        moments = 0 if self._had_step else 2
        return float(sum(own_bytes(parameter) * (moments + (parameter.grad is None)) for parameter in waiting))

    def _note_backward(self, gradient: Tensor) -> None:
        self._had_backward = True
