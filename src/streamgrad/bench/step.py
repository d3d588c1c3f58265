"""One training step, forward and backward, by several methods on the same random inputs: time and memory.

The peers are configured as their authors would: transformers' gradient checkpointing with SDPA, and Liger's kernels (with its
fused linear cross entropy) on top of it.
"""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import streamgrad
from streamgrad.bench.records import device_name, median_ms, versions
from streamgrad.config import StreamConfig
from streamgrad.core.chunk import KEYS_AT_ONCE
from streamgrad.models.forwards import InstalledForward
from streamgrad.models.presets import preset_config, preset_model

METHODS = ("hf", "liger", "liger-offload", "streamgrad", "streamgrad-liger")
# Liger patches transformers for the whole process: its kernels come after everything else, its fused loss last.
_ORDER = ("hf", "streamgrad", "streamgrad-liger", "liger", "liger-offload")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One method at one length; the measurements are None where `error` says why.

    `peak_bytes` and `reserved_bytes` are the allocator's, weights and gradients included; `host_bytes` is pinned host memory.
    `kernel_ms` is the time of one step's kernels by kind, from the profiler. Where only `layers` of the model's layers were run,
    `ballast_bytes` of device memory stood for the others: their weights, gradients and whatever they keep on the device.
    """

    benchmark: str
    method: str
    model: str
    training: str = "full"
    seq_len: int
    layers: int
    step_ms: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int
    ballast_bytes: int = 0
    kernel_ms: dict[str, float] | None = None
    policy: dict[str, Any]
    error: str | None
    device: str
    versions: dict[str, str]
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
    kernels: bool = False,
    benchmark: str = "step",
    ballast: Callable[[PreTrainedModel, int], int] | None = None,
    budgets: dict[int, int] | None = None,
) -> Iterator[StepRecord]:
    """A record per method and length. Each method gets a model of its own, made from the same seed.

    Args:
        layers: how many of the model's layers to build; all of them unless given.
        training: "full", or "lora" for adapters of rank 32 on every linear map of the layers.
        kernels: profile one more step of streamgrad's.
        ballast: of the built model and a length, bytes to be held on the device while it is measured.
        budgets: `memory_budget` by length, in place of the one in `config`.
    """
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"methods={unknown[0]!r} is not a choice. Pass some of {', '.join(METHODS)}.")
    preset = preset_config(model)
    if not torch.cuda.is_available():
        raise ValueError(f"bench {benchmark} measures a GPU, and torch sees none.")
    device = torch.device("cuda")
    for method in sorted(methods, key=_ORDER.index):
        clear_memory()
        torch.manual_seed(0)
        if "liger" in method:
            _apply_liger(preset.model_type, fused_loss=method.startswith("liger"))
        network = preset_model(model, device=device, layers=layers)
        if training == "lora":
            _attach_lora(network)
        if "streamgrad" not in method:
            network.gradient_checkpointing_enable(offload=method == "liger-offload")
        for length in lengths:
            used = replace(config, memory_budget=budgets[length]) if budgets else config
            if "streamgrad" in method:
                streamgrad.enable(network, used)
            ids = torch.randint(0, network.config.vocab_size, (1, length), device=device)
            weight = torch.empty(ballast(network, length) if ballast else 0, dtype=torch.uint8, device=device)
            outcome = _measure(
                _step_of(network, ids), device, runs, warm_ups=warm_ups, kernels=kernels and "streamgrad" in method
            )
            installed = InstalledForward.on(network.get_decoder())
            yield StepRecord(
                benchmark=benchmark,
                method=method,
                model=model,
                training=training,
                seq_len=length,
                layers=layers or preset.num_hidden_layers,
                **outcome,
                host_bytes=installed.stream.host_store.total_bytes if installed else 0,
                ballast_bytes=weight.numel(),
                policy=_policy_of(used, installed) if installed else {"gradient_checkpointing": True, "attention": "sdpa"},
                device=device_name(device),
                versions=versions("transformers", "liger-kernel", "triton"),
                command=command,
            )
            del weight
            if installed:
                streamgrad.disable(network)
        network = installed = None  # or the next method would be measured beside this model


def peaks_in(path: Path, *, method: str, model: str, lengths: Sequence[int]) -> dict[int, int]:
    """By length, the peak bytes of the latest record of a method."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    peaks = {row["seq_len"]: row["peak_bytes"] for row in rows if (row["method"], row["model"]) == (method, model)}
    missing = [length for length in lengths if not peaks.get(length)]
    if missing:
        raise ValueError(f"{path} has no record of {method} with {model} at {missing[0]} tokens. Measure it first.")
    return {length: peaks[length] for length in lengths}


