"""Measures time and memory of one training step, forward and backward, by several methods on the same random inputs."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.names import METHODS
from benchmarks.objective import OBJECTIVES
from benchmarks.peers import flash_name
from benchmarks.records import EVERYTHING, Session, rows_in, versions
from benchmarks.subject import Subject
from streamgrad.cli.bench_run import device_name, median_ms
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config
from streamgrad.memory.device import allocator_settings
from streamgrad.memory.live_bytes import peak_bytes_of

_PACKAGES = ("transformers", "liger-kernel", "triton", "deepspeed", "flash-attn-3", "flash-attn-4")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Records one method at one shape; the measurements are None where `error` says why.

    The step has `batch` rows of `seq_len` tokens: for DPO those of all pairs, for GRPO one a completion.
    `peak_bytes` and `reserved_bytes` are the allocator's, weights and gradients included; `host_bytes` is pinned host memory.
    `kernel_ms` is the time of a step's kernels by kind, from the profiler. Where only `layers` of the model's layers were run,
    `ballast_bytes` of device memory stood for the others: their weights, gradients and whatever they keep on the device.
    `accumulates`: gradients of an earlier step were there, and this one's were added to them. `flash` is what torch's flash
    operators ran (`peers.use_flash`). `allocator` has the settings of torch's allocator.
    """

    benchmark: str
    method: str
    model: str
    training: str = "full"
    objective: str = "sft"
    batch: int = 1
    seq_len: int
    layers: int
    step_ms: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int
    ballast_bytes: int = 0
    kernel_ms: dict[str, float] | None = None
    accumulates: bool = False
    flash: str = "FA2"
    policy: dict[str, Any]
    error: str | None
    device: str
    versions: dict[str, str]
    allocator: str = ""
    command: str


def measure_steps(
    *,
    model: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    config: StreamConfig,
    runs: int,
    command: str,
    warm_ups: int = 4,
    layers: int | None = None,
    training: str = "full",
    objective: str = "sft",
    batches: Sequence[int] = (1,),
    kernels: bool = False,
    accumulates: bool = False,
    benchmark: str = "step",
    ballast: Callable[[PreTrainedModel, int], int] | None = None,
    budgets: dict[int, int] | None = None,
    device: torch.device | None = None,
    session: Session = EVERYTHING,
) -> Iterator[StepRecord]:
    """Yield a record per method, length and batch. Each method gets a model of its own, made from the same seed.

    Args:
        layers: how many of the model's layers to build; all of them unless given.
        training: "full", or "lora" for adapters of rank 32 on every linear map of the layers.
        objective: "sft"; or "dpo", "grpo" with a reference pass, by streamgrad alone.
        batches: rows of a step.
        kernels: profile some more steps of streamgrad's.
        accumulates: gradients stay from step to step, as between two steps of an optimizer.
        ballast: of the built model and a number of tokens, bytes to be held on the device while it is measured.
        budgets: `memory_budget` by length, in place of the one in `config`.
        device: the GPU unless given. On a CPU, `peak_bytes` is counted above what the step found.
        session: cells that it has are left out.
    """
    check_choices(methods, objective)
    built = layers or preset_config(model).num_hidden_layers
    device = device or gpu_for(benchmark)
    shared = {
        "benchmark": benchmark, "model": model, "training": training, "objective": objective, "layers": built,
        "accumulates": accumulates, "command": command, **circumstances(device),
    }  # fmt: skip
    timing = Timing(device, runs, warm_ups, kernels)
    for method in sorted(methods, key=METHODS.index):
        pending = pending_cells(shared | {"method": method}, itertools.product(lengths, batches), config, budgets, session)
        if pending:
            # In a generator of its own: when that ends, its model is gone, and the next method has the device to itself.
            yield from _measure_method(pending, timing, layers=layers, ballast=ballast, session=session)


def gpu_for(benchmark: str) -> torch.device:
    """Return the GPU, or raise for a benchmark that has none to measure."""
    if not torch.cuda.is_available():
        raise ValueError(f"the {benchmark} benchmark measures a GPU, and torch sees none. Run it on a machine with one.")
    return torch.device("cuda")


def circumstances(device: torch.device) -> dict[str, Any]:
    """Return the fields of a record that name the machine and its software."""
    return {
        "device": device_name(device), "versions": versions(*_PACKAGES), "flash": flash_name(), "allocator": allocator_settings(),
    }  # fmt: skip


Pending = list[tuple[dict[str, Any], StreamConfig]]


def pending_cells(
    shared: dict[str, Any],
    shapes: Iterable[tuple[int, int]],
    config: StreamConfig,
    budgets: dict[int, int] | None,
    session: Session,
) -> Pending:
    """Return the cells of a method that the session does not have, each with its options."""
    pending: Pending = []
    for length, batch in shapes:
        cell = shared | {"batch": batch, "seq_len": length}
        used = replace(config, memory_budget=budgets[length]) if budgets else config
        used = replace(used, compile_layers=cell["method"] == "streamgrad-compile")
        if session.has(cell, vars(used) if "streamgrad" in cell["method"] else {}):
            session.tell(f"{cell_name(cell)}: measured before")
        else:
            pending.append((cell, used))
    return pending


def cell_name(cell: dict[str, Any]) -> str:
    """Return what the user is told of a cell while it is measured."""
    return f"{cell['model']} {cell['method']} at {cell['batch']} x {cell['seq_len']:,}"


