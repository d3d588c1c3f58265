"""What an enabled model does: the plan of its latest step, its kernels, and the memory it was expected to take and took."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from streamgrad.config import StreamConfig
from streamgrad.engine.policy import LayerPolicy
from streamgrad.hf.decoder import DecoderStream, decoder_forward
from streamgrad.hf.discover import find_decoder, unwrap
from streamgrad.hf.libraries.sharded import device_at_work, waits_on_host
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.updates.in_backward import updates_of
from streamgrad.memory.planner import Plan, readable

logger = logging.getLogger("streamgrad")

_KEPT = {"input": "its input", "attention": "its input and attention", "all": "the ordinary graph"}


@dataclass(frozen=True)
class Status:
    """What `status` returns; `print` it for a few readable lines."""

    model_class: str
    config: StreamConfig | None  # None where the model is not enabled
    device: str
    plan: Plan | None  # of the latest step with gradients; None before the first
    rows: int  # of that step
    tokens: int  # a row
    kernels: tuple[str, ...]  # that computed attention so far
    optimizer: str | None  # in words; None where none updates in backward and no streamed trainer has told
    peak_bytes: int  # the most that this process has had so far: of tensors on a GPU, of all its memory on a CPU
    compile_seconds: float | None = None  # that compiling layers took, where `compile_layers` has done so

    @property
    def expected_peak_bytes(self) -> float | None:
        """Return the device bytes that the plan expects; None without a plan, or where there was no limit to plan for."""
        return (self.plan.peak_bytes or None) if self.plan is not None else None

    @property
    def _no_peak(self) -> str:
        return f"unknown: on {self.device}, only a memory_budget plans one"

    @property
    def first_line(self) -> str:
        """Return the plan of the latest step in one line."""
        if self.config is None:
            return f"{self.model_class} is not streamed. Call streamgrad.enable(model)."
        if self.plan is None:
            return f"{self.model_class} is streamed from its next step with gradients on; it has had none yet."
        expected = self.expected_peak_bytes
        return (
            f"{self.model_class} is streamed: {self.rows} x {self.tokens:,} tokens in {_chunks(self.plan, self.tokens)}; "
            f"{_kept(self.plan)}; attention by {', '.join(self.kernels) or 'no kernel'}; "
            + (f"optimizer {self.optimizer}; " if self.optimizer else "")
            + "expected peak "
            + (f"{readable(expected)} on {self.device}" if expected else self._no_peak)
            + (f" and {readable(self.plan.host_bytes)} on the host" if self.plan.host_bytes else "")
        )

    def __str__(self) -> str:
        if self.config is None or self.plan is None:
            return self.first_line
        expected, on_gpu = self.expected_peak_bytes, self.device.startswith("cuda")
        counted = f"of tensors on {self.device}" if on_gpu else "of the whole process"
        lines = {
            "latest step": f"{self.rows} x {self.tokens:,} tokens in {_chunks(self.plan, self.tokens)}",
            "for backward": _kept(self.plan),
            "attention": ", ".join(self.kernels) or "no kernel",
            "expected peak": readable(expected) if expected else self._no_peak,
            "peak so far": f"{readable(self.peak_bytes)}, {counted}",
        }
        if self.compile_seconds is not None:
            lines["layers"] = f"compiled, in {self.compile_seconds:.0f} s of the first step"
        if self.optimizer:
            lines["optimizer"] = self.optimizer
        if self.plan.host_bytes:
            lines["on the host"] = readable(self.plan.host_bytes)
        return "\n".join([f"{self.model_class} is streamed", *(f"  {name:<15}{text}" for name, text in lines.items())])


def status(model: Any) -> Status:
    """Return whether and how a model is streamed: print it for the plan, the kernels and the memory of its latest step.

        streamgrad.enable(model)
        ...                                  # a step
        print(streamgrad.status(model))

    Args:
        model: what `streamgrad.enable` was given, or a wrapper of it.
    """
    inner = unwrap(model)
    decoder = inner.get_decoder()
    installed = InstalledForward.on(decoder)
    stream: DecoderStream | None = None if installed is None else installed.stream
    device = device_at_work(next(decoder.parameters()))
    rows, tokens = (0, 0) if stream is None else stream.planner.latest_shape
    return Status(
        model_class=type(inner).__name__,
        config=None if stream is None else stream.config,
        device=str(device),
        plan=None if stream is None else stream.planner.latest,
        rows=rows,
        tokens=tokens,
        kernels=() if stream is None else tuple(sorted(stream.backends.used)),
        optimizer=_optimizer_of(decoder, stream),
        peak_bytes=peak_bytes_so_far(device),
        compile_seconds=None if stream is None else stream.compiler.seconds,
    )


def note_optimizer(model: Any, optimizer: Any) -> None:
    """Let `status` and the line of the first step name a trainer's optimizer, which Accelerate may have wrapped."""
    installed = InstalledForward.on(find_decoder(unwrap(model)))
    if installed is not None and optimizer is not None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        in_8_bits = getattr(getattr(optimizer, "args", None), "optim_bits", None) == 8  # of one by bitsandbytes
        installed.stream.planner.optimizer = type(optimizer).__name__ + (" in 8 bits" if in_8_bits else "")


