"""Measures one training step of a model, with gradient checkpointing and streamed: the work of `streamgrad bench`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import streamgrad
from streamgrad.engine.shortage import is_out_of_memory
from streamgrad.hf.configs import config_of, short_reason, with_layers
from streamgrad.hf.presets import preset_names
from streamgrad.memory.live_bytes import peak_bytes_of


@dataclass(frozen=True)
class Cell:
    """Holds the measurements of one method at one length; they are None where `error` says why.

    `peak_bytes` counts above what was there before the step: the weights.
    """

    seq_len: int
    method: str
    step_ms: float | None
    peak_bytes: int | None
    error: str | None


def measured_model(name: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    """Build the model, or its first `layers` layers, on `device`, with the weights of its directory or random ones."""
    config = config_of(name)
    config = config if layers is None else with_layers(config, layers)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    try:
        if has_weights(name):
            return AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype).to(device).train()
        with device:
            return AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    except Exception as error:  # of any kind: no class of transformers' says in one way what it cannot be made of
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"model={name!r}: transformers cannot build this {config.model_type} model: {type(error).__name__}: "
            f"{short_reason(error).rstrip('.')}. Pass a directory that save_pretrained has written, or a preset."
        ) from error


def has_weights(name: str) -> bool:
    """Return whether the name is that of a directory with weights in it, and not a preset's."""
    return name not in preset_names() and any(file for kind in ("*.safetensors", "*.bin") for file in Path(name).glob(kind))


def random_ids(model: PreTrainedModel, tokens: int, device: torch.device) -> Tensor:
    """Return one row of so many random tokens of the model's vocabulary, the same in every call."""
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)


def steps_of(model: PreTrainedModel, tokens: int, runs: int, device: torch.device) -> Iterator[Cell]:
    """Yield a cell for gradient checkpointing and one for streaming, on the same random tokens."""
    ids_BT = random_ids(model, tokens, device)
    for method, switched_on in (("checkpointing", checkpointing), ("streamgrad", streamed)):
        with switched_on(model):
            cell = _measure(model, ids_BT, method, runs, device)
        yield cell


@contextmanager
def checkpointing(model: PreTrainedModel) -> Iterator[None]:
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


@contextmanager
def streamed(model: PreTrainedModel, **options: Any) -> Iterator[None]:
    streamgrad.enable(model, **options)
    try:
        yield
    finally:
        streamgrad.disable(model)


def _measure(model: PreTrainedModel, ids_BT: Tensor, method: str, runs: int, device: torch.device) -> Cell:
    def step() -> None:
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    error = None
    try:
        if device.type == "cuda":
            step()  # what libraries set up at their first use is no part of a step
        peak_bytes = peak_bytes_of(step, device)[1]  # which warms up a CPU
        return Cell(ids_BT.shape[1], method, median_ms(step, device, runs), peak_bytes, None)
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
        error = "out of memory"
    # Here, where the failed step's frames hold nothing any more.
    model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Cell(ids_BT.shape[1], method, None, None, error)


def median_ms(step: Callable[[], object], device: torch.device, runs: int) -> float:
    """Return the median wall time of `runs` steps, each waited for; the caller warms up."""
    times_ms = []
    for _ in range(runs):
        _wait_for(device)
        start = time.perf_counter()
        step()
        _wait_for(device)
        times_ms.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times_ms)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or `cpu, 2 threads`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
