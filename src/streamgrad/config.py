"""The options of streaming: `StreamConfig` is the only place where they get defaults and checks."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

KEEP_POLICIES = ("auto", "input", "attention", "all")
OFFLOAD_PLACES = ("auto", "none", "host")
ATTENTION_BACKENDS = ("auto", "cudnn", "flash", "fa4", "sdpa", "eager")
FUSED_KERNEL_MODES = ("auto", "on", "off")

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_FEWEST_BYTES = 1 << 10
_UNITS |= {"M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(value: int | float | str) -> int:
    """Return the bytes of `"80GiB"`, `"80G"`, which is the same, `"79.5 GB"` or a number of bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    try:
        # A number in a string needs a unit: "80" would be 80 bytes.
        count = float(match[1]) * unit if match and unit else float("nan" if isinstance(value, str) else value)
    except (TypeError, ValueError):
        count = -1.0
    if not 0 < count < float("inf") or isinstance(value, bool):
        raise ValueError(
            f"{value!r} is not an amount of memory. Pass a number above 0 with a unit, such as '80GiB' or '79.5GB'; in Python, "
            "an int counts bytes."
        )
    if not isinstance(value, str) and count < _FEWEST_BYTES:
        raise ValueError(f"{value!r} counts bytes, which hold nothing of a step. Pass a unit, such as '{value}GiB'.")
    return int(count)


def parse_count(name: str, value: str, counted: str) -> int | str:
    """Return the value of the command-line option `name`: "auto", or a number of what is `counted`."""
    try:
        return value if value == "auto" else int(value)
    except ValueError:
        raise ValueError(
            f"{name}={value!r} is not a number of {counted}. Pass a whole number of at least 1, or 'auto'."
        ) from None


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """The options of streaming. Every choice gives the same gradient; they differ in time and memory.

    Args:
        chunk_size (`int` or `"auto"`, defaults to `"auto"`):
            Tokens of one sequence that a decoder layer processes at a time. Memory of a layer's wide tensors (queries,
            MLP) grows with it; the number of kernel launches falls with it. `"auto"`: a batch of up to 65,536 tokens
            (rows times tokens of each row) whole, 32,768 tokens of a larger one, and fewer where memory is short.
        head_chunk_size (`int` or `"auto"`, defaults to `"auto"`):
            Tokens whose logits exist at a time in the language-modelling head. `"auto"`: as many as an eighth of the free
            memory holds, 4,096 at most.
        keep (`str`, defaults to `"auto"`):
            What a layer keeps between forward and backward. `"input"`: its input only. `"attention"`: also keys, values,
            attention output and log-sum-exp, so that attention runs forward once a step. `"all"`: the ordinary graph
            (nothing is recomputed). `"auto"`: for each layer the fastest that the memory budget allows; off CUDA and without
            a `memory_budget`, `"input"`.
        offload (`str`, defaults to `"auto"`):
            Where what is kept waits for backward. `"none"`: on the device. `"host"`: in pinned host memory, copied
            during the computation (CUDA; on a CPU there is nothing to move). `"auto"`: on the host what the device cannot hold.
            Ordinary graphs (`keep="all"`) stay on the device.
        recompute_layers (`int` or `"auto"`, defaults to `"auto"`):
            With n, only every n-th layer keeps its input from forward to backward. Backward first runs the n - 1 layers after
            it forward once more, which makes their inputs again. This is for steps that neither device nor host can hold
            otherwise. `"auto"`: the smallest n that fits.
        attention (`str`, defaults to `"auto"`):
            Kernel for the blocks of streamed attention. `"auto"`: the fastest that supports the model, mask, dtype and device.
            `"fa4"`: the same, with FlashAttention-4 (the extra `[fa4]`) in place of torch's own flash attention, in the whole
            process.
        fused_kernels (`str`, defaults to `"auto"`):
            Whether norms, rotary embeddings, gated activations, and the routing and weighting of experts run as one Triton
            kernel each. Only code that streamgrad recognises is replaced. `"auto"`: for 16-bit values on CUDA. `"on"`: always.
            `"off"`: never.
        compile_layers (`bool`, defaults to `False`):
            Whether to compile layers with torch.compile, in steps so short that every layer keeps the ordinary graph. The first
            such step takes 20 to 30 seconds longer. Later ones are faster at up to a few thousand tokens, where launching
            kernels takes longer than running them. Layers that you compile yourself, with `layer.compile()`, run compiled in
            such steps anyway.
        memory_budget (`int` or `str`, *optional*):
            Device bytes that a step may use, weights included: a number, or for example `"80GiB"`. Defaults to what is free
            when the step begins.
    """

    chunk_size: int | str = "auto"
    head_chunk_size: int | str = "auto"
    keep: str = "auto"
    offload: str = "auto"
    recompute_layers: int | str = "auto"
    attention: str = "auto"
    fused_kernels: str = "auto"
    compile_layers: bool = False
    memory_budget: int | str | None = None

    def __post_init__(self) -> None:
        for name, counted, place, example in (
            ("chunk_size", "tokens", "chunk", 4096),
            ("head_chunk_size", "tokens", "chunk", 4096),
            ("recompute_layers", "layers", "segment", 2),
        ):
            value = getattr(self, name)
            if value == "auto":
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"{name}={value!r} is a {type(value).__name__}, but a number of {counted} is a whole number. "
                    f"Pass an int of at least 1, for example {name}={example}, or 'auto'."
                )
            if value < 1:
                raise ValueError(f"{name}={value} leaves no {counted} in a {place}. Pass at least 1, or 'auto'.")
        if not isinstance(self.compile_layers, bool):
            raise TypeError(f"compile_layers={self.compile_layers!r} must be True or False.")
        for name, choices in (
            ("keep", KEEP_POLICIES),
            ("offload", OFFLOAD_PLACES),
            ("attention", ATTENTION_BACKENDS),
            ("fused_kernels", FUSED_KERNEL_MODES),
        ):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
        if self.keep == "all" and self.recompute_layers not in ("auto", 1):
            raise ValueError(
                f"recompute_layers={self.recompute_layers} with keep='all': a layer that keeps its whole graph is not run again. "
                "Pass keep='input' or 'attention', or leave recompute_layers out."
            )
        if self.memory_budget is not None:
            try:
                parse_bytes(self.memory_budget)
            except ValueError as error:
                raise ValueError(f"memory_budget: {error}") from None

    @property
    def budget_bytes(self) -> int | None:
        return None if self.memory_budget is None else parse_bytes(self.memory_budget)

    @classmethod
    def resolve(cls, config: StreamConfig | None, options: dict[str, Any]) -> StreamConfig:
        """Return `config` with `options` on top; raise `TypeError`, which lists all options, for one that does not exist."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"{name!r} is not a streamgrad option. The options are {', '.join(known)}.")
        if config is None:
            return cls(**options)
        if not isinstance(config, cls):
            raise TypeError(
                f"config={config!r} is of type {type(config).__name__}. Pass a streamgrad.StreamConfig, or the options by name."
            )
        return dataclasses.replace(config, **options)
