"""What each layer keeps, and where: the fastest choice that a memory budget allows.

From the fastest to the smallest, a layer keeps
    everything                       nothing is run again
    its input and its attention      everything but attention is run again
    its input                        everything is run again
    nothing (`recomputed`)           its input, by running the layers below once more, and then everything
The two in the middle are kept on the device or in host memory; copies to and from the host run beside computation. From the first
layer to the last, a plan is `input | attention on host | attention on device | everything`. The last layers keep the most,
because backward frees theirs first; the first ones use the host, because their copies have the longest time to come back. The
host is used only where the device cannot hold the attention of all layers. Then, unless a sequence is very long, the device keeps
everything of a few layers rather than the attention of many, which the host holds as well. If no such plan fits with chunks of a
usual size, layers form segments of n, of which the first keeps its input. n never exceeds the square root of the number of
layers: beyond it, more inputs would be made again at a time than are saved. The smallest chunks are tried last.

`predicted_peak` is the arithmetic that choices are made by, over the phases of `memory.costs`.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

from streamgrad.engine.policy import LayerPolicy
from streamgrad.memory.costs import (
    KEYS_AT_ONCE,
    LayerCosts,
    Shape,
    brought_ahead,
    embedding_parts,
    head_parts,
    held_in_backward,
    layer_phases,
)

# Share of the free memory that is left for fragments: where the allocator's segments can grow, and where they cannot.
MARGIN, MARGIN_IN_FIXED_SEGMENTS = 0.05, 0.1
# Factor on what a layer and the head hold while they work, for what is not foreseen.
UNFORESEEN = 1.03
# Share of the available host memory that plans use; the rest is for the program itself and for the kernel.
HOST_SHARE = 0.85
# Tokens of a batch in a chunk. A step of 36,000 is 1.4 per cent faster in one chunk than in three (docs/performance.md), and its
# attention needs one of cuDNN's plans instead of three: the one that layers with their whole graph have too. Below 6,144 matrix
# products do not fill a large GPU, so smaller ones come after other ways to save memory. The last come after all: chunks that
# take longer to start than to compute are slower than one more forward pass.
LONGEST_WHOLE = 65_536
LARGE_CHUNKS = 32_768, 24_576, 20_480, 16_384, 12_288, 8192, 6144
SMALL_CHUNKS, LAST_CHUNKS = (4096, 2048), (1024, 512, 256)
# Tokens of a sequence up to which host memory is spent on time alone: on the product that reads attention, and on the attention
# of all layers, so that the device can keep everything of a few. By the first, a step of 36,000 is 2.5 per cent faster; by the
# second 2 per cent at 24,000 and half a per cent at 36,000 (docs/performance.md). What is not run again grows with the tokens,
# attention with their square: at 131,072, both together would save one step in 400, for three times the host memory.
LONGEST_WITH_MORE_ON_HOST = 98_304
# Where nothing is known about memory.
USUAL_CHUNK = 8192


def readable(count: float) -> str:
    """Return bytes as text in GiB, or in MiB where there are few."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Step:
    """One step as far as memory is concerned.

    A layer keeps what its kind does: `kind_of` has, for each layer, the place of its kind among `kinds`. Both are empty where all
    are alike. At work, each is taken for the largest, whose `costs` are the most of any kind.
    """

    costs: LayerCosts
    layers: int
    shape: Shape
    resident_bytes: float  # on the device already: weights, optimizer state, gradients so far
    layer_gradient_bytes: float  # that a finished layer leaves
    head_bytes: float  # held while the head works, its hidden states and their gradient included
    head_gradient_bytes: float  # that it leaves
    embedding_bytes: float  # where backward reaches the embeddings, beside the gradients of all layers and the head
    leaf_bytes: float = 0.0  # of the first layer's input, where it is a leaf of the graph: it stays, whatever that layer keeps
    kinds: tuple[LayerCosts, ...] = ()
    kind_of: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    policies: tuple[LayerPolicy, ...]
    chunk_sizes: tuple[int, ...]  # of each layer
    peak_bytes: float
    host_bytes: float
    chunks_in_forward: tuple[int, ...] = ()  # that run together, in each layer; one where nothing is said

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} x {policy}" for policy, count in Counter(self.policies).items())
        small, large = min(self.chunk_sizes), max(self.chunk_sizes)
        chunks = f"chunks of {small} tokens" if len(set(self.chunk_sizes)) < 3 else f"chunks of {small} to {large} tokens"
        if small != large:
            count = self.chunk_sizes.count(large)
            chunks += f", of {large} in {count} layer{'s' * (count > 1)}"
        peak = f"; about {readable(self.peak_bytes)} on the device" if self.peak_bytes else ""  # 0 where nothing was measured
        return f"{kinds}; {chunks}{peak}" + (f" and {readable(self.host_bytes)} on the host" if self.host_bytes else "")


