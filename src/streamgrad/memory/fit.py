"""Whether a step fits the memory of a GPU and of its host, and the longest sequence that does.

bytes that stay for the whole step    weights, optimizer state and an engine's buffers, here and in `memory.engines`
the plan                              `memory.planner`, which also makes it when the step runs
bytes in each phase                   `memory.phases`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from streamgrad.memory.costs import ModelShape, Parts
from streamgrad.memory.engines import longest_sequence, rank_bytes
from streamgrad.memory.head_chunk import FREE_SHARE, SHORTEST_CHUNK, head_chunk_within
from streamgrad.memory.phases import Phase, Workload, checkpointing_phases, largest, streamed_phases
from streamgrad.memory.planner import (
    MARGIN,
    SMALL_CHUNKS,
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
            smallest_chunk = regular_chunk(longer.rows, longer.sequence, SMALL_CHUNKS[-1])
            return self.holds(*self._planned(longer, smallest_chunk, 0.0))

        return _longest(load, fits)

    def longest_with_checkpointing(self, load: Workload) -> int:
        """Return the tokens of the longest sequence that fits with transformers' gradient checkpointing, or 0."""
        return _longest(load, lambda longer: self.holds(None, largest(checkpointing_phases(longer))))

    def _planned(self, load: Workload, chunk_size: int | None, budget_bytes: float) -> tuple[Plan, Phase]:
        choices = Choices(self.keep, self.offload, chunk_size, self.recompute_layers)
        plan, _ = choose_plan(_step(load, budget_bytes), choices, Budget(budget_bytes, self.host_bytes))
        return plan, largest(streamed_phases(load, plan.policies, plan.chunk_sizes, self._head_rows(load, plan)))

    def _head_rows(self, load: Workload, plan: Plan) -> int:
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
        embedding_gradient_bytes=load.embedding_gradient_bytes,
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
    )
    return facts.at(load.sequence)


def _longest(load: Workload, fits: Callable[[Workload], bool]) -> int:
    return longest_sequence(lambda tokens: 0.0 if fits(replace(load, sequence=tokens)) else 1.0, 0.0, step=128, limit=LONGEST)


def resident_parts(shape: ModelShape, *, engine: str, gpus: int, optimizer: str, second_model: bool) -> Parts:
    """Return what stays on one rank for the whole step; a second model is frozen and whole."""
    parameters = shape.layers * shape.layer_parameters + shape.outside_parameters
    # FSDP2 gathers what is outside of the layers as one unit, DeepSpeed one module of it after the other.
    outside = shape.outside_parameters if engine == "fsdp2" else shape.head_parameters
    count = rank_bytes(
        engine,
        parameters=parameters,
        trainable=shape.layers * shape.layer_trainable + shape.outside_trainable,
        unit=max(shape.layer_parameters, outside),
        ranks=gpus,
        parameter_size=shape.itemsize - shape.weights_saved / parameters,
        gradient_size=shape.itemsize,
        optimizer_size=_optimizer_size(optimizer, shape.itemsize, engine),
    )
    weights = count.parameters + (parameters * shape.itemsize if second_model else 0.0)
    return {"weights": weights, "optimizer state": count.optimizer, "other": count.working}


def gradient_share(engine: str, gpus: int) -> float:
    """Return the part of each finished gradient that stays on one rank."""
    return 1.0 / gpus if engine in ("zero2", "zero3", "fsdp2") else 1.0


def copies_to_fp32(engine: str, itemsize: int) -> bool:
    """Return whether an engine's optimizer works on a copy of the weights in fp32, as DeepSpeed's does for 16 bits."""
    return engine in ("zero1", "zero2", "zero3") and itemsize == 2


def _optimizer_size(optimizer: str, itemsize: int, engine: str) -> int:
    """Return the state's bytes per trainable parameter; AdamW has two moments, in the weights' dtype or DeepSpeed's fp32."""
    if optimizer == "none":
        return 0
    copied = copies_to_fp32(engine, itemsize)
    return (4 if copied else 0) + {"adamw": 2 * (4 if copied else itemsize), "adamw8bit": 2, "sgd": 0}[optimizer]
