"""Bytes by component at each moment of a streamed step's backward that can be its worst.

In the backward pass of a layer these are
    the widest point of a chunk's graph    its activations and their gradients
    attention's backward                   a kernel's terms of the keys' gradients, and its workspace
    the end                                the sums of the layer's gradients, and one of them rounded
What a layer's chunk holds at the first two is measured (`memory.measure`); what is as long as the sequence is written out here.
`memory.planner` chooses plans by these numbers, and `streamgrad.plan` shows them.

Known limits: the allocator's fragments are not counted, nor chunks that come back from the host while the program runs ahead of
the device, whose memory waits for it (up to 1.2 GB in the records).
"""

from __future__ import annotations

from dataclasses import dataclass

# Keys before its own that a chunk's backward looks at together; what kernels make for their keys then has a bound.
KEYS_AT_ONCE = 32_768

COMPONENTS = (
    "weights", "optimizer state", "gradients", "kept inputs", "kept attention", "kept graphs", "hidden states",
    "keys and values", "chunk activations", "workspace", "logits", "other",
)  # fmt: skip

Parts = dict[str, float]


@dataclass(frozen=True)
class LayerPolicy:
    keep: str  # "input", "attention" or "all"
    on_host: bool = False

    def __str__(self) -> str:
        return f"{self.keep} on host" if self.on_host else self.keep

    @property
    def holds_attention(self) -> bool:
        """On the device, so that keys, values and attention's output need not be made or brought again."""
        return self.keep == "attention" and not self.on_host


@dataclass(frozen=True)
class LayerCosts:
    """Bytes a token of one layer's tensors, and of its parameters as a whole."""

    input: float
    keys_and_values: float
    key_sums: float  # of the gradients of keys and values, in the precision of sums
    attention: float  # output and log-sum-exp; as many bytes as the queries, but for the latter
    graph: float  # all that an ordinary graph saves, the input included
    # At the largest moment of a chunk's re-run and backward, and when attention's backward has made the queries' gradient: beside
    # the chunk's input, its output's gradient, and keys and values.
    widest: float
    at_attention: float
    gradients: float  # of its trainable parameters
    gradient_sums: float  # of the same, in the precision of sums
    largest_gradient: float
    states: float = 0.0  # of a sequence, between two chunks

    def kept(self, policy: LayerPolicy) -> Parts:
        """What waits for backward, a token."""
        parts: Parts = {"kept inputs": self.input}
        if policy.keep == "attention":
            parts["kept attention"] = self.attention + self.keys_and_values
        if policy.keep == "all":
            parts["kept graphs"] = self.graph - self.input
        return parts

    @property
    def workspace(self) -> float:
        """Of a kernel's backward, a key: gradients of keys and values for every QUERY head, where several share a key."""
        shared = self.keys_and_values < 1.5 * self.attention
        return 2 * self.attention if shared else 0.0


@dataclass(frozen=True)
class Shape:
    """Of a batch: `rows` sequences of `sequence` tokens. Attention's backward sees at most `keys_at_once` keys in a call."""

    rows: int
    sequence: int
    keys_at_once: float = KEYS_AT_ONCE

    def __str__(self) -> str:
        return f"{self.rows} x {self.sequence} tokens"

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


def layer_phases(costs: LayerCosts, shape: Shape, policy: LayerPolicy, chunk_size: int) -> dict[str, Parts]:
    """What a layer's backward holds beside what is kept and what other layers' have left, by the name of the moment."""
    tokens = shape.tokens
    through: Parts = {"hidden states": 2 * tokens * costs.input}  # the gradient coming in and the one going out
    if policy.keep == "all":
        # The graph itself is among what is kept; its gradients are as wide as a chunk's of the whole sequence.
        extra = tokens * max(0.0, costs.widest - costs.graph + costs.input + costs.keys_and_values)
        parts = {"chunk activations": extra, "gradients": costs.gradients, "workspace": tokens * costs.workspace}
        return {"the graph": sum_of(through, parts)}
    chunk = shape.rows * min(chunk_size, shape.sequence)
    whole = chunk == tokens
    keys = tokens * ((0.0 if policy.holds_attention else costs.keys_and_values) + (0.0 if whole else costs.key_sums))
    keys += 0.0 if whole else shape.rows * costs.states * -(-shape.sequence // chunk_size)
    if policy.on_host:  # this chunk and the next or, from a layer's last chunk on, the keys and values of the layer below
        brought = costs.keys_and_values if policy.keep == "attention" else 0.0
        kept = sum(costs.kept(policy).values()) - brought
        through = sum_of(through, {"chunk activations": 2 * chunk * kept, "keys and values": tokens * brought})
    made = 0.0 if policy.keep == "input" else costs.attention  # part of a chunk's graph that is kept, or has been brought
    sums = costs.gradients if whole else costs.gradient_sums
    moments = {
        "the widest point": {"chunk activations": chunk * (costs.widest - made), "gradients": sums},
        "attention": sum_of(_attention_terms(costs, shape, chunk, made), {"gradients": sums}),
        "the end": {"gradients": sums + (0.0 if whole else costs.largest_gradient)},
    }
    return {name: sum_of(through, {"keys and values": keys}, parts) for name, parts in moments.items()}


def _attention_terms(costs: LayerCosts, shape: Shape, chunk: int, made: float) -> Parts:
    """What the last call of attention's backward for the last chunk leaves beside what was there.

    Its terms of the keys' gradients; the queries', one for each of its two pieces (the keys before the chunk, and its own) and,
    after earlier calls, their sum.
    """
    before, at_once = shape.tokens - chunk, shape.rows * shape.keys_at_once
    calls = -(-before // max(1, at_once))
    sum_factor = costs.key_sums / costs.keys_and_values if costs.keys_and_values else 1.0
    queries = 0.0 if not before else costs.attention * (1 if calls <= 1 else 1 + sum_factor)
    return {
        "keys and values": (chunk + min(before, at_once)) * costs.keys_and_values,
        "chunk activations": chunk * (costs.at_attention - made + queries),
        "workspace": max(chunk, min(before, at_once)) * costs.workspace,
    }


def head_parts(hidden_bytes: float, logit_bytes: float, trainable: int, itemsize: int) -> Parts:
    """While the head works.

    The last layer's output, the normed hidden states and their gradient; the sum of the weight's gradient, in fp32 at least; and
    a chunk of logits or, at the end, that sum rounded.
    """
    return {
        "hidden states": 3 * hidden_bytes,
        "logits": max(logit_bytes, itemsize * trainable),
        "gradients": max(4, itemsize) * trainable,
    }


def embedding_parts(tokens: int, token_bytes: float, *, width_sum_bytes: float, dense_bytes: float) -> Parts:
    """Where backward reaches the embeddings: the gradient that arrives there, and theirs, which is as large as the vocabulary.

    To make it, torch sums rows of equal ids in fp32, at most ten together: it has room for a sum of every id that there may be,
    and for one more for every ten tokens.
    """
    sums = (tokens / 10 + min(tokens, dense_bytes / token_bytes)) * width_sum_bytes if dense_bytes else 0.0
    return {"hidden states": tokens * token_bytes, "gradients": dense_bytes, "other": sums}


def sum_of(*parts: Parts) -> Parts:
    total: Parts = {}
    for part in parts:
        for name, count in part.items():
            assert name in COMPONENTS, name
            total[name] = total.get(name, 0.0) + count
    return total
