"""What ranks send each other, and what goes between a GPU and its host, in seconds over the speed of links.

    exchanges    ranks that share a sequence trade tokens for heads around attention (docs/distributed.md); nothing hides them
    gathers      ZeRO-3 and FSDP2 gather all weights in forward and again in backward, and every engine sums gradients once
    host copies  weights that wait on the host come twice, and gradients that go there leave once

The last two run while the device computes, so a step takes as long as the longer of the two. Speeds are peaks (`seconds.Links`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamgrad.engine.policy import LayerPolicy
from streamgrad.memory.phases import Workload
from streamgrad.memory.seconds import Links
from streamgrad.memory.training_state import Setup, TrainingState


@dataclass(frozen=True)
class Ranks:
    """How GPUs work together: `sequence` of them share each sequence, and `node` of them are in one machine."""

    gpus: int = 1
    sequence: int = 1
    node: int = 8

    @property
    def on_a_host(self) -> int:
        """Return how many GPUs share the memory of one host."""
        return min(self.gpus, self.node)


@dataclass(frozen=True)
class SharedSequences(Workload):
    """One rank's part of a step in which `ranks` share every sequence: `sequence` tokens are its own, and it sees all."""

    ranks: int = 1

    def sum_over_rows(self, of_row: Callable[[int], float]) -> float:
        return super().sum_over_rows(lambda tokens: of_row(self.ranks * tokens) / self.ranks)


def exchanged_bytes(load: Workload, policies: Sequence[LayerPolicy]) -> float:
    """Return the bytes that one rank puts into all-to-alls in a step, those that stay with itself included."""
    profile, itemsize = load.shape.profile, load.shape.itemsize
    queries_and_out = 2 * itemsize * profile.query_heads * profile.head_size
    keys_and_values = profile.costs.keys_and_values
    again = {"all": 0.0, "attention": queries_and_out, "input": queries_and_out + keys_and_values}
    layers = sum(2 * (queries_and_out + keys_and_values) + again[policy.keep] for policy in policies)
    return load.tokens * (layers + 2 * itemsize * load.shape.width)


def exchange_seconds(load: Workload, policies: Sequence[LayerPolicy], ranks: Ranks, links: Links) -> float:
    """Return the time of the exchanges of one step: a rank sends as much to each of the others."""
    near = min(ranks.sequence, ranks.node)
    to_each = exchanged_bytes(load, policies) / ranks.sequence
    return to_each * ((near - 1) / links.inside + (ranks.sequence - near) / links.across)


def beside_seconds(load: Workload, setup: Setup, state: TrainingState, ranks: Ranks, links: Links) -> float:
    """Return the time of what engines gather and sum, and of copies to and from the host, whichever is longer."""
    shape, others = load.shape, (ranks.gpus - 1) / ranks.gpus
    parameters = shape.layers * shape.layer_parameters + shape.outside_parameters
    trainable = shape.layers * shape.layer_trainable + shape.outside_trainable
    gathered = 2.0 * (parameters * shape.itemsize - shape.weights_saved) if setup.engine in ("zero3", "fsdp2") else 0.0
    summed = trainable * shape.itemsize * {"none": 0.0, "ddp": 2.0}.get(setup.engine, 1.0)
    # Whatever crosses to a machine does so once, over the adapters of all its GPUs, and is passed on within.
    speed = min(links.inside, ranks.node * links.across) if ranks.gpus > ranks.node else links.inside
    copied = 2 * state.host.get("weights", 0.0) if setup.weights == "host" else 0.0
    return max(others * (gathered + summed) / speed, (copied + state.host.get("gradients", 0.0)) / links.host)
