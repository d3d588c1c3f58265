"""What each layer keeps, and where: the fastest choice that a memory budget allows.

From the fastest to the smallest, a layer keeps
    everything                       nothing is run again
    its input and its attention      everything but attention is run again
    its input                        everything is run again
and the last two either on the device or in host memory, whose copies hide behind computation. So a plan is made of runs of
layers, `input | attention on host | attention on device | everything`, in that order from the first layer to the last: what
the last layers keep is freed first in backward, and what the first ones keep has the longest way back.

`predicted_peak` is the arithmetic that choices are made by: all byte counts of one step in one place.

Known limits: it knows tensors and the workspace of attention kernels, not the allocator's fragments; the margins are for those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from streamgrad.core.chunk import KEYS_AT_ONCE

# Of the memory that is free, for fragments; of a budget that a user names, which is for tensors, for what is not foreseen.
MARGIN, MARGIN_OF_BUDGET = 0.05, 0.01
# What the largest moment of a chunk's re-run and backward holds, over what its graph saves: gradients of the same widths.
WIDE_FACTOR = 1.45
# Tokens of a batch in a chunk. Beyond 16,384 nothing gets faster; below 8,192 matrix products do not fill a large GPU, so smaller
# ones come after every other way to save memory.
LARGE_CHUNKS, SMALL_CHUNKS = (16_384, 8192), (4096, 2048, 1024, 512, 256)


def readable(count: float) -> str:
    """Bytes in GiB, or in MiB where there are few."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


@dataclass(frozen=True)
class LayerPolicy:
    keep: str  # "input", "attention" or "all"
    on_host: bool = False

    def __str__(self) -> str:
        return f"{self.keep} on host" if self.on_host else self.keep


@dataclass(frozen=True)
class LayerCosts:
    """Bytes a token of one layer's tensors, and of its parameters as a whole."""

    input: float
    keys_and_values: float
    attention: float  # output and log-sum-exp
    graph: float  # all that an ordinary graph saves, the input included
    gradients: float  # of its trainable parameters
    gradient_sums: float  # of the same, in the precision of sums

    def kept(self, policy: LayerPolicy) -> float:
        """Bytes a token that wait for backward."""
        extra = {"input": 0.0, "attention": self.keys_and_values + self.attention, "all": self.graph - self.input}
        return self.input + extra[policy.keep]


@dataclass(frozen=True)
class Step:
    """One step as far as memory is concerned. `tokens` counts the whole batch, `sequence` one row of it."""

    costs: LayerCosts
    layers: int
    batch: int
    sequence: int
    resident_bytes: float  # on the device already: weights, optimizer state, gradients so far
    other_gradient_bytes: float  # still to come, of parameters outside of the layers
    head_bytes: float  # held while the head works, its hidden states and their gradient included

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


@dataclass(frozen=True)
class Plan:
    policies: tuple[LayerPolicy, ...]
    chunk_size: int
    peak_bytes: float
    host_bytes: float

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for policy in self.policies:
            counts[str(policy)] = counts.get(str(policy), 0) + 1
        kinds = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return f"{kinds}; chunks of {self.chunk_size} tokens; about {readable(self.peak_bytes)} on the device" + (
            f" and {readable(self.host_bytes)} on the host" if self.host_bytes else ""
        )


def predicted_peak(step: Step, policies: Sequence[LayerPolicy], chunk_size: int) -> float:
    """Device bytes at the worst moment: when the head works, or in the backward pass of one of the layers."""
    costs, tokens = step.costs, step.tokens
    on_device = [0.0 if policy.on_host else tokens * costs.kept(policy) for policy in policies]
    below = list(accumulate(on_device))
    peak = below[-1] + step.head_bytes
    for index, policy in enumerate(policies):
        gradients = step.other_gradient_bytes + (step.layers - index) * costs.gradients
        peak = max(peak, below[index] + gradients + _backward_bytes(step, policy, chunk_size))
    return step.resident_bytes + peak


