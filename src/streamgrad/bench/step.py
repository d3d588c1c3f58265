"""One training step, forward and backward, by several methods on the same random inputs: time and memory.

The peers are configured as their authors would: transformers' gradient checkpointing with SDPA, and Liger's kernels (with its
fused linear cross entropy) on top of it.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import streamgrad
from streamgrad.bench.records import device_name, median_ms, versions
from streamgrad.config import StreamConfig
from streamgrad.models.forwards import InstalledForward
from streamgrad.models.presets import preset_config, preset_model

METHODS = ("hf", "liger", "streamgrad", "streamgrad-liger")


@dataclass(frozen=True)
class StepRecord:
    """One method at one length; the measurements are None where `error` says why.

    `peak_bytes` and `reserved_bytes` are the allocator's, weights and gradients included; `host_bytes` is pinned host memory.
    """

    benchmark: str
    method: str
    model: str
    seq_len: int
    step_ms: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int
    policy: dict[str, Any]
    error: str | None
    device: str
    versions: dict[str, str]
    command: str


def measure_steps(
    *, model: str, lengths: Sequence[int], methods: Sequence[str], config: StreamConfig, runs: int, command: str
) -> Iterator[StepRecord]:
    """A record per method and length. Each method gets a model of its own, made from the same seed."""
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"methods={unknown[0]!r} is not a choice. Pass some of {', '.join(METHODS)}.")
    model_type = preset_config(model).model_type
    if not torch.cuda.is_available():
        raise ValueError("bench step measures a GPU, and torch sees none.")
    device = torch.device("cuda")
    # Liger patches transformers for the whole process: its kernels come after everything else, its fused loss last.
    for method in sorted(methods, key=["hf", "streamgrad", "streamgrad-liger", "liger"].index):
        _clear_memory()
        torch.manual_seed(0)
        if "liger" in method:
            _apply_liger(model_type, fused_loss=method == "liger")
        network = preset_model(model, device=device)
        if method in ("hf", "liger"):
            network.gradient_checkpointing_enable()
        else:
            streamgrad.enable(network, config)
        for length in lengths:
            ids = torch.randint(0, network.config.vocab_size, (1, length), device=device)
            step_ms, peak, reserved, error = _measure(_step_of(network, ids), device, runs)
            installed = InstalledForward.on(network.get_decoder())
            store = installed.stream.host_store if installed else None
            yield StepRecord(
                benchmark="step",
                method=method,
                model=model,
                seq_len=length,
                step_ms=step_ms,
                peak_bytes=peak,
                reserved_bytes=reserved,
                host_bytes=store.pool.total_bytes if store else 0,
                policy=_policy_of(config, installed) if installed else {"gradient_checkpointing": True, "attention": "sdpa"},
                error=error,
                device=device_name(device),
                versions=versions("transformers", "liger-kernel", "triton"),
                command=command,
            )
        del network


def _policy_of(config: StreamConfig, installed: InstalledForward) -> dict[str, Any]:
    """The options, and what they came to."""
    return vars(config) | {"plan": str(installed.stream.planner.latest), "kernel": installed.stream.backends[0].name}


def _step_of(network: Any, ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        network.zero_grad(set_to_none=True)
        network(input_ids=ids, labels=ids).loss.backward()

    return step


def _measure(
    step: Callable[[], None], device: torch.device, runs: int
) -> tuple[float | None, int | None, int | None, str | None]:
    """Two steps warm up: kernels are chosen and compiled in the first, and the allocator has settled after the second."""
    _clear_memory()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        for _ in range(2):
            step()
        step_ms = median_ms(step, device, runs)
    except torch.OutOfMemoryError:
        return None, None, None, "out of memory"
    return step_ms, torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device), None


def _apply_liger(model_type: str, *, fused_loss: bool) -> None:
    try:
        liger = importlib.import_module("liger_kernel.transformers")
    except ModuleNotFoundError as error:
        raise ValueError("the methods liger and streamgrad-liger need liger-kernel. Run: pip install liger-kernel") from error
    patch = getattr(liger, f"apply_liger_kernel_to_{model_type}", None)
    if patch is None:
        raise ValueError(f"liger-kernel has no kernels for {model_type}. Leave the methods with liger out.")
    patch(fused_linear_cross_entropy=fused_loss)


def _clear_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
