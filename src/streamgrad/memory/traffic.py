"""What ranks send each other, and what goes between a GPU and its host, in seconds over the speed of links.

    exchanges    ranks that share a sequence trade tokens for heads around attention (docs/distributed.md); nothing hides them
    ring         ranks with the same heads gather keys and values, and sum their gradients; counted as if nothing hid them
    gathers      ZeRO-3 and FSDP2 gather all weights in forward and again in backward, and every engine sums gradients once
    host copies  weights that wait on the host come twice, and gradients that go there leave once

Gathers and copies run while the device computes, so a step takes as long as the longer of the two. Speeds are peaks
(`seconds.Links`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from streamgrad.engine.policy import LayerPolicy
from streamgrad.memory.costs import ModelShape, Shape
from streamgrad.memory.phases import Workload
from streamgrad.memory.seconds import Links
from streamgrad.memory.training_state import Setup, TrainingState


@dataclass(frozen=True)
class Ranks:
    """How GPUs work together: `sequence` of them share each sequence, and `node` of them are in one machine.

    Consecutive ones trade tokens for heads; `ring` of them have the same heads, and gather each other's keys.
    """

    gpus: int = 1
    sequence: int = 1
    node: int = 8
    ring: int = 1

    @property
    def heads(self) -> int:
        """Return how many GPUs trade tokens for heads."""
        return self.sequence // self.ring

    @property
    def on_a_host(self) -> int:
        """Return how many GPUs share the memory of one host."""
        return min(self.gpus, self.node)


@dataclass(frozen=True)
class SharedSequences(Workload):
    """One rank's part of a step in which `ranks` share every sequence: `sequence` tokens are its own, and it sees all."""

    ranks: int = 1
    ring: int = 1

    @property
    def batch(self) -> Shape:
        return Shape(self.rows, self.sequence, self.keys_at_once * self.ring / self.ranks, self.ring)

    @property
    def joins_chunks(self) -> bool:
        return self.ranks == 1 and super().joins_chunks

    def sum_over_rows(self, of_row: Callable[[int], float]) -> float:
        return super().sum_over_rows(lambda tokens: of_row(self.ranks * tokens) / self.ranks)


def check_ring(ring: int, ranks: int) -> None:
    """Raise unless `ranks` that share a sequence are `ring` groups of equal size."""
    if ring < 1 or ranks % ring:
        raise ValueError(
            f"ring={ring} must be a number that divides the group's {ranks} ranks, which form as many groups of equal size. Pass "
            f"one of {', '.join(str(number) for number in range(1, ranks + 1) if ranks % number == 0)}."
        )


def smallest_ring(ranks: int, query_heads: int) -> int:
    """Return the smallest ring of `ranks` that share a sequence whose groups can share the query heads."""
    return ranks // math.gcd(ranks, query_heads)


def shared_shape(shape: ModelShape, ranks: Ranks) -> ModelShape:
    """Return the shape of a model whose heads ranks trade, with copies of key heads and with a ring's keys in kept graphs.

    Each key head is copied until the ranks that trade heads can share all of them evenly.
    """
    profile, costs = shape.profile, shape.profile.costs
    copies = ranks.heads // math.gcd(ranks.heads, key_heads(shape))
    graph = costs.graph + (ranks.ring * copies - 1) * costs.keys_and_values
    keys, sums = copies * costs.keys_and_values, copies * costs.key_sums
    return replace(shape, profile=replace(profile, costs=replace(costs, keys_and_values=keys, key_sums=sums, graph=graph)))


def key_heads(shape: ModelShape) -> int:
    """Return the key heads of a layer, or 0 where it has none."""
    head_bytes = 2 * shape.itemsize * shape.profile.head_size
    return round(shape.profile.costs.keys_and_values / head_bytes) if head_bytes else 0


def exchanged_bytes(load: Workload, policies: Sequence[LayerPolicy]) -> tuple[float, float]:
    """Return the bytes that one rank puts into all-to-alls in a step, those that stay with itself included.

    The first are those of layers, between ranks that trade heads; the second those of hidden states and their gradient, which all
    ranks of a sequence bring into the order of chunks and back.
    """
    profile, itemsize = load.shape.profile, load.shape.itemsize
    queries_and_out = 2 * itemsize * profile.query_heads * profile.head_size
    keys_and_values = profile.costs.keys_and_values
    again = {"all": 0.0, "attention": queries_and_out, "input": queries_and_out + keys_and_values}
    layers = sum(2 * (queries_and_out + keys_and_values) + again[policy.keep] for policy in policies)
    return load.tokens * layers, load.tokens * 2 * itemsize * load.shape.width


def ring_bytes(load: Workload, policies: Sequence[LayerPolicy]) -> float:
    """Return the bytes that one rank sends to each of the others of its ring in a step.

    These are its keys and values, forward and again before backward unless a graph has kept them, and what its queries owe to the
    other's.
    """
    costs = load.shape.profile.costs
    gathers = sum(1 if policy.keep == "all" else 2 for policy in policies)
    return load.tokens * (gathers * costs.keys_and_values + len(policies) * costs.key_sums)


def exchange_seconds(load: Workload, policies: Sequence[LayerPolicy], ranks: Ranks, links: Links) -> float:
    """Return the time of the exchanges of tokens for heads of one step: a rank sends as much to each of the others."""
    in_layers, around = exchanged_bytes(load, policies)
    return sum(
        sent / among * _seconds_a_byte(among, min(among, ranks.node), links)
        for sent, among in ((in_layers, ranks.heads), (around, ranks.sequence))
    )


def ring_seconds(load: Workload, policies: Sequence[LayerPolicy], ranks: Ranks, links: Links) -> float:
    """Return the time in which the ranks of a ring send each other keys and values, and the sums of their gradients."""
    near = max(1, min(ranks.ring, ranks.node // ranks.heads))
    return ring_bytes(load, policies) * _seconds_a_byte(ranks.ring, near, links)


def _seconds_a_byte(ranks: int, near: int, links: Links) -> float:
    """Return the time in which a rank sends a byte to each of the others, of which `near` are in its machine, itself included."""
    return (near - 1) / links.inside + (ranks - near) / links.across


def beside_seconds(load: Workload, setup: Setup, state: TrainingState, ranks: Ranks, links: Links) -> float:
    """Return the time of what engines gather and sum, and of copies to and from the host, whichever is longer."""
    shape, others = load.shape, (ranks.gpus - 1) / ranks.gpus
    gathered = 2.0 * (shape.parameters * shape.itemsize - shape.weights_saved) if setup.engine in ("zero3", "fsdp2") else 0.0
    summed = shape.trainable * shape.itemsize * {"none": 0.0, "ddp": 2.0}.get(setup.engine, 1.0)
    # Whatever crosses to a machine does so once, over the adapters of all its GPUs, and is passed on within.
    speed = min(links.inside, ranks.node * links.across) if ranks.gpus > ranks.node else links.inside
    copied = 2 * state.host.get("weights", 0.0) if setup.weights == "host" else 0.0
    return max(others * (gathered + summed) / speed, (copied + state.host.get("gradients", 0.0)) / links.host)