def _backward_bytes(step: Step, policy: LayerPolicy, chunk_size: int) -> float:
    """What one layer's backward pass holds beside what is kept and returned."""
    costs, tokens = step.costs, step.tokens
    through = 2 * tokens * costs.input  # the gradient coming in and the one going out
    if policy.keep == "all":
        return through + tokens * (WIDE_FACTOR - 1.0) * costs.graph
    chunk = step.batch * min(chunk_size, step.sequence)
    # Keys and values unless kept on the device, and the sums of their gradients in twice the precision.
    held = policy.keep == "attention" and not policy.on_host
    keys = ((0 if held else 1) + (0 if chunk == tokens else 2)) * tokens * costs.keys_and_values
    # A kernel's terms of these sums, and its workspace: the same for every query head, before heads of one group are added.
    at_once = min(tokens, step.batch * (KEYS_AT_ONCE + chunk_size))
    keys += at_once * (costs.keys_and_values + 2 * costs.attention)
    arriving = 0.0
    if policy.on_host:
        arriving = 2 * chunk * costs.kept(policy) + (tokens * costs.keys_and_values if policy.keep == "attention" else 0.0)
    sums = 0.0 if chunk == tokens else costs.gradient_sums
    return through + keys + arriving + chunk * WIDE_FACTOR * costs.graph + sums


def host_bytes(step: Step, policies: Sequence[LayerPolicy]) -> float:
    return sum(step.tokens * step.costs.kept(policy) for policy in policies if policy.on_host)


def regular_chunk(batch: int, sequence: int, tokens: int) -> int:
    """The size of chunks of at most `tokens` tokens of a batch.

    It does not follow the length of the sequence, so that most chunks of most sequences have the same few shapes: some kernels
    are prepared for each shape.
    """
    return min(sequence, max(1, tokens // batch))


def choose_plan(
    step: Step, *, keep: str, offload: str, chunk_size: int | None, budget_bytes: float, host_budget_bytes: float
) -> tuple[Plan, bool]:
    """The fastest plan within both budgets, and whether there is one; if there is none, the smallest plan there is.

    `keep` and `offload` are `StreamConfig`'s; `chunk_size` is None for auto.
    """
    groups = [LARGE_CHUNKS, *((tokens,) for tokens in SMALL_CHUNKS)]
    sizes = [[regular_chunk(step.batch, step.sequence, tokens) for tokens in group] for group in groups]
    smallest: Plan | None = None
    for group in sizes if chunk_size is None else [[chunk_size]]:
        for policies in _candidates(step, keep, offload, host_budget_bytes):
            for size in group:
                plan = Plan(tuple(policies), size, predicted_peak(step, policies, size), host_bytes(step, policies))
                if plan.peak_bytes <= budget_bytes and plan.host_bytes <= host_budget_bytes:
                    return plan, True
                if plan.host_bytes <= host_budget_bytes and (smallest is None or plan.peak_bytes < smallest.peak_bytes):
                    smallest = plan
    assert smallest is not None or offload == "host", "a plan without the host needs none of it"
    return smallest or plan, False


def _candidates(step: Step, keep: str, offload: str, host_budget_bytes: float) -> Iterator[list[LayerPolicy]]:
    """Plans that the options allow, the fastest first."""
    layers = step.layers
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
    """The first `layers` layers in host memory, with attention as far as that goes."""
    attention, inputs = LayerPolicy("attention", on_host=True), LayerPolicy("input", on_host=True)
    if keep == "attention":
        return [attention] * layers
    spare = host_budget_bytes - layers * step.tokens * step.costs.kept(inputs)
    extra = step.tokens * (step.costs.kept(attention) - step.costs.kept(inputs))
    with_attention = min(layers, max(0, int(spare // extra)))
    return [inputs] * (layers - with_attention) + [attention] * with_attention
