"""Bytes by component in each phase of a step: the points in time that can hold the most.

A streamed step is largest when the head works, in a layer's backward (`memory.costs`), or when it reaches the embeddings, whose
gradient is as large as the vocabulary. A step with transformers' checkpointing is largest when all logits exist, in a layer's
backward, or at the embeddings. tests/memory/test_phases.py tests these bytes against measured steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from streamgrad.engine.policy import LayerPolicy
from streamgrad.memory.costs import (
    KEYS_AT_ONCE,
    ModelShape,
    Parts,
    Shape,
    brought_ahead,
    embedding_parts,
    head_parts,
    held_in_backward,
    layer_phases,
    sum_of,
    tied_block_rows,
)

# Ids, labels and shifted targets, 8 bytes each.
_TOKEN_IDS = 24
# What torch holds for matrix products on a Hopper GPU, for forward's thread and for backward's.
_PRODUCT_WORKSPACES = 2 * 32 * 2**20
# transformers' loss in backward: log-probabilities, and the gradients of these and of the logits, in fp32.
_LOGIT_BYTES = 12


@dataclass(frozen=True)
class Phase:
    """A point in time that can hold the most bytes of a step."""

    name: str
    parts: Parts

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Workload:
    """One step: `rows` sequences of `sequence` tokens.

    `resident` is what stays for the whole step. `gradient_share` is the part of a finished gradient that stays on this rank.
    `keys_at_once` is `memory.costs.Shape`'s. `scored` tokens are targets, by default all.
    """

    shape: ModelShape
    rows: int
    sequence: int
    resident: Parts = field(default_factory=dict)
    gradient_share: float = 1.0
    keys_at_once: float = KEYS_AT_ONCE
    scored: int | None = None

    @property
    def batch(self) -> Shape:
        return Shape(self.rows, self.sequence, self.keys_at_once)

    @property
    def joins_chunks(self) -> bool:
        """Return whether chunks may run forward together, as `hf.step_plan` says: values in 16 bits, plain rows, one rank."""
        return self.shape.itemsize == 2

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence

    @property
    def targets(self) -> int:
        return self.tokens if self.scored is None else self.scored

    def sum_over_rows(self, of_row: Callable[[int], float]) -> float:
        """Return the sum over the rows of what `of_row` gives for a row of so many tokens."""
        return self.rows * of_row(self.sequence)

    @property
    def always(self) -> Parts:
        """Return what every phase holds: the resident parts, token ids, and workspaces."""
        return sum_of(self.resident, {"other": self.tokens * _TOKEN_IDS, "workspace": _PRODUCT_WORKSPACES})

    @property
    def with_positions(self) -> Parts:
        """Return what every phase holds in which layers still need positions and rotary angles."""
        return sum_of(self.always, {"other": self.tokens * self.shape.profile.positions})

    def gradients(self, finished_layers: int) -> float:
        """Return the bytes of the gradients of the head and of the last layers, at their final size."""
        shape = self.shape
        return self.gradient_share * shape.itemsize * (shape.head_trainable + finished_layers * shape.layer_trainable)

    @property
    def embedding_gradient_bytes(self) -> float:
        """Return the bytes of the embeddings' gradient, which exists beside the head's even where the two are tied."""
        shape = self.shape
        return shape.itemsize * (shape.head_trainable if shape.tied else shape.outside_trainable - shape.head_trainable)

    @property
    def streamed_embedding_bytes(self) -> float:
        """Return the bytes of that gradient which exist at a time in a streamed step: a block of tied ones, if not sharded."""
        shape, dense = self.shape, self.embedding_gradient_bytes
        if not shape.tied or self.gradient_share < 1.0:
            return dense
        return min(dense, shape.itemsize * shape.width * tied_block_rows(shape.vocabulary, shape.width, shape.itemsize))

    def at_embeddings(self, dense_bytes: float) -> Parts:
        """Return what there is where backward reaches the embeddings, beside the gradients of the layers and the head."""
        sums = max(4, self.shape.itemsize) * self.shape.width
        return embedding_parts(self.tokens, self.shape.profile.costs.input, width_sum_bytes=sums, dense_bytes=dense_bytes)


@dataclass(frozen=True)
class SharedPrompts(Workload):
    """One step on one row in which `groups` prompts occur once each, before `group` completions of `completion` tokens each."""

    groups: int = 1
    group: int = 1
    completion: int = 1

    @property
    def joins_chunks(self) -> bool:
        return False

    def sum_over_rows(self, of_row: Callable[[int], float]) -> float:
        prompt = self.sequence // self.groups - self.group * self.completion
        return self.groups * (of_row(prompt) + self.group * (of_row(prompt + self.completion) - of_row(prompt)))


def streamed_phases(load: Workload, policies: Sequence[LayerPolicy], chunk_sizes: Sequence[int], head_rows: int) -> list[Phase]:
    """Return the phases of a streamed step in which each layer keeps by its policy and has chunks of its size.

    `head_rows` is the size of the head's chunks.
    """
    shape, tokens, costs = load.shape, load.tokens, load.shape.profile.costs
    kept = _held(load, policies, on_host=False)
    at_head = sum_of(*(_kept(load, policy) for policy in policies if not policy.on_host and not policy.recomputed))
    # With adapters the embeddings are a leaf of the graph, made to require a gradient, and are held until backward reaches it.
    leaf = shape.outside_trainable == 0 and policies[0].on_host  # else it is the input that the first layer keeps
    leaves = {"hidden states": tokens * costs.input if leaf else 0.0}
    always = sum_of(load.with_positions, leaves)
    logits = head_rows * (shape.vocabulary * shape.itemsize + 4 * shape.width)
    head = head_parts(tokens * costs.input, logits, shape.head_trainable, shape.itemsize)
    phases = [Phase("the head", sum_of(always, at_head, head))]
    ahead = brought_ahead(costs, load.batch, policies, chunk_sizes)
    for index, (policy, chunk_size) in enumerate(zip(policies, chunk_sizes, strict=True)):
        below = sum_of(always, kept[index], ahead[index], {"gradients": load.gradients(shape.layers - 1 - index)})
        phases += [
            Phase(f"{name} in backward of layer {index}", sum_of(below, parts))
            for name, parts in layer_phases(costs, load.batch, policy, chunk_size).items()
        ]
    phases.append(_embeddings(load, sum_of(load.always, leaves), load.streamed_embedding_bytes))
    return phases


def checkpointing_phases(load: Workload) -> list[Phase]:
    """Return the phases of a step with transformers' gradient checkpointing and its own loss on full logits."""
    shape, tokens, costs = load.shape, load.tokens, load.shape.eager.costs
    through = {"hidden states": 2 * tokens * costs.input}
    kept = {"kept inputs": shape.layers * tokens * costs.input}
    logits: Parts = {"logits": _LOGIT_BYTES * tokens * shape.vocabulary}
    graph = {"chunk activations": tokens * costs.widest, "gradients": shape.itemsize * shape.layer_trainable}
    before = sum_of(load.with_positions, kept, through)
    layer = sum_of(before, graph, {"gradients": load.gradients(0), "workspace": tokens * costs.workspace + costs.weights})
    return [
        Phase("the logits", sum_of(before, logits)),
        Phase(f"backward of layer {shape.layers - 1}", layer),
        _embeddings(load, load.always, load.embedding_gradient_bytes),
    ]


