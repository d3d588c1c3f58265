"""What a model's layers cost, and the bytes of a layer's backward by component and phase.

A phase is a point in time that can hold the most bytes of a step. In the backward pass of a layer these are
    the widest point of a chunk's graph    its activations and their gradients
    attention's backward                   a kernel's terms of the keys' gradients, and its workspace
    the end                                the sums of the layer's gradients, and one of them rounded
What a layer's chunk holds in the first two is counted: by a probe while training (`memory.measure`) or by a dry run of the model
(`hf.estimates.dry_run`). What is as long as the sequence is written out here. `memory.planner` chooses plans by these numbers,
and `streamgrad plan` shows them.

Known limits: the allocator's fragments are not counted. Nor are chunks that come back from the host while the program runs ahead
of the device, whose memory waits for it (up to 1.2 GB in the records).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from streamgrad.engine.policy import LayerPolicy

# The most earlier keys that a chunk's backward takes in one call, which bounds what kernels allocate for their keys.
KEYS_AT_ONCE = 32_768

# The most bytes of a gradient that tied embeddings add to their head's at a time. Every block sorts all ids once more.
_TIED_BLOCK = 2**27

# A layer that makes more tensors a token than this loops over blocks of tokens: 64 to 256 of them, dozens of tensors a block.
_LOOPED, _LOOPED_TOKENS = 1 / 16, 4096

# Tokens of a batch beyond which forward alone gets no faster: Python then takes less time than a large GPU.
FORWARD_TOKENS = 8192

COMPONENTS = (
    "weights", "optimizer state", "gradients", "kept inputs", "kept attention", "kept graphs", "hidden states",
    "keys and values", "chunk activations", "workspace", "logits", "other",
)  # fmt: skip

Parts = dict[str, float]

# Bytes a weight, as bitsandbytes keeps it: nf4 has a scale in fp32 for every 64 weights, int8 one for every row.
QUANTIZED_SIZES = {"none": None, "nf4": 0.5 + 4 / 64, "int8": 1.0}


@dataclass(frozen=True)
class LayerCosts:
    """Bytes of one layer: of its tensors, a token, and of all its gradients."""

    input: float
    keys_and_values: float
    key_sums: float  # of the gradients of keys and values, in the precision of sums
    attention: float  # output and log-sum-exp; as many bytes as the queries, but for the latter
    graph: float  # all that an ordinary graph saves, the input included
    # In the largest phase of a chunk's re-run and backward, and when attention's backward has made the queries' gradient: beside
    # the chunk's input, its output's gradient, and keys and values.
    widest: float
    at_attention: float
    gradients: float  # of its trainable parameters
    gradient_sums: float  # of the same, in the precision of sums
    largest_gradient: float
    states: float = 0.0  # of a sequence, between two chunks
    weights: float = 0.0  # made on the way, at most at a time: dequantised, cast by autocast, or with an adapter added
    recorded: float = 0.0  # router logits, and probabilities or gradients of them, which stay on the device whatever is kept
    chunk_gradients: float = 0.0  # of experts in one tensor, which each of several chunks makes anew
    looped: float = 0.0  # tensors made a token by a layer with states: many, where it loops over blocks of tokens
    projection: float = 0.0  # the product that reads attention's output
    forward: float = 0.0  # in the largest phase of a run without a graph, beside its input, and keys and values; 0 if not known

    @classmethod
    def largest(cls, kinds: Iterable[LayerCosts]) -> LayerCosts:
        """Return the most of every cost over layers of several kinds; that of forward is not known if it is not of each."""
        kinds = list(kinds)
        most = cls(*map(max, zip(*map(astuple, kinds), strict=True)))
        return most if all(kind.forward for kind in kinds) else replace(most, forward=0.0)

    @property
    def longest_chunk(self) -> float:
        """Return the tokens of a row beyond which chunks only take longer; infinite without a loop over blocks of tokens.

        In backward, every turn of such a loop makes and adds gradients of the whole chunk, so time grows with its square: four
        layers of Qwen3-Next by transformers' own code of the delta rule take 0.5 s for 8,192 tokens and 4.8 s for 32,768 at once.
        """
        return _LOOPED_TOKENS if self.looped > _LOOPED else math.inf

    def kept(self, policy: LayerPolicy) -> Parts:
        """Return the bytes a token that wait for backward."""
        parts: Parts = {"kept inputs": self.input}
        if policy.keep == "attention":
            parts["kept attention"] = self.attention + self.keys_and_values + (self.projection if policy.projection else 0.0)
        if policy.keep == "all":
            parts["kept graphs"] = self.graph - self.input
        return parts

    @property
    def workspace(self) -> float:
        """Return the bytes a key that attention's backward takes for itself.

        Where several query heads share a key, kernels make gradients of keys and values for every QUERY head.
        """
        shared = self.keys_and_values < 1.5 * self.attention
        return 2 * self.attention if shared else 0.0


def held_in_backward(policies: Sequence[LayerPolicy], kept: Sequence[float]) -> list[float]:
    """Return, for each layer, what all layers hold while its backward runs, if each one keeps `kept`.

    The layers up to it hold what they keep from forward on, and those of its own segment what was made when they were run again.
    """
    held, below, again = [], 0.0, 0.0
    for policy, own in zip(policies, kept, strict=True):
        if policy.recomputed:
            again += own
        else:
            below, again = below + own, 0.0
        held.append(below + again)
    return held


@dataclass(frozen=True)
class LayerProfile:
    """Costs of one layer in bytes and in FLOPs a token, without attention's own FLOPs, which depend on the length."""

    costs: LayerCosts
    forward_flops: float
    backward_flops: float
    projection_flops: float  # of the part of forward that makes queries, keys and values
    query_heads: int
    head_size: int
    positions: float  # bytes beside its input when it is called: positions, and all sets of rotary angles


