"""Bytes by component at each moment of a step that can be its worst.

A streamed step is largest
    when the head works               hidden states, their gradient, the sum of the head's gradient, a chunk of logits
    in a layer's backward, twice      at the widest point of a chunk's graph, and where attention's backward has run
    when a layer's backward ends      the sums of its gradients beside their rounded copies
    when it reaches the embeddings    their gradient, which is as large as the vocabulary
and a step with transformers' checkpointing when all logits exist, or in a layer's backward. What a layer's chunk holds at its
two points is counted by `models.dry_run`; what is as long as the sequence is written out here. Held to measured steps by
tests/test_plan.py.

Known limits: the allocator's fragments are not counted, nor chunks that come back from the host while the program runs ahead of
the device, whose memory waits for it (up to 1.2 GB in the records).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from streamgrad.core.chunk import KEYS_AT_ONCE
from streamgrad.core.policy import LayerPolicy
from streamgrad.models.dry_run import ModelShape

COMPONENTS = (
    "weights", "optimizer state", "gradients", "kept inputs", "kept attention", "kept graphs", "hidden states",
    "keys and values", "chunk activations", "workspace", "logits", "other",
)  # fmt: skip

Parts = dict[str, float]

# Ids, labels, positions and shifted targets, 8 bytes each.
_TOKEN_IDS = 32
# transformers' loss in backward: log-probabilities, and the gradients of these and of the logits, in fp32.
_LOGIT_BYTES = 12


@dataclass(frozen=True)
class Moment:
    name: str
    parts: Parts

    @property
    def total_bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Workload:
    """One step: `rows` sequences of `sequence` tokens.

    `resident` is what stays for the whole step. `gradient_share` is the part of a finished gradient that stays on this rank.
    `keys_at_once` bounds the keys before a chunk that one call of attention's backward sees.
    """

    shape: ModelShape
    rows: int
    sequence: int
    resident: Parts = field(default_factory=dict)
    gradient_share: float = 1.0
    keys_at_once: float = KEYS_AT_ONCE

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence

    @property
    def always(self) -> Parts:
        """What is there at every moment: the resident parts, token ids and rotary angles."""
        rotary = 2 * self.shape.profile.head_size * self.shape.itemsize
        return _sum(self.resident, {"other": self.tokens * (rotary + _TOKEN_IDS)})

    @property
    def wider(self) -> float:
        """A sum's bytes over those of its terms."""
        return max(4, self.shape.itemsize) / self.shape.itemsize

    def gradients(self, finished_layers: int) -> float:
        """Of the head and of the last layers, at their final size."""
        shape = self.shape
        return self.gradient_share * shape.itemsize * (shape.head_trainable + finished_layers * shape.layer_trainable)


def streamed_moments(load: Workload, policies: Sequence[LayerPolicy], chunk_size: int, head_rows: int) -> list[Moment]:
    """Of a streamed step that follows a plan; `head_rows` is the head's chunk."""
    shape, tokens = load.shape, load.tokens
    kept = list(accumulate((_kept(load, policy) for policy in policies), _sum))
    # With adapters the embeddings are a leaf of the graph, made to require a gradient, and are held until backward reaches it.
    leaf = shape.outside_trainable == 0 and policies[0].on_host  # else it is the input that the first layer keeps
    always = _sum(load.always, {"hidden states": tokens * shape.profile.costs.input if leaf else 0.0})
    moments = [Moment("the head", _sum(always, kept[-1], _head(load, head_rows)))]
    for index, policy in enumerate(policies):
        below = _sum(always, kept[index], {"gradients": load.gradients(shape.layers - 1 - index)})
        moments += [
            Moment(f"{name} in backward of layer {index}", _sum(below, parts))
            for name, parts in _layer(load, policy, chunk_size).items()
        ]
    moments.append(_embeddings(load, always))
    return moments


def checkpointing_moments(load: Workload) -> list[Moment]:
    """Of a step with transformers' gradient checkpointing and its own loss on full logits."""
    shape, tokens, eager = load.shape, load.tokens, load.shape.eager
    through = {"hidden states": 2 * tokens * eager.costs.input}
    kept = {"kept inputs": shape.layers * tokens * eager.costs.input}
    logits: Parts = {"logits": _LOGIT_BYTES * tokens * shape.vocabulary}
    graph = {"chunk activations": tokens * eager.widest, "gradients": shape.itemsize * shape.layer_trainable}
    layer = _sum(load.always, kept, through, graph, {"gradients": load.gradients(0), "workspace": _workspace(load, tokens)})
    return [
        Moment("the logits", _sum(load.always, kept, through, logits)),
        Moment(f"backward of layer {shape.layers - 1}", layer),
        _embeddings(load, load.always),
    ]


def host_parts(load: Workload, policies: Sequence[LayerPolicy]) -> Parts:
    """Bytes in pinned host memory."""
    return _sum(*(_kept_anywhere(load, policy) for policy in policies if policy.on_host))