def largest(phases: Sequence[Phase]) -> Phase:
    """Return the phase that holds the most bytes."""
    return max(phases, key=lambda phase: phase.total_bytes)


def host_parts(load: Workload, policies: Sequence[LayerPolicy]) -> Parts:
    """Return what layers keep in pinned host memory, at most."""
    return max(_held(load, policies, on_host=True), key=lambda parts: sum(parts.values()))


def _kept(load: Workload, policy: LayerPolicy) -> Parts:
    return {name: load.tokens * count for name, count in load.shape.profile.costs.kept(policy).items()}


def _held(load: Workload, policies: Sequence[LayerPolicy], *, on_host: bool) -> list[Parts]:
    """Return what the backward of each layer finds in one of the two places."""
    kept = {policy: _kept(load, policy) if policy.on_host == on_host else {} for policy in set(policies)}
    names = list(dict.fromkeys(name for parts in kept.values() for name in parts))
    counts = [held_in_backward(policies, [kept[policy].get(name, 0.0) for policy in policies]) for name in names]
    return [dict(zip(names, row, strict=True)) for row in zip(*counts, strict=True)] or [{}] * len(policies)


def _embeddings(load: Workload, always: Parts, dense_bytes: float) -> Phase:
    gradients = {"gradients": load.gradients(load.shape.layers)}
    return Phase("the embeddings", sum_of(always, gradients, load.at_embeddings(dense_bytes)))