def _policy_of(config: StreamConfig, installed: InstalledForward) -> dict[str, Any]:
    """The options, what they came to, and the bound on a kernel's workspace (records of before there was one lack it)."""
    outcome = {"plan": str(installed.stream.planner.latest), "kernel": installed.stream.backends[0].name}
    return vars(config) | outcome | {"keys_at_once": KEYS_AT_ONCE}


def _step_of(network: Any, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        network.zero_grad(set_to_none=True)
        network(input_ids=ids, labels=ids).loss.backward()

    return step


def _measure(step: Callable[[], None], device: torch.device, runs: int, *, warm_ups: int, kernels: bool) -> dict[str, Any]:
    """The measurements of a `StepRecord`.

    Four steps warm up, unless the caller knows better: kernels are compiled in the first, the allocator has settled after the
    second, and by the fourth a shape of a few thousand tokens has been given to the kernel that it will stay with.
    """
    clear_memory()
    torch.cuda.reset_peak_memory_stats(device)
    nothing = {"step_ms": None, "peak_bytes": None, "reserved_bytes": None, "kernel_ms": None}
    try:
        for _ in range(warm_ups):
            step()
        step_ms = median_ms(step, device, runs)
        peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        kernel_ms = _kernel_ms(step) if kernels else None
    except torch.OutOfMemoryError:
        return nothing | {"error": "out of memory"}
    except ValueError as error:
        return nothing | {"error": str(error)}
    return {"step_ms": step_ms, "peak_bytes": peak, "reserved_bytes": reserved, "kernel_ms": kernel_ms, "error": None}


def _kernel_ms(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a step's kernels: attention, matrix products, copies, everything else."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    totals = dict.fromkeys(("attention", "gemm", "copy", "other"), 0.0)
    for event in profile.key_averages():
        totals[kernel_kind(event.key)] += event.self_device_time_total / 1e3
    return {kind: round(ms, 3) for kind, ms in totals.items()}


def kernel_kind(name: str) -> str:
    """By the words in a kernel's name."""
    name = name.lower()
    for kind, words in (
        ("attention", ("sdpa", "flash", "fmha", "attention")),
        ("gemm", ("gemm", "nvjet", "cublas", "cutlass", "splitk")),
        ("copy", ("memcpy", "memset")),
    ):
        if any(word in name for word in words):
            return kind
    return "other"


def _attach_lora(network: PreTrainedModel) -> None:
    peft = importlib.import_module("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    network.add_adapter(peft.LoraConfig(r=32, lora_alpha=32, target_modules=targets))
    network.enable_input_require_grads()


def _apply_liger(model_type: str, *, fused_loss: bool) -> None:
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ModuleNotFoundError as error:
        raise ValueError("the methods liger and streamgrad-liger need liger-kernel. Run: pip install liger-kernel") from error
    patch = getattr(liger, f"apply_liger_kernel_to_{model_type}", None)
    if patch is None:
        raise ValueError(f"liger-kernel has no kernels for {model_type}. Leave the methods with liger out.")
    patch(fused_linear_cross_entropy=fused_loss)


def clear_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
