"""Ranks that compute a sequence together, each with a part of every weight: torch's tensor parallelism (`parallelize_module`).

Modules that torch has cut exchange with other ranks in every call, so in every chunk. All ranks of a layer therefore need the
same chunks, and must keep and recompute the same things: a plan that follows the memory of one rank is made together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.ulysses import SequenceSharing


class WeightSharing(SequenceSharing):
    """A sequence that each rank of some groups has as a whole: nothing is exchanged but what plans depend on."""

    def __init__(self, groups: list[dist.ProcessGroup], device: torch.device) -> None:
        self.groups, self.device = groups, device

    def most(self, *numbers: float) -> tuple[float, ...]:
        largest = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        for group in self.groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        return tuple(largest.tolist())


def planned_together(
    layers: list[nn.Module], parameters: list[list[nn.Parameter]], sharing: SequenceSharing, device: torch.device
) -> SequenceSharing:
    """Return how ranks agree on a plan for which torch has cut `layers`, with these parameters; `sharing` if it has cut none."""
    each = zip(layers, parameters, strict=True)
    groups = list(dict.fromkeys(group for layer, own in each for group in _groups_of(layer, own)))
    if not groups:
        return sharing
    if sharing.ranks > 1:
        raise SeamError("torch has cut its layers for tensor parallelism, and ranks share its sequences; leave out one of both")
    return WeightSharing(groups, device)


def _groups_of(layer: nn.Module, parameters: Iterable[nn.Parameter]) -> list[dist.ProcessGroup]:
    """Return the ranks of each dimension of a mesh by which a weight is cut, but for those over which FSDP2 gathers it."""
    groups = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            # FSDP2 has the first dimensions, of which it cuts the last one.
            cut = [index for index, placement in enumerate(parameter.placements) if not placement.is_replicate()]
            first = cut[0] + 1 if isinstance(layer, FSDPModule) and cut else 0
            groups += [parameter.device_mesh.get_group(dimension) for dimension in range(first, parameter.device_mesh.ndim)]
    return groups


def refuse_cut_head(head: nn.Module) -> None:
    """Raise if torch has cut the head, whose loss would need the logits of all ranks."""
    if any(isinstance(parameter, DTensor) for parameter in head.parameters()):
        raise SeamError("torch has cut its lm_head for tensor parallelism; leave the head out of parallelize_module's plan")
