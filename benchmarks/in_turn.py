"""Measures short steps of several methods in turn, for hosts whose speed drifts from one minute to the next.

A step of a few thousand tokens takes as long as the host needs to launch its kernels. Methods that are measured one after the
other find hosts of different speeds; in turn, every drift is shared by all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch._dynamo

from benchmarks.names import METHODS
from benchmarks.records import EVERYTHING, Session
from benchmarks.step import (
    OUT_OF_MEMORY,
    Pending,
    StepRecord,
    Timing,
    cell_name,
    check_choices,
    circumstances,
    clear_memory,
    gpu_for,
    pending_cells,
)
from benchmarks.subject import Subject
from streamgrad.cli.bench_run import median_ms
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config

_LASTING = {"liger": "Liger patches transformers' classes", "zero3": "DeepSpeed replaces torch's linear map"}


def measure_in_turn(
    *,
    model: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    config: StreamConfig,
    runs: int,
    command: str,
    warm_ups: int = 4,
    batches: Sequence[int] = (1,),
    kernels: bool = False,
    accumulates: bool = False,
    device: torch.device | None = None,
    session: Session = EVERYTHING,
) -> Iterator[StepRecord]:
    """Yield the records of `measure_steps`, shape by shape; the timed steps of a shape are taken by all methods in turn.

    All models are on the device from the first shape to the last. At each shape every method first runs alone: it warms up, and
    its memory is measured, less the models of the others. Then come `runs` rounds, in which each method runs one step that is
    not timed and one that is. The former is there because other methods ran in between. It makes gradients, which methods drop
    after their turn so that many models fit, and it finds the method's compiled graphs: torch keeps those of all models of a
    class in one list, and moves the one that was used to the front.

    `config` has no `memory_budget`, which would be for all models together. `measure_steps` explains the other arguments.
    """
    check_choices(methods, "sft")
    _refuse_lasting_changes(methods)
    device = device or gpu_for("step")
    shared = {
        "benchmark": "step", "model": model, "layers": preset_config(model).num_hidden_layers, "accumulates": accumulates,
        "command": command, **circumstances(device),
    }  # fmt: skip
    shapes, timing = list(itertools.product(lengths, batches)), Timing(device, runs, warm_ups, kernels)
    entrants = []
    for method in sorted(methods, key=METHODS.index):
        pending = pending_cells(shared | {"method": method}, shapes, config, None, session)
        if pending:
            entrants.append(_Entrant.build(pending, device))
    # Beyond so many graphs of a class torch runs its layers as they are. Each method may have as many as it has alone.
    graphs = torch._dynamo.config.recompile_limit * max(1, len(entrants))
    with torch._dynamo.config.patch(recompile_limit=graphs):
        for shape in shapes:
            yield from _measure_shape(shape, entrants, timing, session)


def _refuse_lasting_changes(methods: Sequence[str]) -> None:
    for method, (word, cause) in itertools.product(methods, _LASTING.items()):
        if word in method:
            raise ValueError(
                f"methods={method!r} cannot be measured with --in-turn: {cause} for the rest of the process, under the other "
                "methods too. Leave it out, and measure it in a command of its own."
            )


@dataclass
class _Entrant:
    """Holds a method's model, the bytes that it took on the device, and the cells to measure, by length and batch."""

    subject: Subject
    model_bytes: int
    cells: dict[tuple[int, int], tuple[dict[str, Any], StreamConfig]]

    @classmethod
    def build(cls, pending: Pending, device: torch.device) -> _Entrant:
        clear_memory()
        before, first = allocated_bytes(device), pending[0][0]
        subject = Subject.build(first["method"], first["model"], training="full", objective="sft", layers=None, device=device)
        clear_memory()
        cells = {(cell["seq_len"], cell["batch"]): (cell, config) for cell, config in pending}
        return cls(subject, allocated_bytes(device) - before, cells)


def allocated_bytes(device: torch.device) -> int:
    """Return what this process's tensors take on a GPU. On a CPU it is 0: peaks there are counted above what a step finds."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _measure_shape(
    shape: tuple[int, int], entrants: Sequence[_Entrant], timing: Timing, session: Session
) -> Iterator[StepRecord]:
    """Yield the records of one length and batch, by the methods that are to be measured there."""
    entered = [(entrant, *entrant.cells[shape]) for entrant in entrants if shape in entrant.cells]
    if not entered:
        return
    models_bytes, (length, batch) = sum(entrant.model_bytes for entrant in entrants), shape
    vocabulary = entered[0][0].subject.network.config.vocab_size
    ids_BT = torch.randint(0, vocabulary, (batch, length), device=timing.device)
    with ExitStack() as streaming:
        turns = []
        for entrant, cell, config in entered:
            session.tell(cell_name(cell))
            streaming.enter_context(entrant.subject.enabled(config))
            turns.append(_Turns(entrant.subject, entrant.subject.step_on(ids_BT, accumulates=cell["accumulates"])))
            turns[-1].run_alone(timing, others_bytes=models_bytes - entrant.model_bytes)
        for _, turn in itertools.product(range(timing.runs), turns):
            turn.take(timing.device)
        records = [
            StepRecord(**cell, **turn.measured(), **entrant.subject.outcome(config))
            for (entrant, cell, config), turn in zip(entered, turns, strict=True)
        ]
    yield from records


@dataclass
class _Turns:
    """Runs the steps of one method at one shape, and keeps what was measured: alone, and in its turns."""

    subject: Subject
    step: Callable[[], None]
    alone: dict[str, Any] = field(default_factory=dict)
    times_ms: list[float] = field(default_factory=list)

    def run_alone(self, timing: Timing, *, others_bytes: int) -> None:
        """Warm up and measure memory, less `others_bytes`, which the models of the other methods hold."""
        self.alone = replace(timing, runs=1).of(self.step, streams=self.subject.streams, held_bytes=0)
        for name in ("peak_bytes", "reserved_bytes"):
            if self.alone[name] is not None:
                self.alone[name] -= others_bytes
        self._drop_gradients()

    def take(self, device: torch.device) -> None:
        """Run one step, then one that is timed, unless the method has failed at this shape."""
        if self.alone["error"] is not None:
            return
        try:
            self.step()
            self.times_ms.append(median_ms(self.step, device, 1))
        except torch.OutOfMemoryError:
            self.alone = OUT_OF_MEMORY
        self._drop_gradients()

    def measured(self) -> dict[str, Any]:
        """Return the measurements of a `StepRecord`."""
        failed = self.alone["error"] is not None
        return self.alone if failed else self.alone | {"step_ms": statistics.median(self.times_ms)}

    def _drop_gradients(self) -> None:
        self.subject.network.zero_grad(set_to_none=True)
