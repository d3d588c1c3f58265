"""Measures one training step with its optimizer: time, peak, host bytes, and beside them what `streamgrad.estimate` predicts.

A short step comes first, in which the optimizer makes its states. A model may be cut to its last few layers, at full width and
length; ballast then stands for the others, on the device and on the host, by the plan of the whole model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

import streamgrad
from benchmarks.lengths import capped
from benchmarks.objective import ROWS
from benchmarks.records import EVERYTHING, Session
from benchmarks.step import NOTHING, StepRecord, Timing, circumstances, clear_memory
from benchmarks.subject import Subject
from streamgrad.config import StreamConfig, parse_bytes
from streamgrad.engine.policy import LayerPolicy
from streamgrad.hf.configs import preset_config
from streamgrad.hf.estimates.estimate import Estimator, estimator_of
from streamgrad.hf.estimates.options import Options
from streamgrad.hf.estimates.report import Outlook
from streamgrad.memory.costs import sum_of
from streamgrad.memory.device import available_host_bytes
from streamgrad.memory.phases import host_parts, largest, streamed_phases
from streamgrad.memory.this_machine import machine

OPTIMIZERS = ("none", "adamw", "adamw8bit", "in-backward", "adamw8bit-in-backward", "host")
# What `estimate` calls them.
_PLANNED_AS = {"adamw8bit-in-backward": "in-backward"}
_SHORT = 1024


@dataclass(frozen=True, kw_only=True)
class TrainStepRecord(StepRecord):
    """Records a step with its optimizer. `predicted_bytes` is what the planner's arithmetic gives for its peak.

    `host_ballast_bytes` of ordinary host memory stand for what layers that were not built would keep there.
    """

    optimizer: str
    limit_bytes: int | None
    predicted_bytes: int
    host_ballast_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """Names a step: what is trained how, on how many tokens, and in which memory.

    `layers` is how many of the model's last layers are built; then layers keep their inputs alone.
    """

    model: str
    training: str = "full"
    objective: str = "sft"
    optimizer: str = "in-backward"
    tokens: int
    limit: str | None = None
    host: str | None = None
    layers: int | None = None
    keep: str = "auto"
    offload: str = "auto"
    recompute_layers: int | str = "auto"

    def __post_init__(self) -> None:
        for name, choices in {"optimizer": OPTIMIZERS, "training": ("full", "lora"), "objective": tuple(ROWS)}.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a choice. Pass one of {', '.join(choices)}.")

    @cached_property
    def outlook(self) -> Outlook:
        """Return what is predicted of the whole model's step."""
        estimator = self.estimator()
        return estimator.streamed(estimator.load(self.tokens), longest=0)

    @property
    def predicted_bytes(self) -> int:
        return int(self.outlook.peak_bytes + self._unplanned_bytes)

    @property
    def seconds(self) -> float:
        """Return about how long the step takes, of the layers that are built."""
        return self.outlook.seconds.total * (self.layers or self._all_layers) / self._all_layers

    @property
    def has_copy(self) -> bool:
        """Return whether a frozen copy of the model is the reference."""
        return self.objective != "sft" and self.training == "full"

    @property
    def _all_layers(self) -> int:
        return int(preset_config(self.model).num_hidden_layers)

    @cached_property
    def _unplanned_bytes(self) -> float:
        return self._unplanned(self.estimator(0.0).state.device)

    def _unplanned(self, state: Mapping[str, float]) -> float:
        """Return device bytes that estimates have no option for: 8-bit states of updates in backward, and GRPO's reference."""
        in_8_bits, copied = self.optimizer == "adamw8bit-in-backward", self.has_copy and self.objective == "grpo"
        return copied * state["weights"] - in_8_bits * state["optimizer state"] / 2

    def estimator(self, unplanned_bytes: float | None = None) -> Estimator:
        """Return the estimator of the whole model's steps in this memory, without those bytes that it does not know of."""
        if unplanned_bytes is None:
            unplanned_bytes = self._unplanned_bytes
        place = machine(
            gpu_bytes=int((parse_bytes(self.limit) if self.limit else _device_bytes()) - unplanned_bytes),
            host_bytes=parse_bytes(self.host) if self.host else int(available_host_bytes()),
        )
        options = Options(
            method=self.training, objective=self.objective, batch=8 if self.objective == "grpo" else 1,
            optimizer=_PLANNED_AS.get(self.optimizer, self.optimizer), keep="input" if self.layers else self.keep,
            offload=self.offload, recompute_layers=self.recompute_layers, machine=place,
        )  # fmt: skip
        return estimator_of(self.model, options)

    def config(self) -> StreamConfig:
        """Return the options of the step: auto, or for a cut model those that the whole one's plan has for its last layers."""
        if self.layers is None:
            return StreamConfig(keep=self.keep, offload=self.offload, recompute_layers=self.recompute_layers)
        plan = self.outlook.plan
        assert plan is not None
        places = {policy.on_host for policy in plan.policies[-self.layers :]}
        in_segments = any(policy.recomputed for policy in plan.policies)
        if (in_segments and self.layers > self.last_segment) or len(places) > 1:
            raise ValueError(
                f"layers={self.layers} of the plan of the whole model ({plan}) are not alike, or of more than one segment. Pass "
                f"{self.fewest_layers}."
            )
        place = "host" if places.pop() else "none"
        segment = self.layers if in_segments else 1
        return StreamConfig(keep="input", offload=place, recompute_layers=segment)  # chunks are planned beside the ballast

    @property
    def fewest_layers(self) -> int:
        """Return how many layers show all that the plan does: one that keeps its input, and one whose is recomputed, if any."""
        return min(2, self.last_segment)

    @property
    def last_segment(self) -> int:
        """Return the last layers of which the plan keeps one input: fewer than others have where they do not divide the model."""
        assert self.outlook.plan is not None
        kept = [index for index, policy in enumerate(self.outlook.plan.policies) if not policy.recomputed]
        return self._all_layers - kept[-1]

    @cached_property
    def ballast(self) -> tuple[int, int]:
        """Return the bytes, on the device and on the host, that stand for layers which are not built.

        That is what the whole model's step is predicted to hold more than that of the layers which are built, each at its peak,
        with the same chunks.
        """
        if self.layers is None:
            return 0, 0
        whole, config, plan = self.estimator(), self.config(), self.outlook.plan
        assert plan is not None
        shape = replace(
            whole.shape, layers=self.layers, full_attention_layers=min(self.layers, whole.shape.full_attention_layers)
        )
        last = plan.policies[-self.layers :]
        built = Estimator(shape, replace(whole.options, offload=config.offload, recompute_layers=config.recompute_layers))
        rows = whole.options.card(whole.state).head_rows(whole.load(self.tokens), plan)
        held = self._held(whole, plan.policies, plan.chunk_sizes, rows)
        of_built = self._held(built, [replace(last[0], recomputed=False), *last[1:]], plan.chunk_sizes[-self.layers :], rows)
        missing = {name: count - built.state.device.get(name, 0.0) for name, count in whole.state.device.items()}
        return int(held[0] - of_built[0] + self._unplanned(missing)), int(held[1] - of_built[1])

    def _held(
        self, estimator: Estimator, policies: Sequence[LayerPolicy], chunk_sizes: Sequence[int], head_rows: int
    ) -> tuple[float, float]:
        """Return the most bytes that a step holds, on the device and on the host."""
        load = estimator.load(self.tokens)
        phase = largest(streamed_phases(load, policies, chunk_sizes, head_rows))
        return phase.total_bytes, sum(sum_of(estimator.state.host, host_parts(load, policies)).values())