def predicted_peak(step: Step, policies: Sequence[LayerPolicy], chunk_sizes: Sequence[int]) -> float:
    """Return the device bytes of the largest phase: the head's work, a layer's backward pass, or the end of backward."""
    around, at_head = _held_around(step, policies)
    each = list(zip(policies, chunk_sizes, strict=True))
    work = {one: _worst_in_layer(step.costs, step.shape, *one) for one in set(each)}
    ahead = (sum(parts.values()) for parts in brought_ahead(step.costs, step.shape, policies, chunk_sizes))
    gradients = step.resident_bytes + step.head_gradient_bytes + step.layers * step.layer_gradient_bytes
    return max(
        at_head + UNFORESEEN * step.head_bytes,
        gradients + step.embedding_bytes + step.leaf_bytes,
        *(held + coming + work[one] for held, coming, one in zip(around, ahead, each, strict=True)),
    )


def _held_around(step: Step, policies: Sequence[LayerPolicy]) -> tuple[list[float], float]:
    """Return the bytes held beside each layer when its backward runs, and beside the head when it works."""
    kept = _kept(step, policies, on_host=False)
    always = step.resident_bytes + (step.leaf_bytes if policies[0].on_host else 0.0)
    held = [
        always + count + step.head_gradient_bytes + finished * step.layer_gradient_bytes
        for finished, count in zip(range(step.layers - 1, -1, -1), held_in_backward(policies, kept), strict=True)
    ]
    return held, always + sum(own for policy, own in zip(policies, kept, strict=True) if not policy.recomputed)


@functools.lru_cache(maxsize=1024)
def _worst_in_layer(costs: LayerCosts, shape: Shape, policy: LayerPolicy, chunk_size: int) -> float:
    return UNFORESEEN * max(sum(parts.values()) for parts in layer_phases(costs, shape, policy, chunk_size).values())


def _kept(step: Step, policies: Sequence[LayerPolicy], *, on_host: bool) -> list[float]:
    """Return the bytes that each layer keeps in one of the two places."""
    kinds, kind_of = step.kinds or (step.costs,), step.kind_of or (0,) * step.layers
    each = list(zip(kind_of, policies, strict=True))
    kept = {(kind, policy): _kept_bytes(step, policy, kinds[kind]) for kind, policy in set(each) if policy.on_host == on_host}
    return [kept.get(of_layer, 0.0) for of_layer in each]


def _kept_bytes(step: Step, policy: LayerPolicy, costs: LayerCosts) -> float:
    return step.shape.tokens * sum(costs.kept(policy).values())


def host_bytes(step: Step, policies: Sequence[LayerPolicy]) -> float:
    """Return the most that layers keep on the host at a time; buffers of finished layers are used again."""
    return max(held_in_backward(policies, _kept(step, policies, on_host=True)))


def in_segments(policies: Sequence[LayerPolicy], layers: int) -> list[LayerPolicy]:
    """Return the policies in segments of so many `layers`, of which all but the first are recomputed.

    The last layer of a segment is run by its own backward alone, so there is no attention to be kept.
    """
    found = [replace(policy, recomputed=index % layers > 0) for index, policy in enumerate(policies)]
    ends = [*(not policy.recomputed for policy in found[1:]), True]
    return [
        replace(policy, keep="input") if policy.recomputed and is_end else policy
        for policy, is_end in zip(found, ends, strict=True)
    ]