def _measure_method(
    pending: Pending,
    timing: Timing,
    *,
    layers: int | None,
    ballast: Callable[[PreTrainedModel, int], int] | None,
    session: Session,
) -> Iterator[StepRecord]:
    """Yield the records of one method, whose model is built once for all of its cells."""
    torch.compiler.reset()  # torch compiles a class a few times only, and methods before this one compiled it too
    clear_memory()
    method, model, training, objective = (pending[0][0][name] for name in ("method", "model", "training", "objective"))
    subject = Subject.build(method, model, training=training, objective=objective, layers=layers, device=timing.device)
    for cell, config in pending:
        batch, length = cell["batch"], cell["seq_len"]
        session.tell(cell_name(cell))
        with subject.enabled(config):
            ids_BT = torch.randint(0, subject.network.config.vocab_size, (batch, length), device=timing.device)
            held_bytes = ballast(subject.network, batch * length) if ballast else 0
            step = subject.step_on(ids_BT, accumulates=cell["accumulates"])
            measured = timing.of(step, streams=subject.streams, held_bytes=held_bytes)
            record = StepRecord(**cell, **measured, **subject.outcome(config), ballast_bytes=held_bytes)
        yield record


def check_choices(methods: Sequence[str], objective: str) -> None:
    """Raise for a method or an objective that there is not, and for methods that cannot be measured in one process."""
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"methods={unknown[0]!r} is not a choice. Pass some of {', '.join(METHODS)}.")
    if "streamgrad-zero3" in methods and any("liger" in method for method in methods):
        raise ValueError(
            "DeepSpeed replaces torch's linear map for the rest of the process, and Liger transformers' modules, so that neither "
            "can be measured beside the other. Measure streamgrad-zero3 and the methods with liger in two commands."
        )
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is not a choice. Pass one of {', '.join(OBJECTIVES)}.")
    others = [method for method in methods if "streamgrad" not in method]
    if objective != "sft" and others:
        raise ValueError(f"methods={others[0]!r} has steps of sft only, not of objective={objective!r}. Leave it out.")


def peaks_in(path: Path, *, method: str, model: str, lengths: Sequence[int]) -> dict[int, int]:
    """Return the peak bytes of the latest record of a method, by length."""
    peaks = {
        row["seq_len"]: row["peak_bytes"]
        for row in rows_in(path)
        if (row["method"], row["model"], row.get("batch", 1), row.get("flash", "FA2")) == (method, model, 1, "FA2")
    }
    missing = [length for length in lengths if not peaks.get(length)]
    if missing:
        raise ValueError(f"{path} has no record of {method} with {model} at {missing[0]} tokens. Measure it first.")
    return {length: peaks[length] for length in lengths}


# The measurements of a step that did not run.
NOTHING: dict[str, Any] = {"step_ms": None, "peak_bytes": None, "reserved_bytes": None, "kernel_ms": None}
OUT_OF_MEMORY = NOTHING | {"error": "out of memory"}


@dataclass(frozen=True)
class Timing:
    """Measures steps: how often, after how many that warm up, and whether their kernels are profiled.

    Four steps warm up, unless the caller knows better: kernels are compiled in the first, the allocator has settled after the
    second, and by the fourth a shape of a few thousand tokens has been given to the kernel that it will stay with.
    """

    device: torch.device
    runs: int
    warm_ups: int
    kernels: bool

    def of(self, step: Callable[[], None], *, streams: bool, held_bytes: int) -> dict[str, Any]:
        """Return the measurements of a `StepRecord`."""
        clear_memory()
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            ballast = torch.empty(held_bytes, dtype=torch.uint8, device=self.device)
            for _ in range(self.warm_ups):
                step()
            step_ms = median_ms(step, self.device, self.runs)
            peak = torch.cuda.max_memory_allocated(self.device) if on_cuda else peak_bytes_of(step, self.device)[1]
            reserved = torch.cuda.max_memory_reserved(self.device) if on_cuda else None
            kernel_ms = _kernel_ms(step) if self.kernels and streams else None
            del ballast
        except torch.OutOfMemoryError:
            return OUT_OF_MEMORY
        except ValueError as error:
            return NOTHING | {"error": str(error)}
        return {"step_ms": step_ms, "peak_bytes": peak, "reserved_bytes": reserved, "kernel_ms": kernel_ms, "error": None}


def _kernel_ms(step: Callable[[], None]) -> dict[str, float]:
    """Return milliseconds of a step's kernels: attention, matrix products, copies, everything else.

    They are the mean of three steps that follow three others. Timed steps follow others too, and a device that has rested while
    a profiler starts runs faster than one at its limit of power.
    """
    warm, counted = 3, 3
    schedule = torch.profiler.schedule(wait=0, warmup=warm, active=counted, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule) as profile:
        for _ in range(warm + counted):
            step()
            torch.cuda.synchronize()
            profile.step()
    totals = dict.fromkeys(("attention", "gemm", "copy", "other"), 0.0)
    for event in profile.key_averages():
        totals[kernel_kind(event.key)] += event.self_device_time_total / counted / 1e3
    return {kind: round(ms, 3) for kind, ms in totals.items()}


def kernel_kind(name: str) -> str:
    """Return what a kernel does, by the words in its name."""
    name = name.lower()
    for kind, words in (
        ("attention", ("sdpa", "flash", "fmha", "attention", "dot_do_o", "convert_dq")),
        ("gemm", ("gemm", "nvjet", "cublas", "cutlass", "splitk")),
        ("copy", ("memcpy", "memset")),
    ):
        if any(word in name for word in words):
            return kind
    return "other"


def clear_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
