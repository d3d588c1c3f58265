"""Measures the head alone, forward and backward: torch, Liger and streamgrad, beside the GEMMs that they cannot avoid.

Cross entropy needs three GEMMs: logits = h W^T, dh = dlogits W, dW = dlogits^T h. Log-probabilities whose upstream gradient is
known only in backward need four without holding all logits: those are made twice. The GEMMs run on all tokens at once.

Shapes: N tokens, E model width, V vocabulary.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

import streamgrad
from benchmarks.names import command_line
from benchmarks.records import versions
from streamgrad.cli.bench_run import device_name, median_ms
from streamgrad.memory.live_bytes import peak_bytes_of

GEMMS = "bare GEMMs"


class Shape(NamedTuple):
    tokens: int
    width: int
    vocabulary: int


# The head of Qwen3-8B on 8192 tokens; on a CPU, something that ends.
GPU_SHAPE, CPU_SHAPE = Shape(8192, 4096, 151_936), Shape(512, 64, 4000)


@dataclass(frozen=True)
class HeadRecord:
    """Records one method; the measurements are None where `error` says why.

    `peak_bytes` counts above the inputs and the two gradients, which every method must hold.
    """

    benchmark: str
    objective: str
    method: str
    shape: dict[str, int]
    dtype: str
    step_ms: float | None
    peak_bytes: int | None
    runs: int
    error: str | None
    device: str
    versions: dict[str, str]
    command: str


class Inputs(NamedTuple):
    hidden_NE: Tensor
    weight_VE: Tensor
    targets_N: Tensor
    dlogprobs_N: Tensor


def measure_head(
    *,
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    chunk_size: int | str = "auto",
    runs: int = 10,
) -> Iterator[HeadRecord]:
    """Yield a record per objective and method. `chunk_size` is streamgrad's; Liger chooses its own."""
    generator = torch.Generator(device).manual_seed(0)
    hidden_NE, weight_VE = (
        torch.randn(size, shape.width, generator=generator, device=device).to(dtype).requires_grad_()
        for size in (shape.tokens, shape.vocabulary)
    )
    with torch.no_grad():
        weight_VE.mul_(shape.width**-0.5)
    targets_N = torch.randint(0, shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    inputs = Inputs(hidden_NE, weight_VE, targets_N, torch.randn(shape.tokens, generator=generator, device=device))
    dtype_name = str(dtype).removeprefix("torch.")
    options = shape._asdict() | {"dtype": dtype_name, "device": device.type, "chunk_size": chunk_size, "runs": runs}
    for objective, method, step in _steps(inputs, chunk_size):
        step_ms, peak_bytes, error = _measure(step, device, runs)
        yield HeadRecord(
            benchmark="head",
            objective=objective,
            method=method,
            shape=shape._asdict(),
            dtype=dtype_name,
            step_ms=step_ms,
            peak_bytes=peak_bytes,
            runs=runs,
            error=error,
            device=device_name(device),
            versions=versions("liger-kernel", "triton"),
            command=command_line("head", **options),
        )


Step = Callable[[], tuple[Tensor, ...]]


def _steps(inputs: Inputs, chunk_size: int | str) -> Iterator[tuple[str, str, Step]]:
    """Yield `(objective, method, step)`; a step returns the gradients of hidden states and weight."""
    hidden_NE, weight_VE, targets_N, dlogprobs_N = inputs

    def differentiated(loss: Callable[[], Tensor]) -> Step:
        return lambda: torch.autograd.grad(loss(), (hidden_NE, weight_VE))

    def torch_logprobs() -> Tensor:
        logp_NV = F.linear(hidden_NE, weight_VE).float().log_softmax(-1)
        return logp_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1).dot(dlogprobs_N)

    def our_logprobs() -> Tensor:
        logprobs_N = streamgrad.token_logprobs(hidden_NE, weight_VE, targets_N, chunk_size=chunk_size)
        assert isinstance(logprobs_N, Tensor)
        return logprobs_N.to(dlogprobs_N.dtype).dot(dlogprobs_N)

    yield "cross_entropy", GEMMS, lambda: _bare_gemms(inputs, forwards=1)
    # As transformers' loss does it, which casts the logits first.
    yield "cross_entropy", "torch", differentiated(lambda: F.cross_entropy(F.linear(hidden_NE, weight_VE).float(), targets_N))
    liger = _liger_loss() if hidden_NE.is_cuda else None
    if liger is not None:
        yield "cross_entropy", "liger", differentiated(lambda: liger(hidden_NE, weight_VE, targets_N))
    yield (
        "cross_entropy",
        "streamgrad",
        differentiated(lambda: streamgrad.linear_cross_entropy(hidden_NE, weight_VE, targets_N, chunk_size=chunk_size)),
    )
    yield "token_logprobs", GEMMS, lambda: _bare_gemms(inputs, forwards=2)
    yield "token_logprobs", "torch", differentiated(torch_logprobs)
    yield "token_logprobs", "streamgrad", differentiated(our_logprobs)


@torch.no_grad()
def _bare_gemms(inputs: Inputs, *, forwards: int) -> tuple[Tensor, Tensor]:
    logits_NV = F.linear(inputs.hidden_NE, inputs.weight_VE)
    for _ in range(forwards - 1):
        torch.mm(inputs.hidden_NE, inputs.weight_VE.mT, out=logits_NV)
    return logits_NV @ inputs.weight_VE, logits_NV.mT @ inputs.hidden_NE


def _liger_loss() -> Callable[..., Tensor] | None:
    """Return Liger's fused linear cross entropy where it is installed; its kernels need a GPU."""
    try:
        return importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    except ModuleNotFoundError:
        return None


def _measure(step: Step, device: torch.device, runs: int) -> tuple[float | None, int | None, str | None]:
    """Return `(median milliseconds, peak bytes above inputs and gradients, None)`, or Nones and the reason. Two steps warm up."""
    try:
        for _ in range(2):
            step()
        gradients, peak_bytes = peak_bytes_of(step, device)
        peak_bytes -= sum(gradient.nbytes for gradient in gradients)
        del gradients
        return (_event_ms if device.type == "cuda" else median_ms)(step, device, runs), peak_bytes, None
    except torch.OutOfMemoryError:
        return None, None, "out of memory"


def _event_ms(step: Step, device: torch.device, runs: int) -> float:
    """Return the median of `runs` steps between CUDA events: what the device spent on them, gaps included."""
    events = []
    with torch.cuda.device(device):
        for _ in range(runs):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            step()
            stop.record()
            events.append((start, stop))
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(stop) for start, stop in events)
