"""Measures a run of training: AdamW steps over sequences that all have different lengths, streamed and beside a peer.

Lengths are quantiles of a lognormal distribution in a shuffled order, the same for every method, as are weights and tokens.
Nothing warms up: a run begins with kernels that were never launched and an optimizer without states, and every new length is new
to the allocator and to the libraries that choose kernels by shape.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers import flash_name
from benchmarks.records import EVERYTHING, Session, versions
from benchmarks.subject import Subject
from streamgrad.cli.bench_run import device_name
from streamgrad.config import StreamConfig
from streamgrad.engine.shortage import is_out_of_memory
from streamgrad.memory.device import allocator_settings

# The standard deviation of a length's logarithm: a thirtieth of sequences is longer than 4.5 times the mean.
_SPREAD = 0.9
_PACKAGES = ("transformers", "liger-kernel", "peft", "triton", "flash-attn-4")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Records one method's run: for each step its tokens, time and loss, None where memory ran out.

    `tokens_per_second` counts every step, the first with all that is compiled in it and those that ran out of memory, whose
    tokens do not count; `later_tokens_per_second` leaves the first out. Peaks and plans are as in a `StepRecord`. `settled_ms`
    are the times of the same steps once their lengths are no longer new, where these were measured too. `flash` is as there.
    """

    benchmark: str = "run"
    method: str
    model: str
    training: str
    optimizer: str
    layers: int
    lengths: list[int]
    step_ms: list[float]
    settled_ms: list[float] | None = None
    losses: list[float | None]
    out_of_memory: int
    tokens_per_second: float
    later_tokens_per_second: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int
    flash: str
    policy: dict[str, Any]
    device: str
    versions: dict[str, str]
    allocator: str
    command: str


def lengths_of_run(steps: int, mean_tokens: int, longest_tokens: int) -> list[int]:
    """Return the tokens of each step: evenly spaced quantiles of a lognormal distribution, shuffled, none above the longest."""
    median = mean_tokens * math.exp(-(_SPREAD**2) / 2)
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((step + 0.5) / steps) for step in range(steps)]
    lengths = [max(2, min(longest_tokens, round(median * math.exp(_SPREAD * z)))) for z in quantiles]
    random.Random(0).shuffle(lengths)
    return lengths


def measure_run(
    *,
    model: str,
    training: str,
    method: str,
    lengths: Sequence[int],
    device: torch.device,
    command: str,
    layers: int | None = None,
    settles: bool = False,
    session: Session = EVERYTHING,
) -> RunRecord | None:
    """Return the record of a run, each of whose steps the session is told, or None if the session has it.

    With `settles` the run is repeated until the program has met every length three times.
    """
    cell = {
        "benchmark": "run", "method": method, "model": model, "training": training, "lengths": list(lengths), "command": command,
        "flash": flash_name(), "device": device_name(device), "versions": versions(*_PACKAGES), "allocator": allocator_settings(),
    }  # fmt: skip
    if session.has(cell, {}):
        return None
    subject = Subject.build(method, model, training=training, objective="sft", layers=layers, device=device)
    trained = [parameter for parameter in subject.network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
    with subject.enabled(StreamConfig()):
        step_ms, losses = _steps(subject, optimizer, lengths, device, session)
        outcome = subject.outcome(StreamConfig())
        later_ms = [_steps(subject, optimizer, lengths, device, session)[0] for _ in range(2 if settles else 0)]
    on_cuda = device.type == "cuda"
    return RunRecord(
        **cell, optimizer="AdamW, fused", layers=subject.network.config.num_hidden_layers, step_ms=step_ms, losses=losses,
        settled_ms=later_ms[-1] if later_ms else None,
        out_of_memory=losses.count(None), tokens_per_second=_rate(lengths, step_ms, losses),
        later_tokens_per_second=_rate(lengths[1:], step_ms[1:], losses[1:]) if len(lengths) > 1 else None,
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_cuda else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if on_cuda else None, **outcome,
    )  # fmt: skip


def _steps(
    subject: Subject, optimizer: torch.optim.Optimizer, lengths: Sequence[int], device: torch.device, session: Session
) -> tuple[list[float], list[float | None]]:
    """Return milliseconds and loss of a step on each length in turn."""
    step_ms: list[float] = []
    losses: list[float | None] = []
    for place, tokens in enumerate(lengths):
        start = time.perf_counter()
        losses.append(_step(subject, optimizer, _batch(place, tokens, subject.network.config.vocab_size).to(device)))
        step_ms.append(1e3 * (time.perf_counter() - start))
        session.tell(f"step {place + 1}: {tokens:,} tokens, {step_ms[-1]:,.0f} ms, loss {losses[-1]}")
    return step_ms, losses


def _batch(place: int, tokens: int, vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(place))


def _step(subject: Subject, optimizer: torch.optim.Optimizer, ids_BT: Tensor) -> float | None:
    """Return the loss of one step, read as a loop that logs it does, or None if memory ran out."""
    try:
        loss = subject.network(input_ids=ids_BT, labels=ids_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        if ids_BT.is_cuda:
            torch.cuda.synchronize()
        return value
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    return None


def _rate(lengths: Sequence[int], step_ms: Sequence[float], losses: Sequence[float | None]) -> float:
    """Return tokens of finished steps over the time of all."""
    done = sum(tokens for tokens, loss in zip(lengths, losses, strict=True) if loss is not None)
    return done / (sum(step_ms) / 1e3)