def regular_chunk(batch: int, sequence: int, tokens: int) -> int:
    """Return the size of chunks of at most `tokens` tokens of a batch.

    It does not follow the length of the sequence, so that most chunks of most sequences have the same few shapes: some kernels
    are prepared for each shape.
    """
    return min(sequence, max(1, tokens // batch))


def automatic_chunk(batch: int, sequence: int) -> int:
    """Return the size of a layer's chunks where nothing is known about memory."""
    return regular_chunk(batch, sequence, USUAL_CHUNK)


@dataclass(frozen=True)
class Choices:
    """`keep` and `offload` as in `StreamConfig`; the size of chunks and the layers of a segment, or None if the plan chooses."""

    keep: str
    offload: str
    chunk_size: int | None
    recompute_layers: int | None = None


@dataclass(frozen=True)
class Budget:
    """Bytes that a step may use: on the device in all, and on the host for what layers keep."""

    device_bytes: float
    host_bytes: float


@functools.lru_cache(maxsize=64)
def choose_plan(step: Step, choices: Choices, budget: Budget) -> tuple[Plan, bool]:
    """Return the fastest plan within the budget and True, or the smallest plan of all and False."""
    tokens, chunk_size = (*LARGE_CHUNKS, *SMALL_CHUNKS, *LAST_CHUNKS), choices.chunk_size
    rows, longest = step.shape.rows, int(min(step.shape.sequence, step.costs.longest_chunk))
    descending = [chunk_size] if chunk_size else [regular_chunk(rows, longest, n) for n in tokens]
    # Every layer takes the largest chunks that it has room for; tried here is the size that a layer without room takes.
    worst_sizes = [chunk_size] if chunk_size else list(dict.fromkeys(descending[len(LARGE_CHUNKS) - 1 :]))
    if not chunk_size and rows * longest <= LONGEST_WHOLE:
        descending = [longest, *descending]

    @functools.cache
    def room(policy: LayerPolicy) -> list[tuple[int, float]]:
        """Return what may be held beside a layer, by the size of its chunks, from large to small."""
        return [(size, budget.device_bytes - _worst_in_layer(step.costs, step.shape, policy, size)) for size in descending]

    def plans(segment: int, worst: int, *, attends_once: bool = False) -> Iterator[Plan]:
        single = segment == 1
        for policies in _candidates(step, choices, budget.host_bytes) if single else _in_segments_of(segment, step, choices):
            if attends_once and any(policy.keep == "input" for policy in policies):
                continue
            chunks = _chunk_sizes(step, policies, worst, room)
            yield Plan(tuple(policies), chunks, predicted_peak(step, policies, chunks), host_bytes(step, policies))

    def fits(plan: Plan) -> bool:
        return plan.peak_bytes <= budget.device_bytes and plan.host_bytes <= budget.host_bytes

    def fastest(segment: int, sizes: Sequence[int]) -> Plan:
        """Return the first plan that fits; attention runs again in none where somewhat smaller chunks in some layers would do."""
        moderate = [size for size in sizes if size >= regular_chunk(rows, longest, SMALL_CHUNKS[0])]
        attending_once = (plan for size in moderate for plan in plans(segment, size, attends_once=True))
        return next(filter(fits, chain(attending_once, (plan for size in sizes for plan in plans(segment, size)))))

    def excess(plan: Plan) -> tuple[float, float]:
        """With as much of the host as there is; if each plan needs more of it, the one that needs the least."""
        return max(plan.host_bytes, budget.host_bytes), plan.peak_bytes

    too_large: list[tuple[int, Plan]] = []
    # Segments of every size are tried without the last chunks, and then with them: one round, where all chunks are of one sort.
    usual = [size for size in worst_sizes if size >= regular_chunk(rows, longest, SMALL_CHUNKS[-1])]
    rounds = [usual, worst_sizes] if 0 < len(usual) < len(worst_sizes) else [worst_sizes]
    for sizes, segment in product(rounds, _segment_sizes(step, choices)):
        for smallest in plans(segment, sizes[-1]):
            if fits(smallest):  # else no plan with larger chunks does
                return fastest(segment, sizes), True
            if sizes is worst_sizes:
                too_large.append((segment, smallest))
    segment, least = min(too_large, key=lambda found: excess(found[1]))
    # Larger chunks are faster where something else than a chunk needs the most.
    return next(plan for size in worst_sizes for plan in plans(segment, size) if excess(plan) <= excess(least)), False


def _chunk_sizes(
    step: Step, policies: Sequence[LayerPolicy], worst: int, room: Callable[[LayerPolicy], list[tuple[int, float]]]
) -> tuple[int, ...]:
    """Return the chunk size of each layer: the largest that it has room for, or else `worst`.

    Backward runs from the last layer to the first. Gradients collect on the way, so the last layers have the most room; where few
    parameters train, the first layers have, since later ones have freed what they kept. Of the layers that keep on the host, the
    last ones may be one chunk each and the others share one size: host buffers are as long as a chunk and are reused between
    layers, steps and lengths, and a layer at work brings back the last chunk of the one below, which must not be longer.
    """
    around, _ = _held_around(step, policies)
    sizes = [
        next((size for size, limit in room(policy) if size <= worst or held <= limit), worst)
        for held, policy in zip(around, policies, strict=True)
    ]
    away = [index for index, policy in enumerate(policies) if policy.on_host]
    shared = min((sizes[index] for index in away), default=worst)
    is_whole = True
    for index in reversed(away):
        is_whole = is_whole and sizes[index] >= step.shape.sequence
        sizes[index] = sizes[index] if is_whole else shared
    return tuple(sizes)


def _candidates(step: Step, choices: Choices, host_budget_bytes: float) -> Iterator[list[LayerPolicy]]:
    """Yield the plans that the choices allow, the fastest first."""
    layers, keep, offload = step.layers, choices.keep, choices.offload
    everything, attention, inputs = LayerPolicy("all"), LayerPolicy("attention"), LayerPolicy("input")
    inputs_away = LayerPolicy("input", on_host=True)

    def mixes(first: LayerPolicy, last: LayerPolicy) -> Iterator[list[LayerPolicy]]:
        for count in range(layers + 1):
            yield [first] * count + [last] * (layers - count)

    if keep == "all":
        yield [everything] * layers
    if keep == "auto" and offload != "host":
        yield from mixes(attention, everything)
    if keep == "attention" and offload != "host":
        yield [attention] * layers
    if keep == "auto" and offload == "auto" and step.shape.sequence <= LONGEST_WITH_MORE_ON_HOST:
        for count in range(layers - 1, 0, -1):
            away = _on_host(step, layers - count, keep, host_budget_bytes)
            if all(policy.keep == "attention" for policy in away):
                yield away + [everything] * count
    if keep in ("auto", "attention"):
        if offload == "none" and keep == "auto":
            yield from mixes(inputs, attention)
        if offload != "none":
            for count in range(layers if offload == "auto" else 0, -1, -1):
                yield _on_host(step, layers - count, keep, host_budget_bytes) + [attention] * count
    if keep == "input" and offload != "host":
        yield [inputs] * layers
    if keep in ("auto", "input"):
        if offload == "auto":
            yield from mixes(inputs_away, inputs)
        if offload == "host":
            yield [inputs_away] * layers


def _on_host(step: Step, layers: int, keep: str, host_budget_bytes: float) -> list[LayerPolicy]:
    """Return the policies of the first `layers` layers, kept in host memory, with attention for as many as it holds.

    The product that reads attention waits there too if there is room for that of each layer: attention is worth more.
    """
    attention, inputs = attention_on_host(step.shape.sequence), LayerPolicy("input", on_host=True)
    if layers * _kept_bytes(step, attention, step.costs) > host_budget_bytes:
        attention = replace(attention, projection=False)
    if keep == "attention":
        return [attention] * layers
    bytes_of_inputs = _kept_bytes(step, inputs, step.costs)
    spare = host_budget_bytes - layers * bytes_of_inputs
    # Bounded before it is rounded: a host without a known limit is infinite.
    with_attention = int(min(layers, max(0.0, spare / (_kept_bytes(step, attention, step.costs) - bytes_of_inputs))))
    return [inputs] * (layers - with_attention) + [attention] * with_attention


def attention_on_host(sequence: int) -> LayerPolicy:
    """Return the policy of a layer whose attention is on the host, for a sequence of so many tokens."""
    return LayerPolicy("attention", on_host=True, projection=sequence <= LONGEST_WITH_MORE_ON_HOST)


def _segment_sizes(step: Step, choices: Choices) -> Sequence[int]:
    """Return the layers of a segment that may be tried, the fastest first."""
    if choices.recompute_layers is not None:
        return [choices.recompute_layers]
    return range(1, 2 if choices.keep == "all" else math.isqrt(step.layers - 1) + 2)


def _in_segments_of(count: int, step: Step, choices: Choices) -> Iterator[list[LayerPolicy]]:
    """Yield plans in segments of `count` layers: all on the device first, then segment by segment on the host.

    With room for it, `keep="auto"` keeps the attention of layers that are run again, but not from forward on.
    """
    places = {"none": [0], "host": [step.layers]}.get(choices.offload, [*range(0, step.layers, count), step.layers])
    kinds = [choices.keep] if choices.keep != "auto" else ["attention", "input"] if count > 2 else ["input"]
    for keep, on_host in product(kinds, places):
        policies = in_segments([LayerPolicy(keep, index < on_host) for index in range(step.layers)], count)
        if choices.keep == "auto":
            policies = [policy if policy.recomputed else replace(policy, keep="input") for policy in policies]
        yield policies


# --- Steps of a model, by their length ------------------------------------------------------------------------------------------

# Share of a budget for a caller that does something unknown with the hidden states: its own head, its own loss.
UNKNOWN_HEAD_SHARE = 0.2


@dataclass(frozen=True)
class HeadFacts:
    """Sizes of a streamed head and of the embeddings, and bytes of the gradients that they leave."""

    targets: int  # tokens that the head looks at, at most
    chunk_size: int  # tokens whose logits exist at a time
    width: int
    vocabulary: int
    itemsize: int
    trainable: int  # parameters
    gradient_bytes: float  # that all parts outside of the layers leave, but for the embeddings'
    embedding_itemsize: int
    embedding_gradient_bytes: float
    weight_bytes: float  # of the head, where they are not the decoder's

    def bytes_at_work(self, tokens: int) -> float:
        """Return the bytes that the head holds while it works; there are no more targets than hidden states."""
        targets = min(self.targets, tokens)
        logits = 2 * min(targets, self.chunk_size) * self.vocabulary * self.itemsize
        return sum(head_parts(targets * self.width * self.itemsize, logits, self.trainable, self.itemsize).values())

    def bytes_at_embeddings(self, tokens: int) -> float:
        """Return the bytes where backward reaches the embeddings, beside the gradients of the layers and the head."""
        itemsize = self.embedding_itemsize
        sums, dense = max(4, itemsize) * self.width, self.embedding_gradient_bytes
        return sum(embedding_parts(tokens, self.width * itemsize, width_sum_bytes=sums, dense_bytes=dense).values())


@dataclass(frozen=True)
class StepFacts:
    """The memory of a step without its length; `at(sequence)` is the step of that length."""

    costs: LayerCosts
    layers: int
    rows: int
    position_bytes: float  # of the hidden states at one position of all rows
    resident_bytes: float
    gradient_bytes: float  # that all layers leave
    input_is_leaf: bool  # whether the first layer's input is a leaf of the graph
    head: HeadFacts | None
    budget_bytes: float
    keys_at_once: float = KEYS_AT_ONCE  # as in `memory.costs.Shape`
    ring: int = 1
    kinds: tuple[LayerCosts, ...] = ()  # as in `Step`
    kind_of: tuple[int, ...] = ()

    def at(self, sequence: int) -> Step:
        hidden, head, tokens = self.position_bytes * sequence, self.head, self.rows * sequence
        return Step(
            costs=self.costs,
            layers=self.layers,
            shape=Shape(self.rows, sequence, self.keys_at_once, self.ring),
            resident_bytes=self.resident_bytes + self.layers * tokens * self.costs.recorded,
            layer_gradient_bytes=self.gradient_bytes / self.layers,
            head_bytes=2 * hidden + UNKNOWN_HEAD_SHARE * self.budget_bytes if head is None else head.bytes_at_work(tokens),
            head_gradient_bytes=0.0 if head is None else head.gradient_bytes,
            embedding_bytes=hidden if head is None else head.bytes_at_embeddings(tokens),
            leaf_bytes=hidden if self.input_is_leaf else 0.0,
            kinds=self.kinds,
            kind_of=self.kind_of,
        )


def longest_that_fits(facts: StepFacts, too_long: int, choices: Choices, budget: Budget) -> int:
    """Return the longest sequence below `too_long`, to a percent or so, for which there is a plan; 0 if there is none."""
    longest = 0
    while too_long - longest > max(1, too_long // 128):
        middle = (longest + too_long) // 2
        _, fits = choose_plan(facts.at(middle), choices, budget)
        longest, too_long = (middle, too_long) if fits else (longest, middle)
    return longest
