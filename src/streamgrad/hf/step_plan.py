"""The plan of one decoder call: what `StreamConfig` leaves open, decided by what layers cost and what memory there is.

costs = planner.measured_costs(samples, backends, h_BTE, sharing)     a layer of each kind, run on a few tokens
plan = planner.plan(call, costs)                                      the fastest that fits (`memory.planner`)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.attention.backends import Kernels
from streamgrad.config import StreamConfig
from streamgrad.engine.checks.module_state import left_as_they_were
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.module_walk import modules_of, parameters_of
from streamgrad.engine.policy import LayerPolicy
from streamgrad.engine.replay import as_autocast
from streamgrad.engine.shortage import is_only_process, is_out_of_memory
from streamgrad.engine.ulysses import SequenceSharing
from streamgrad.hf.libraries.sharded import StatesToCome, device_at_work
from streamgrad.hf.step_facts import PlannedCall, has_foreign_hook, held_bytes, kind_of_layer, step_facts
from streamgrad.hf.whole_step import WholePlan, WholeStep
from streamgrad.memory.costs import LayerCosts, chunks_in_forward
from streamgrad.memory.device import device_memory, host_budget_bytes, segments_grow, usable_share
from streamgrad.memory.measure import PROBED_TOKENS, measured_costs
from streamgrad.memory.planner import (
    Budget,
    Choices,
    Plan,
    Step,
    StepFacts,
    attention_on_host,
    automatic_chunk,
    choose_plan,
    in_segments,
    longest_that_fits,
    readable,
)

logger = logging.getLogger("streamgrad")

# Share of the memory beyond what is held already that a plan may use once memory has run out.
_LEFT_BY_A_SHORTAGE = 0.7
# Said where memory ran out although far less than there was should have been enough.
_FRAGMENTS = (
    "By its plan this length fits with room to spare: look for another process on the device, and set "
    "PYTORCH_ALLOC_CONF=expandable_segments:True against fragments."
)


@dataclass(frozen=True)
class Sample:
    """One layer of a kind, ready to run as in `StreamedCall`; `mask` is None for a layer without attention.

    `recorded` names what transformers records while it runs.
    """

    layer: nn.Module
    run: Callable[..., Tensor]
    mask: object
    recorded: tuple[str, ...]
    recurrent: bool


class Planner:
    """Plans for one model; costs are measured once for each way in which it is run."""

    def __init__(self, config: StreamConfig) -> None:
        self.config = config
        self.latest: Plan | None = None  # of a step with gradients
        self.latest_shape = (0, 0)  # its rows and tokens a row
        self.optimizer: str | None = None  # of a trainer, in words
        self._shape_with_segments: torch.Size | None = None
        self._costs: dict[tuple[Any, ...], LayerCosts] = {}
        self._shortages = 0  # how often memory ran out in spite of a plan
        self._may_join_chunks = True
        # Whether hooks of others on parameters free the gradients, as far as has been seen.
        self.hooks_free: bool | None = None
        self._latest_step: tuple[StepFacts, int, Choices, Budget] | None = None
        self._resident_bytes = 0.0  # when the latest plan was made
        self._whole: dict[Hashable, WholePlan] = {}  # by the manner of steps
        self._states_to_come = StatesToCome()

    def together(self, plan: Plan, layer: int) -> int:
        """Return how many chunks of a layer may run forward together by the plan; one once memory has run out in spite of it."""
        return plan.chunks_in_forward[layer] if plan.chunks_in_forward and self._may_join_chunks else 1

    def note_full_stretch(self) -> None:
        """Run all chunks forward one by one from now on: memory has run out for several."""
        self._may_join_chunks = False
        logger.warning("streamgrad: memory ran out for several chunks forward; from now on they run one by one, which is slower.")

    def note_shortage(self) -> str:
        """Plan for less memory from now on, where that is left to the plan; return what to say of it and what would fit."""
        told = []
        self._whole.clear()
        if self.config.keep == "auto":
            self._shortages += 1
            told.append("From now on, steps are planned for less memory; streamgrad.disable and enable forget that.")
        if self._latest_step is not None:
            facts, sequence, choices, budget = self._latest_step
            lowered = _lowered(budget, facts.resident_bytes, max(1, self._shortages))
            fits = choose_plan(facts.at(sequence), choices, lowered)[1]
            told.append(_FRAGMENTS if fits else _told_of_length(longest_that_fits(facts, sequence, choices, lowered)))
        return " ".join(told)

    def chunk_size(self, batch: int, sequence: int) -> int:
        """Return the tokens of a chunk where no budget decides it."""
        given = self.config.chunk_size
        return given if isinstance(given, int) else max(automatic_chunk(batch, sequence) >> self._shortages, 1)

    def must_measure(self, layers: list[nn.Module], h_BTE: Tensor) -> bool:
        """Return whether a step is planned by what its layers cost: within a budget, or on one GPU, whose memory is known.

        There the options may leave nothing to decide but how many chunks run forward together.
        """
        if self.config.budget_bytes is not None:
            return True
        if h_BTE.device.type != "cuda" or len({device_at_work(next(layer.parameters())) for layer in layers}) > 1:
            return False
        # Not for ranks: one that could not measure would leave the others waiting.
        return self._must_decide or (self.config.keep != "all" and is_only_process())

    @property
    def _must_decide(self) -> bool:
        """Return whether the options leave something to decide."""
        config = self.config
        limited = config.budget_bytes is not None or config.offload != "none"  # by memory of the device or of the host
        return limited or "auto" in (config.keep, config.chunk_size)

    def plan_without_costs(self, layers: int, batch: int, sequence: int) -> Plan:
        """Return the plan of the options alone; a layer keeps its input where they leave it open."""
        config = self.config
        keep = "input" if config.keep == "auto" else config.keep
        is_away = config.offload == "host" and keep != "all"
        policy = attention_on_host(sequence) if is_away and keep == "attention" else LayerPolicy(keep, on_host=is_away)
        policies = in_segments([policy] * layers, config.recompute_layers if isinstance(config.recompute_layers, int) else 1)
        plan = Plan(tuple(policies), (self.chunk_size(batch, sequence),) * layers, 0.0, 0.0)
        if torch.is_grad_enabled():
            self.latest, self.latest_shape = plan, (batch, sequence)
        return plan

    def measured_costs(
        self, samples: Iterable[Sample], backends: Kernels, h_BTE: Tensor, sharing: SequenceSharing
    ) -> dict[Hashable, LayerCosts]:
        """Return the costs of each kind of layer, of which a sample could be measured. The first must be, or there are none.

        None are an error where the options leave something to decide.
        """
        kinds: dict[Hashable, LayerCosts] = {}
        for sample in samples:
            try:
                kinds[kind_of_layer(sample.layer)] = self._measured(sample, backends, h_BTE, sharing)
            except Exception as error:
                # Where its kind is called with arguments of its own, or where nothing has to be decided by its costs.
                expected = isinstance(error, RuntimeError | LookupError | SeamError) and not is_out_of_memory(error)
                if self._must_decide and not (kinds and expected):
                    raise
                logger.debug("streamgrad: %s is not measured: %s", type(sample.layer).__name__, error)
                if not kinds:
                    return {}
        return kinds

    def _measured(self, sample: Sample, backends: Kernels, h_BTE: Tensor, sharing: SequenceSharing) -> LayerCosts:
        layer, recurrent = sample.layer, sample.recurrent
        trainable = tuple((parameter.requires_grad, parameter.shape) for parameter in parameters_of(layer))
        autocast = torch.is_autocast_enabled(h_BTE.device.type) and torch.get_autocast_dtype(h_BTE.device.type)
        # A power of two, so that short sequences of ever new lengths are not each measured.
        tokens = min(2 * PROBED_TOKENS, 1 << (h_BTE.shape[1].bit_length() - 1))
        ranks = sharing.ranks, sharing.ring_ranks
        key = (type(layer), h_BTE.dtype, autocast, trainable, layer.training, tokens, ranks, sample.recorded)
        if key not in self._costs:
            first = h_BTE[:, :tokens]
            with left_as_they_were(modules_of(layer)):
                measured = measured_costs(layer, sample.run, sample.mask, backends, first, sharing, recurrent=recurrent)
            self._costs[key] = LayerCosts(*sharing.most(*astuple(measured)))
            backends.used.clear()  # on a few tokens other kernels may be the fastest
        return self._costs[key]

    def plan(self, call: PlannedCall, costs: Mapping[Hashable, LayerCosts]) -> Plan:
        """Return the fastest plan that fits the memory there is now; raise `ValueError` where the user's own limit is too low."""
        batch, sequence = call.h_BTE.shape[:2]
        resident, budget = self._memory_now(call)
        self._resident_bytes = resident
        choices = self._choices(call)
        for hooks_free in self._possible_frees(call):
            facts = step_facts(call, costs, resident, budget, hooks_free=hooks_free)
            self._latest_step = facts, sequence, choices, budget
            plan, fits = choose_plan(facts.at(sequence), choices, _lowered(budget, facts.resident_bytes, self._shortages))
            if fits:
                break
        if not fits:
            self._refuse(facts, sequence, plan, choices, budget)
        if self.latest is None or plan.policies != self.latest.policies:
            logger.debug("streamgrad: %d x %d tokens within %.1f GiB: %s", batch, sequence, budget.device_bytes / 2**30, plan)
        if call.on_cuda and not segments_grow() and self._shape_with_segments != call.h_BTE.shape:
            _give_segments(call.h_BTE, sum(not policy.on_host for policy in plan.policies))
            self._shape_with_segments = call.h_BTE.shape
        self.latest, self.latest_shape = _with_joined_chunks(plan, facts.at(sequence), costs, call), (batch, sequence)
        return self.latest

    def note_whole(self, step: WholeStep) -> None:
        """Remember what `step` needed, if by its plan, the latest, it has kept all graphs: from now on such steps run plain."""
        known, plan = self._whole.get(step.manner), self.latest
        if plan is None or self._latest_step is None or any(policy.keep != "all" for policy in plan.policies):
            return
        if known is None or known.tokens < step.tokens or known.longest < step.sequence:
            facts, more = self._latest_step[0], plan.peak_bytes - self._resident_bytes
            costs, layers = facts.costs, facts.layers
            self._whole[step.manner] = WholePlan(step.tokens, plan, more, layers * costs.attention, costs.longest_chunk)

    def keeps_everything(self, step: WholeStep, decoder: nn.Module, layers: int) -> bool:
        """Return whether all layers of a step may keep their graphs, by a plan for as many tokens and the memory there is now."""
        on_cuda, limit = step.device.type == "cuda", self.config.budget_bytes
        if self.config.keep == "all" and limit is None and not on_cuda:
            if self.latest_shape != (step.rows, step.sequence):
                self.plan_without_costs(layers, step.rows, step.sequence)
            return True
        known = self._whole.get(step.manner)
        if known is None or known.tokens < step.tokens or known.longest < step.sequence:
            return False
        held, free = device_memory(step.device) if on_cuda else (held_bytes(decoder), float("inf"))
        budget = Budget(min(usable_share() * free, limit or float("inf")), 0.0)
        peak = held + known.more_bytes_for(step)
        if peak > _lowered(budget, held, self._shortages).device_bytes:
            return False
        self.latest = replace(known.plan, peak_bytes=peak, chunk_sizes=(step.sequence,) * layers)
        self.latest_shape = step.rows, step.sequence
        return True

    def _possible_frees(self, call: PlannedCall) -> list[bool]:
        """Return whether hooks of others free gradients, as seen; before the first step, both answers, the safe one first."""
        hooked = [parameter for own in call.layer_parameters for parameter in own if has_foreign_hook(parameter)]
        if not hooked or self.hooks_free is not None:
            return [bool(self.hooks_free)]

        def look(gradient: Tensor) -> None:  # that of the first layer's input, which is made when those of all layers are
            self.hooks_free = all(parameter.grad is None for parameter in hooked)

        if call.h_BTE.requires_grad:
            call.h_BTE.register_hook(look)
        return [False, True]

    def _choices(self, call: PlannedCall) -> Choices:
        config = self.config
        given = config.chunk_size if isinstance(config.chunk_size, int) else None
        segments = config.recompute_layers if isinstance(config.recompute_layers, int) else None if call.may_recompute else 1
        # Tokens that ranks share lie in the order of their chunks.
        return Choices(config.keep, config.offload if call.on_cuda else "none", given or call.sharing.chunk_size, segments)

    def refuse_segments(self) -> None:
        """Raise where `recompute_layers` asks for several layers, and ranks depend on each other within a layer."""
        if self.config.recompute_layers not in ("auto", 1):
            raise ValueError(
                f"recompute_layers={self.config.recompute_layers} cannot be used with FSDP2 or ZeRO-3, nor where ranks share a "
                "sequence: in backward, layers would be run again whose parameters are not gathered, or for which other ranks do "
                "not wait. Pass recompute_layers=1, or use DDP, ZeRO-1 or ZeRO-2."
            )

    def _memory_now(self, call: PlannedCall) -> tuple[float, Budget]:
        """Return the bytes that are on the device already, and those that a step may use.

        They are rounded, so that steps which are alike share one plan, found once.
        """
        held, limit = device_memory(call.h_BTE.device) if call.on_cuda else (held_bytes(call.decoder), float("inf"))
        resident = held - call.h_BTE.nbytes if call.on_cuda else held  # the first layer's input is among what layers keep
        device = min(_floor(usable_share() * limit, 2**26), self.config.budget_bytes or float("inf"))
        to_come = self._states_to_come.host_bytes(chain(*call.layer_parameters), call.h_BTE)
        host = max(0.0, _floor(host_budget_bytes(held_bytes=call.host_store.total_bytes) - to_come, 2**30))
        # Ranks that share a sequence exchange as often as they run attention: all must choose the same plan.
        resident, *missing = call.sharing.most(resident, -device, -host)
        return resident, Budget(-missing[0], -missing[1])

    def _refuse(self, facts: StepFacts, sequence: int, plan: Plan, choices: Choices, budget: Budget) -> None:
        """Raise before the step starts if the host's memory or the user's own limit is too small; without a limit, try it."""
        shape = facts.at(sequence).shape
        if plan.host_bytes > budget.host_bytes:
            raise ValueError(
                f"offload='host' needs {readable(plan.host_bytes)} of host memory for {shape}, and {readable(budget.host_bytes)} "
                "are available to this process. Pass offload='auto', keep='input', recompute_layers='auto' or a shorter sequence."
            )
        if self.config.budget_bytes is None or plan.peak_bytes <= budget.device_bytes:
            return
        longest = longest_that_fits(facts, sequence, choices, budget)
        raise ValueError(
            f"memory_budget={self.config.memory_budget!r} cannot hold {shape}: about "
            f"{readable(plan.peak_bytes)} are needed ({plan}). " + _told_of_length(longest)
        )