@dataclass(frozen=True)
class ModelShape:
    """A model as far as memory and time are concerned. Numbers of parameters include adapters."""

    layers: int
    full_attention_layers: int  # the others have a window
    window: int | None
    width: int
    vocabulary: int
    itemsize: int
    layer_parameters: int
    layer_trainable: int
    outside_parameters: int
    outside_trainable: int
    head_parameters: int
    head_trainable: int
    tied: bool
    linear_weights: int  # of a layer, on average: what quantisation packs
    largest_linear: int
    profile: LayerProfile  # with fused parts
    eager: LayerProfile  # as transformers runs it
    weights_saved: float = 0.0  # bytes, by quantisation

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outside_parameters

    @property
    def trainable(self) -> int:
        return self.layers * self.layer_trainable + self.outside_trainable

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> ModelShape:
        """Return the shape that `dataclasses.asdict` made `row` of."""
        profiles = {name: row[name] | {"costs": LayerCosts(**row[name]["costs"])} for name in ("profile", "eager")}
        return cls(**row | {name: LayerProfile(**profile) for name, profile in profiles.items()})

    def quantized(self, kind: str) -> ModelShape:
        """Return the shape with the linear maps of its layers in few bits. A product dequantises the weight that it needs."""
        size = QUANTIZED_SIZES[kind]
        if size is None:
            return self

        def dequantizing(profile: LayerProfile) -> LayerProfile:
            weights = max(profile.costs.weights, self.itemsize * self.largest_linear)
            return replace(profile, costs=replace(profile.costs, weights=weights))

        saved = self.layers * self.linear_weights * (self.itemsize - size)
        return replace(self, profile=dequantizing(self.profile), eager=dequantizing(self.eager), weights_saved=saved)


@dataclass(frozen=True)
class Shape:
    """A batch of `rows` sequences of `sequence` tokens. Attention's backward sees at most `keys_at_once` keys in a call.

    Where ranks share a sequence, these are the tokens of one rank, and keys with as many heads as each of its tokens has. A layer
    at work then holds the keys and values of `ring` ranks.
    """

    rows: int
    sequence: int
    keys_at_once: float = KEYS_AT_ONCE
    ring: int = 1

    def __str__(self) -> str:
        return f"{self.rows} x {self.sequence} tokens"

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence


