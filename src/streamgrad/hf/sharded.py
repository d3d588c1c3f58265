"""Parameters of which FSDP2 keeps shards until their layer runs; with its `CPUOffloadPolicy`, on the host."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def waits_on_host(parameter: Tensor) -> bool:
    """Return whether a parameter, its gradient and the optimizer's states of it are on the host, and its layer runs elsewhere."""
    return isinstance(parameter, DTensor) and parameter.device.type != parameter.device_mesh.device_type


def device_at_work(parameter: Tensor) -> torch.device:
    """Return the device on which a parameter is used, wherever it waits."""
    if isinstance(parameter, DTensor) and waits_on_host(parameter):
        return torch.device(parameter.device_mesh.device_type, torch.accelerator.current_device_index())
    return parameter.device


def own_bytes(parameter: Tensor) -> int:
    """Return the bytes that this rank has of a parameter: of a sharded one, torch's `nbytes` counts the shards of all ranks."""
    with torch.no_grad():
        return parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes


def bytes_on_their_way(layers: Iterable[Iterable[Tensor]]) -> float:
    """Return the bytes of whole weights and gradients that are there beside the running layer's: one arrives, one leaves."""
    return 2.0 * max(sum(parameter.nbytes for parameter in own if isinstance(parameter, DTensor)) for own in layers)


class StatesToCome:
    """Counts what training adds on the host to parameters that wait there: gradients and, in the first step, AdamW's moments."""

    def __init__(self) -> None:
        self._versions: list[int] = []  # of parameters that no step has changed

    def host_bytes(self, parameters: Iterable[Tensor]) -> float:
        waiting = [each for each in parameters if isinstance(each, DTensor) and each.requires_grad and waits_on_host(each)]
        with torch.no_grad():
            versions = [parameter.to_local()._version for parameter in waiting]
        self._versions = self._versions or versions
        moments = 2 if versions == self._versions else 0
        return float(sum(own_bytes(parameter) * (moments + (parameter.grad is None)) for parameter in waiting))
