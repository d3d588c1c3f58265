"""Whether a step fits the memory of a GPU and of its host, and the longest sequence that does.

bytes that stay for the whole step    weights, optimizer state and an engine's buffers, `memory.training_state`
the plan                              `memory.planner`, which also makes it when the step runs
bytes in each phase                   `memory.phases`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from streamgrad.memory.engines import longest_sequence
from streamgrad.memory.head_chunk import FREE_SHARE, SHORTEST_CHUNK, head_chunk_within
from streamgrad.memory.phases import Phase, Workload, checkpointing_phases, largest, streamed_phases
from streamgrad.memory.planner import (
    LAST_CHUNKS,
    MARGIN,
    Budget,
    Choices,
    HeadFacts,
    Plan,
    Step,
    StepFacts,
    choose_plan,
    regular_chunk,
)

LONGEST = 1 << 24
# The share of a GPU that a step's tensors may fill where the allocator's segments can grow. The fullest steps that ran held 98.2
# to 99.2% (benchmarks/results/predicted.jsonl). The planner itself leaves more free.
FILLED = 0.9925
# With host memory: 97.9% ran, and a step 5% longer did not.
FILLED_BESIDE_HOST = 0.98


@dataclass(frozen=True)
class Card:
    """The memory that a step may use, and the options that plans are made with."""

    device_bytes: float
    host_bytes: float
    keep: str
    offload: str
    recompute_layers: int | None = None  # by default the plan chooses

    def planned(self, load: Workload) -> tuple[Plan, Phase]:
        """Return the plan that the planner makes within this memory, and its largest phase."""
        return self._planned(load, None, (1.0 - MARGIN) * self.device_bytes)

    def holds(self, plan: Plan | None, phase: Phase) -> bool:
        """Return whether a step's largest phase fits the GPU, and what its plan keeps on the host fits the host."""
        on_host = 0.0 if plan is None else plan.host_bytes
        filled = FILLED_BESIDE_HOST if on_host else FILLED
        return phase.total_bytes <= filled * self.device_bytes and on_host <= self.host_bytes

    def longest(self, load: Workload) -> int:
        """Return the tokens of the longest sequence whose smallest plan fits, or 0."""

        def fits(longer: Workload) -> bool:
            smallest_chunk = regular_chunk(longer.rows, longer.sequence, LAST_CHUNKS[-1])
            return self.holds(*self._planned(longer, smallest_chunk, 0.0))

        return longest_with(load, fits)

    def longest_with_checkpointing(self, load: Workload) -> int:
        """Return the tokens of the longest sequence that fits with transformers' gradient checkpointing, or 0."""
        return longest_with(load, lambda longer: self.holds(None, largest(checkpointing_phases(longer))))

    def _planned(self, load: Workload, chunk_size: int | None, budget_bytes: float) -> tuple[Plan, Phase]:
        choices = Choices(self.keep, self.offload, chunk_size, self.recompute_layers)
        plan, _ = choose_plan(_step(load, budget_bytes), choices, Budget(budget_bytes, self.host_bytes))
        return plan, largest(streamed_phases(load, plan.policies, plan.chunk_sizes, self.head_rows(load, plan)))

    def head_rows(self, load: Workload, plan: Plan) -> int:
        """Return the size of the head's chunks: an eighth of the memory that is free when it starts."""
        shape = load.shape
        at_once = [policy for policy in plan.policies if not policy.on_host and not policy.recomputed]
        kept = sum(sum(shape.profile.costs.kept(policy).values()) for policy in at_once)
        used = sum(load.with_positions.values()) + load.tokens * (kept + 3 * shape.profile.costs.input)
        free = int(max(0.0, self.device_bytes - used)) // FREE_SHARE
        return min(head_chunk_within(free, load.tokens, shape.vocabulary, shape.itemsize), load.tokens)


def _step(load: Workload, budget_bytes: float) -> Step:
    """Return the step as the planner of a model with a streamed head sees it."""
    shape, costs = load.shape, load.shape.profile.costs
    head = HeadFacts(
        targets=load.tokens,
        chunk_size=SHORTEST_CHUNK,
        width=shape.width,
        vocabulary=shape.vocabulary,
        itemsize=shape.itemsize,
        trainable=shape.head_trainable,
        gradient_bytes=load.gradients(0),
        embedding_itemsize=shape.itemsize,
        embedding_gradient_bytes=load.streamed_embedding_bytes,
        weight_bytes=0.0,  # it is among the resident bytes
    )
    facts = StepFacts(
        costs=costs,
        layers=shape.layers,
        rows=load.rows,
        position_bytes=load.rows * costs.input,
        resident_bytes=sum(load.with_positions.values()),
        gradient_bytes=load.gradient_share * shape.layers * costs.gradients,
        input_is_leaf=not shape.outside_trainable,  # with adapters the first layer's input is made to require a gradient
        head=head,
        budget_bytes=budget_bytes,
        keys_at_once=load.batch.keys_at_once,
        ring=load.batch.ring,
    )
    return facts.at(load.sequence)


def longest_with(load: Workload, fits: Callable[[Workload], bool]) -> int:
    return longest_sequence(lambda tokens: 0.0 if fits(replace(load, sequence=tokens)) else 1.0, 0.0, step=128, limit=LONGEST)