def _kept_anywhere(load: Workload, policy: LayerPolicy) -> Parts:
    costs, tokens = load.shape.profile.costs, load.tokens
    parts: Parts = {"kept inputs": tokens * costs.input}
    if policy.keep == "attention":
        parts["kept attention"] = tokens * (costs.attention + costs.keys_and_values)
    if policy.keep == "all":
        parts["kept graphs"] = tokens * (costs.graph - costs.input)
    return parts


def _kept(load: Workload, policy: LayerPolicy) -> Parts:
    return {} if policy.on_host else _kept_anywhere(load, policy)


def _head(load: Workload, rows: int) -> Parts:
    """The last layer's output, the normed hidden states and their gradient; the weight's sum; logits, or the rounded sum."""
    shape = load.shape
    logits = rows * (shape.vocabulary * shape.itemsize + 4 * shape.width)
    weight_sum = max(4, shape.itemsize) * shape.head_trainable
    return {
        "hidden states": 3 * load.tokens * shape.profile.costs.input,
        "logits": max(logits, shape.itemsize * shape.head_trainable),
        "gradients": weight_sum,
    }


def _layer(load: Workload, policy: LayerPolicy, chunk_size: int) -> dict[str, Parts]:
    """What a layer's backward holds beside what is kept: by the name of the moment."""
    profile, costs, tokens = load.shape.profile, load.shape.profile.costs, load.tokens
    through: Parts = {"hidden states": 2 * tokens * costs.input}
    if policy.keep == "all":
        # The graph itself is among what is kept; its gradients are as wide as a chunk's of the whole sequence.
        extra = tokens * max(0.0, profile.widest - costs.graph + costs.input + costs.keys_and_values)
        returned = load.shape.itemsize * load.shape.layer_trainable
        parts = {"chunk activations": extra, "gradients": returned, "workspace": _workspace(load, tokens)}
        return {"the graph": _sum(through, parts)}
    chunk = load.rows * min(chunk_size, load.sequence)
    whole = chunk == tokens
    # Keys and values unless kept on the device, and the sums of their gradients in the precision of sums.
    held = 0 if policy.keep == "attention" and not policy.on_host else 1
    keys = tokens * costs.keys_and_values * (held + (0 if whole else load.wider))
    if policy.on_host:  # this chunk and the next
        kept = sum(_kept_anywhere(load, policy).values()) / tokens - (
            costs.keys_and_values if policy.keep == "attention" else 0.0
        )
        through = _sum(through, {"chunk activations": 2 * chunk * kept})
    sums: Parts = {"gradients": costs.gradients if whole else costs.gradient_sums}
    wide: Parts = {"keys and values": keys, "chunk activations": chunk * profile.widest}
    rounded: Parts = {"keys and values": keys, "gradients": costs.gradients + costs.gradient_sums}
    return {
        "the widest point": _sum(through, wide, sums),
        "attention": _sum(through, {"keys and values": keys}, _attention_terms(load, chunk), sums),
        "the end": _sum(through, rounded),
    }


def _attention_terms(load: Workload, chunk: int) -> Parts:
    """What the last call of attention's backward for the last chunk leaves beside what was there.

    Its terms of the keys' gradients; the queries', one for each of its two pieces (the keys before the chunk, and its own) and,
    after earlier calls, their sum.
    """
    profile, before = load.shape.profile, load.tokens - chunk
    calls = -(-before // max(1, load.rows * load.keys_at_once))
    queries = 0.0 if not before else profile.query_bytes * (1 if calls <= 1 else 1 + load.wider)
    return {
        "keys and values": (chunk + min(before, load.rows * load.keys_at_once)) * profile.costs.keys_and_values,
        "chunk activations": chunk * (profile.at_attention + queries),
        "workspace": _workspace(load, max(chunk, min(before, load.rows * load.keys_at_once))),
    }


def _workspace(load: Workload, keys: float) -> float:
    """What a kernel (cuDNN, FlashAttention) needs in backward over so many keys of the batch, where several queries share a key.

    Gradients of keys and values for every QUERY head, which it then sums over the heads of each group.
    """
    profile = load.shape.profile
    grouped = profile.query_heads != profile.key_heads
    return keys * 2 * profile.query_heads * profile.head_size * load.shape.itemsize if grouped else 0.0


def _embeddings(load: Workload, always: Parts) -> Moment:
    """The embeddings' gradient, beside the head's where they are one matrix, and the gradient that it is made from."""
    shape = load.shape
    dense = shape.itemsize * (shape.head_trainable if shape.tied else shape.outside_trainable - shape.head_trainable)
    parts = {"hidden states": load.tokens * shape.profile.costs.input, "gradients": load.gradients(shape.layers) + dense}
    return Moment("the embeddings", _sum(always, parts))


def _sum(*parts: Parts) -> Parts:
    total: Parts = {}
    for part in parts:
        for name, count in part.items():
            assert name in COMPONENTS, name
            total[name] = total.get(name, 0.0) + count
    return total