def optimizer_for(name: str, network: torch.nn.Module) -> torch.optim.Optimizer | None:
    """Return AdamW as `name` says, on the model's trained parameters: fused, in 8 bits, in backward, or on the host."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    if name == "none":
        return None
    if name == "host":
        offloaded = importlib.import_module("torchao.optim").CPUOffloadOptimizer
        made: torch.optim.Optimizer = offloaded(trained, torch.optim.AdamW, offload_gradients=True, lr=1e-5)
        return made
    in_8_bits = name.startswith("adamw8bit")
    kind = importlib.import_module("bitsandbytes").optim.AdamW8bit if in_8_bits else torch.optim.AdamW
    options = {"lr": 1e-5} if in_8_bits else {"lr": 1e-5, "fused": True}
    if name.endswith("in-backward"):
        return streamgrad.optimizer_in_backward(network, kind, **options)
    return kind(trained, **options)


def measure_cases(
    cases: Sequence[TrainingCase], *, command: str, device: torch.device, session: Session = EVERYTHING
) -> Iterator[TrainStepRecord]:
    """Yield the record of each case that the session does not have."""
    for case in cases:
        cell = {
            "benchmark": "train-step", "method": "streamgrad", "model": case.model, "training": case.training,
            "objective": case.objective, "optimizer": case.optimizer, "batch": ROWS[case.objective], "seq_len": case.tokens,
            "layers": case.layers or case._all_layers, "limit_bytes": parse_bytes(case.limit) if case.limit else None,
            "command": command, **circumstances(device),
        }  # fmt: skip
        if not session.has(cell, {}):
            session.tell(f"{case.model} {case.training} {case.objective} {case.optimizer} at {case.tokens:,}")
            with capped(parse_bytes(case.limit)) if case.limit and device.type == "cuda" else nullcontext():
                yield _measured(case, cell, device, session.tell)


def _measured(case: TrainingCase, cell: dict[str, Any], device: torch.device, tell: Callable[[str], None]) -> TrainStepRecord:
    clear_memory()
    config = case.config()
    predicted = {"predicted_bytes": case.predicted_bytes, "ballast_bytes": 0, "host_ballast_bytes": 0}
    optimizer = None
    try:
        subject = Subject.build(
            "streamgrad", case.model, training=case.training, objective=case.objective, layers=case.layers, device=device
        )
        optimizer = optimizer_for(case.optimizer, subject.network)
        with subject.enabled(config):
            tell("the model is built")
            _step_of(case, subject, optimizer, min(_SHORT, case.tokens))()
            tell("the optimizer has its states")
            predicted["ballast_bytes"], predicted["host_ballast_bytes"] = case.ballast
            held = torch.empty(predicted["host_ballast_bytes"], dtype=torch.uint8).fill_(1)  # so that there are pages behind it
            tell(f"the step begins; it takes {case.seconds:,.0f} s or more")
            step = _step_of(case, subject, optimizer, case.tokens)
            timing = Timing(device, runs=1, warm_ups=0, kernels=False)
            measured = timing.of(step, streams=True, held_bytes=predicted["ballast_bytes"]) | subject.outcome(config)
            del held
    except torch.OutOfMemoryError:
        measured = NOTHING | {
            "error": "out of memory before the step",
            "host_bytes": 0,
            "policy": vars(config) | {"plan": "none"},
        }
    finally:
        if hasattr(optimizer, "remove"):
            optimizer.remove()  # or its hooks hold the model for as long as the process lives
    return TrainStepRecord(**cell, **measured, **predicted)


def _step_of(case: TrainingCase, subject: Subject, optimizer: Any, tokens: int) -> Callable[[], None]:
    """Return a function that runs a step on random tokens and lets the optimizer end it."""
    shape = (ROWS[case.objective], tokens)
    ids_BT = torch.randint(subject.network.config.vocab_size, shape, device=subject.network.device)
    backward = subject.step_on(ids_BT, accumulates=False)

    def step() -> None:
        backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    return step


# Whole models in memory that is small enough for steps of seconds: what predictions with optimizers are tested against. Those
# that need other packages come last.
CONFIGURATIONS = tuple(
    TrainingCase(model=model, training=training, optimizer=optimizer, tokens=tokens, limit=limit, offload=offload)
    for model, training, optimizer, tokens, limit, offload in (
        ("qwen3-0.6b", "full", "adamw", 16_000, "8GiB", "none"),
        ("qwen3-0.6b", "full", "in-backward", 24_000, "6GiB", "none"),
        ("qwen3-1.7b", "full", "adamw", 16_000, "18GiB", "none"),
        ("qwen3-1.7b", "full", "in-backward", 16_000, "16GiB", "none"),
        ("qwen3-4b", "lora", "adamw", 12_000, "14GiB", "none"),
        ("gemma-3-1b", "full", "adamw", 16_000, "12GiB", "none"),
        ("qwen3-4b", "full", "in-backward", 12_000, "36GiB", "auto"),
        ("qwen3-1.7b", "full", "in-backward", 32_000, "14GiB", "auto"),
        ("qwen3-1.7b", "full", "adamw8bit", 16_000, "16GiB", "none"),
        ("qwen3-1.7b", "full", "adamw8bit-in-backward", 16_000, "12GiB", "none"),
        ("qwen3-1.7b", "full", "host", 16_000, "10GiB", "none"),
    )
)


def _device_bytes() -> int:
    """Return what a process may use of the GPU; without one, as much as a small model cannot fill."""
    return torch.cuda.mem_get_info()[1] - 2**29 if torch.cuda.is_available() else 2**40
