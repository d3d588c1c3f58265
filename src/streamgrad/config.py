"""What a user may choose, validated once: `StreamConfig` is the only place where options get defaults and checks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

KEEP_POLICIES = ("auto", "input", "attention", "all")
OFFLOAD_PLACES = ("auto", "none", "host")
ATTENTION_BACKENDS = ("auto", "cudnn", "flash", "sdpa", "eager")


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How a model is streamed. Every choice gives the same gradient; they differ in time and memory.

    Args:
        chunk_size (`int`, defaults to 4096):
            Tokens of one sequence that a decoder layer processes at a time. Memory of a layer's wide tensors (queries,
            MLP) grows with it; the number of kernel launches falls with it.
        head_chunk_size (`int`, defaults to 2048):
            Tokens whose logits exist at a time in the language-modelling head.
        keep (`str`, defaults to `"auto"`):
            What a layer keeps between forward and backward. `"input"`: its input only. `"attention"`: also keys, values,
            attention output and log-sum-exp, so that attention runs forward once a step. `"all"`: the ordinary graph
            (nothing is recomputed or streamed in the layers; the head still is). `"auto"` is `"input"`, the smallest.
        offload (`str`, defaults to `"auto"`):
            Where the layers' kept tensors wait for backward. `"none"`: on the device. `"host"`: in pinned host memory, copied
            beside the computation (CUDA; on a CPU there is nothing to move). `"auto"` is `"none"`.
        attention (`str`, defaults to `"auto"`):
            Kernel for the blocks of streamed attention. `"auto"` takes the fastest that supports the model, mask, dtype
            and device at hand.
    """

    chunk_size: int = 4096
    head_chunk_size: int = 2048
    keep: str = "auto"
    offload: str = "auto"
    attention: str = "auto"

    def __post_init__(self) -> None:
        for name in ("chunk_size", "head_chunk_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(
                    f"{name}={value!r} is a {type(value).__name__}, but a number of tokens is a whole number. "
                    f"Pass an int of at least 1, for example {name}={getattr(type(self), name)}."
                )
            if value < 1:
                raise ValueError(
                    f"{name}={value} leaves no tokens in a chunk. Pass at least 1; {getattr(type(self), name)} is the default."
                )
        for name, choices in (("keep", KEEP_POLICIES), ("offload", OFFLOAD_PLACES), ("attention", ATTENTION_BACKENDS)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"{name}={value!r} is not a choice. Pass one of {', '.join(map(repr, choices))}.")

    @classmethod
    def resolve(cls, config: StreamConfig | None, options: dict[str, Any]) -> StreamConfig:
        """`config` with `options` on top; an option that does not exist is a TypeError that lists those that do."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise TypeError(f"{name!r} is not a streamgrad option. The options are {', '.join(known)}.")
        if config is None:
            return cls(**options)
        if not isinstance(config, cls):
            raise TypeError(
                f"config={config!r} is a {type(config).__name__}. Pass a streamgrad.StreamConfig, or the options by name."
            )
        return dataclasses.replace(config, **options)