def layer_phases(costs: LayerCosts, shape: Shape, policy: LayerPolicy, chunk_size: int) -> dict[str, Parts]:
    """Return what a layer's backward holds beside what is kept and what other layers' have left, by the phase's name.

    In a recomputed layer's, one phase is the run of the layers below that make its input.
    """
    tokens, away = shape.tokens, 2 if policy.on_host else 0
    # The gradient coming in and the one going out, and weights while they are multiplied.
    through: Parts = {"hidden states": 2 * tokens * costs.input, "workspace": costs.weights}
    if policy.keep == "all":
        # The graph itself is among what is kept; its gradients are as wide as a chunk's of the whole sequence.
        # A layer with states has several chunks in one graph.
        again = costs.chunk_gradients if costs.states and chunk_size < shape.sequence else 0.0
        parts = sum_of(through, {"gradients": costs.gradients + again, "workspace": tokens * costs.workspace})
        saved = costs.graph - costs.input - shape.ring * costs.keys_and_values
        found = {"the graph": sum_of(parts, {"chunk activations": tokens * max(0.0, costs.widest - saved)})}
        if shape.ring > 1:
            terms = _attention_terms(costs, shape, tokens, 0.0)["keys and values"] + shape.ring * tokens * costs.key_sums
            at_attention = tokens * (costs.at_attention + costs.attention - saved)  # less what has been freed
            found["attention"] = sum_of(parts, {"keys and values": max(0.0, terms + at_attention)})
        return found
    chunk = shape.rows * min(chunk_size, shape.sequence)
    whole = chunk == tokens
    in_ring = shape.ring > 1  # of whose keys and values a rank keeps its own, and gathers the others
    keys = 0.0 if policy.holds_attention and not in_ring else shape.ring * tokens * costs.keys_and_values
    keys += 0.0 if whole and not in_ring else shape.ring * tokens * costs.key_sums
    keys += 0.0 if whole else shape.rows * costs.states * -(-shape.sequence // chunk_size)
    if policy.on_host:  # this chunk and the next or, from a layer's last chunk on, the keys and values of the layer below
        through = sum_of(through, brought_back(costs, shape, policy, 2 * chunk))
    made = 0.0 if policy.keep == "input" else costs.attention  # part of a chunk's graph that is kept, or has been brought
    sums = costs.gradients if whole else costs.gradient_sums
    phases = {
        "the widest point": {
            "chunk activations": chunk * (costs.widest - made),
            "gradients": sums + (0.0 if whole else costs.chunk_gradients),
        },
        "attention": sum_of(_attention_terms(costs, shape, chunk, made), {"gradients": sums}),
        "the end": {"gradients": sums + (0.0 if whole else costs.largest_gradient)},
    }
    found = {name: sum_of(through, {"keys and values": keys}, parts) for name, parts in phases.items()}
    if policy.recomputed:
        # A layer below runs forward: there are the gradient coming in and, where they go to the host, its input and its output.
        found["the layers below"] = {
            "hidden states": (1 + away) * tokens * costs.input,
            "keys and values": tokens * costs.keys_and_values,
            "chunk activations": chunk * costs.widest,
            "workspace": costs.weights,
        }
    return found


def brought_back(costs: LayerCosts, shape: Shape, policy: LayerPolicy, tokens: int) -> Parts:
    """Return the bytes of a layer's keys and values, if the host has them, and of what else it has of so many `tokens`."""
    keys = costs.keys_and_values if policy.keep == "attention" else 0.0
    return {"chunk activations": tokens * (sum(costs.kept(policy).values()) - keys), "keys and values": shape.tokens * keys}


def brought_ahead(costs: LayerCosts, shape: Shape, policies: Sequence[LayerPolicy], chunk_sizes: Sequence[int]) -> list[Parts]:
    """Return, for each layer that keeps everything, what comes back from the host meanwhile, for the layer below."""
    found: list[Parts] = [{}]
    for below, policy, size in zip(policies, policies[1:], chunk_sizes, strict=False):
        comes = policy.keep == "all" and below.on_host
        found.append(brought_back(costs, shape, below, shape.rows * min(size, shape.sequence)) if comes else {})
    return found


@functools.lru_cache(maxsize=1024)
def chunks_in_forward(costs: LayerCosts, shape: Shape, policy: LayerPolicy, chunk_size: int) -> int:
    """Return how many chunks of a layer can run forward together and hold no more than its backward does.

    Forward has neither a graph nor gradients nor sums of them. Beside its input and its output, there are two of the attention of
    these chunks where it is kept, and the input waits for its copy to the host. The number is the same on the device and on the
    host, so that both round alike, and a power of two: kernels are prepared for each shape.
    """
    if not costs.forward or policy.keep == "all" or shape.ring > 1:
        return 1
    chunk, tokens = shape.rows * min(chunk_size, shape.sequence), shape.tokens
    of_attention = costs.attention + costs.projection if policy.keep == "attention" else 0.0
    room, work = float(FORWARD_TOKENS), costs.forward + of_attention
    for on_host in (False, True):
        held = layer_phases(costs, shape, LayerPolicy(policy.keep, on_host), chunk_size).values()
        around = tokens * ((3 if on_host else 2) * costs.input + costs.keys_and_values) + costs.weights
        room = min(room, (max(sum(parts.values()) for parts in held) - around) / work)
    return 1 << max(1, int(room / chunk)).bit_length() - 1


def _attention_terms(costs: LayerCosts, shape: Shape, chunk: int, made: float) -> Parts:
    """Return what the last call of attention's backward for the last chunk leaves beside what was there.

    These are its terms of the keys' gradients, and the queries' gradients: one for each of its two pieces (the keys before the
    chunk, and its own) and, after earlier calls, their sum.
    """
    ring, at_once = shape.ring, shape.rows * shape.keys_at_once
    before = ring * (shape.tokens - chunk)
    several = ring > 1 or before > at_once
    sum_factor = costs.key_sums / costs.keys_and_values if costs.keys_and_values else 1.0
    queries = 0.0 if not before else costs.attention * (1 + sum_factor if several else 1)
    keys, own = (chunk + min(before, at_once)) * costs.keys_and_values, float(chunk)
    if ring > 1:
        # The chunk's own keys come first. While earlier keys have their turn, what the rank owes to others' is on its way, and
        # what others owe to its own arrives, summed.
        own = min(ring * chunk, at_once + chunk)
        on_the_way = (ring + 1) * chunk * costs.key_sums
        keys = max(own * costs.keys_and_values, min(before, at_once) * costs.keys_and_values + on_the_way)
    return {
        "keys and values": keys,
        "chunk activations": chunk * (costs.at_attention - made + queries),
        "workspace": max(own, min(before, at_once)) * costs.workspace,
    }


def head_parts(hidden_bytes: float, logit_bytes: float, trainable: int, itemsize: int) -> Parts:
    """Return what the head holds while it works.

    There are the last layer's output, the normed hidden states and their gradient; the sum of the weight's gradient, in fp32 at
    least; and a chunk of logits or, at the end, that sum rounded.
    """
    return {
        "hidden states": 3 * hidden_bytes,
        "logits": max(logit_bytes, itemsize * trainable),
        "gradients": max(4, itemsize) * trainable,
    }


def tied_block_rows(vocabulary: int, width: int, itemsize: int) -> int:
    """Return the rows of tied embeddings whose gradient is added to the head's at a time (`head.tied_weight`)."""
    return max(1, min(vocabulary, _TIED_BLOCK // (width * itemsize)))


def embedding_parts(tokens: int, token_bytes: float, *, width_sum_bytes: float, dense_bytes: float) -> Parts:
    """Return what backward holds where it reaches the embeddings.

    There are the gradient that arrives, and the embeddings' own, which is as large as the vocabulary or, of tied ones, as a block
    of it. To make that, torch sums rows of equal ids in fp32, at most ten together: it has room for a sum of every id that there
    may be, and for one more for every ten tokens.
    """
    sums = (tokens / 10 + min(tokens, dense_bytes / token_bytes)) * width_sum_bytes if dense_bytes else 0.0
    return {"hidden states": tokens * token_bytes, "gradients": dense_bytes, "other": sums}


def sum_of(*parts: Parts) -> Parts:
    """Return the sum of each component."""
    total: Parts = {}
    for part in parts:
        for name, count in part.items():
            assert name in COMPONENTS, name
            total[name] = total.get(name, 0.0) + count
    return total