def _with_joined_chunks(plan: Plan, step: Step, measured: Container[Hashable], call: PlannedCall) -> Plan:
    """Return the plan with how many chunks of each layer run forward together: one, if a kind of layer was not `measured`.

    One on a CPU too, where launches cost little, where ranks share out their tokens by chunks, and in 32 bits: products of few
    tokens and of many differ by more than guards allow there, where some are in TF32 or in 16 bits.
    """
    each = list(zip(plan.policies, plan.chunk_sizes, strict=True))
    if all(policy.keep == "all" or size >= step.shape.sequence for policy, size in each):
        return plan
    if not call.on_cuda or call.sharing.ranks > 1 or as_autocast(call.h_BTE[:0]).dtype.itemsize != 2:
        return plan
    if not step.costs.forward or any(kind not in measured for kind in call.kinds):
        return plan
    return replace(plan, chunks_in_forward=tuple(chunks_in_forward(step.costs, step.shape, *one) for one in each))


def _lowered(budget: Budget, resident: float, shortages: int) -> Budget:
    """Return the budget, lowered once for each time that memory ran out in spite of it."""
    if not shortages or budget.device_bytes == float("inf"):
        return budget
    spared = (budget.device_bytes - resident) * (1.0 - _LEFT_BY_A_SHORTAGE**shortages)
    return Budget(budget.device_bytes - spared, budget.host_bytes)


def _told_of_length(longest: int) -> str:
    return f"About {longest} tokens a sequence would fit." if longest else "Not even a short sequence would fit."


def _give_segments(h_BTE: Tensor, count: int) -> None:
    """Let the allocator take a segment from the device for each of `count` hidden states that will be kept.

    Without this it would cut them, one by one, from larger blocks that are free for a moment. What remains of such a block is too
    small for the tensors it was made for: where layers keep only their inputs, fragments took a fifth of the memory. This helps
    before the first step and before one longer than any so far; otherwise the segments are there already.
    """
    with suppress(torch.OutOfMemoryError):  # as much as there is
        held = [torch.empty_like(h_BTE) for _ in range(count)]
        del held


def _floor(count: float, unit: int) -> float:
    return count // unit * unit if count < float("inf") else count