def _optimizer_of(decoder: Any, stream: DecoderStream | None) -> str | None:
    in_backward = next(filter(None, map(updates_of, decoder.parameters())), None)
    if in_backward is not None:
        return f"{type(in_backward).__name__.removesuffix('InBackward')} in backward"
    told = None if stream is None else stream.planner.optimizer
    return f"{told or 'unknown'}, weights on the host" if any(map(waits_on_host, decoder.parameters())) else told


def peak_bytes_so_far(device: torch.device) -> int:
    """Return the most bytes that this process has had: of tensors on a CUDA device, elsewhere of all its memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # which Windows does not have

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def announcing_forward(decoder: Any, stock: Callable[..., Any], stream: DecoderStream, *args: Any, **kwargs: Any) -> Any:
    """Run `decoder_forward`, and log the plan of the first step with gradients; `enable` installs this."""
    before = stream.planner.latest
    output = decoder_forward(decoder, stock, stream, *args, **kwargs)
    if before is None and stream.planner.latest is not None:
        told = status(decoder)
        logger.info("streamgrad: %s%s", told.first_line, _later(told, stream.planner.optimizer))
    return output


def _later(told: Status, optimizer: str | None) -> str:
    """Return what the expected peak of a first step leaves out: states that an ordinary optimizer makes after it, on the GPU."""
    grows = told.device.startswith("cuda") and told.expected_peak_bytes and optimizer and told.optimizer == optimizer
    return "; later steps are planned with the states that the optimizer has by then" if grows else ""


def show_messages() -> None:
    """Let the INFO lines of streamgrad's logger reach the terminal, unless the user has set it up."""
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(_AboveProgressBars())


class _AboveProgressBars(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def _chunks(plan: Plan, tokens: int) -> str:
    small, large = min(plan.chunk_sizes), max(plan.chunk_sizes)
    few, many = ceil(tokens / large), ceil(tokens / small)
    if small == large:
        return f"{few} chunk{'s' if few > 1 else ''} of at most {small:,}"
    return f"{few} to {many} chunks of at most {small:,} to {large:,}"


def _kept(plan: Plan) -> str:
    def told(policy: LayerPolicy, count: int) -> str:
        which = f"each of {count} layers" if count > 1 else "1 layer"
        return f"{which} keeps {_KEPT[policy.keep]}" + (" on the host" if policy.on_host else "")

    recomputed = sum(policy.recomputed for policy in plan.policies)
    kept = [told(policy, count) for policy, count in Counter(plan.policies).items() if not policy.recomputed]
    return ", ".join([*kept, *([f"{recomputed} keep nothing and have their input made again"] if recomputed else [])])
