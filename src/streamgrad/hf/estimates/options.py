"""`Options`: everything about a step that `estimate` and `streamgrad plan` take, but for its model and its length."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from streamgrad.config import KEEP_POLICIES, OFFLOAD_PLACES, StreamConfig, parse_bytes
from streamgrad.hf.estimates.shapes import TABLE_RANK
from streamgrad.memory.costs import QUANTIZED_SIZES
from streamgrad.memory.engines import ENGINES
from streamgrad.memory.fit import Card
from streamgrad.memory.planner import HOST_SHARE
from streamgrad.memory.this_machine import Machine, machine
from streamgrad.memory.traffic import Ranks, check_ring
from streamgrad.memory.training_state import MASTER_DTYPES, OPTIMIZERS, WEIGHT_PLACES, Setup, TrainingState

METHODS = ("full", "lora")
OBJECTIVES = ("sft", "dpo", "grpo")
DTYPES = ("bfloat16", "float16", "float32")
QUANTIZATIONS = tuple(QUANTIZED_SIZES)
# Other names of dtypes, as commands elsewhere take them.
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def full_dtype(name: str) -> str:
    """Return torch's name of a dtype: `bf16` is `bfloat16`."""
    return _ALIASES.get(name, name)


def memory_bytes(name: str, value: int | float | str | None) -> int | None:
    """Return the bytes of an amount of memory, as `parse_bytes` does, but with a number in a string in GiB: `24`."""
    if value is None:
        return None
    try:
        return parse_bytes(f"{value}GiB" if isinstance(value, str) and re.fullmatch(r"\s*[\d.]+\s*", value) else value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything about a step but its model and its length, as `estimate` takes it. Raises `ValueError` for a wrong value."""

    batch: int = 1
    method: str = "full"
    lora_rank: int | None = None
    quantization: str = "none"
    objective: str = "sft"
    optimizer: str = "adamw"
    weights: str = "device"
    engine: str = "none"
    gpus: int = 1
    gpus_per_node: int = 8
    sp: int = 1
    ring: int | None = None  # the smallest that works
    master_dtype: str = "auto"
    dtype: str = "bfloat16"
    keep: str = "auto"
    offload: str = "auto"
    recompute_layers: int | str = "auto"
    machine: Machine = field(default_factory=machine)

    def __post_init__(self) -> None:
        choices = {
            "method": METHODS, "quantization": QUANTIZATIONS, "objective": OBJECTIVES, "optimizer": OPTIMIZERS,
            "weights": WEIGHT_PLACES, "engine": ENGINES, "master_dtype": MASTER_DTYPES, "dtype": DTYPES, "keep": KEEP_POLICIES,
            "offload": OFFLOAD_PLACES,
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                hint = " QLoRA is method='lora' with quantization='nf4'." if getattr(self, name) == "qlora" else ""
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}.{hint}")
        for name in ("batch", "gpus", "gpus_per_node", "sp", "ring", "lora_rank"):
            check_count(name, getattr(self, name))
        if self.lora_rank is not None and self.method != "lora":
            raise ValueError(
                f"lora_rank={self.lora_rank} is for method='lora', got method={self.method!r}. Leave one of them out."
            )
        if self.quantization != "none" and self.method != "lora":
            raise ValueError(
                f"quantization={self.quantization!r} is for method='lora', got method={self.method!r}: quantised weights are not "
                "trained. Pass method='lora', or quantization='none'."
            )
        if self.weights == "host" and (self.quantization != "none" or self.optimizer in ("in-backward", "adamw8bit")):
            raise ValueError(
                f"weights='host' with optimizer={self.optimizer!r} and quantization={self.quantization!r}: FSDP2 keeps gradients "
                "and optimizer on the host with the weights, and cannot move quantised ones. Pass optimizer='host' and "
                "quantization='none'."
            )
        if (self.engine == "none") != (self.gpus == 1):
            raise ValueError(
                f"engine={self.engine!r} with gpus={self.gpus}: several GPUs need an engine, and one needs none. Pass "
                f"engine='none' with gpus=1, or one of {', '.join(ENGINES[1:])} with gpus of at least 2."
            )
        if self.gpus % self.sp:
            raise ValueError(
                f"sp={self.sp} with gpus={self.gpus}: groups of GPUs that share a sequence are equally large. Pass gpus that sp "
                "divides."
            )
        check_ring(self.ring or 1, self.sp)
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ValueError(
                f"gpus={self.gpus} do not fill machines of gpus_per_node={self.gpus_per_node}. Pass a number that it divides."
            )
        if self.recompute_layers != "auto":
            check_count("recompute_layers", self.recompute_layers)
            if self.recompute_layers != 1 and self._in_turn:
                raise ValueError(
                    f"recompute_layers={self.recompute_layers} with engine={self.engine!r}, weights={self.weights!r} and "
                    f"sp={self.sp}: with FSDP2, ZeRO-3 or shared sequences, layers run in their own turn alone. Pass "
                    "recompute_layers=1."
                )
        # Both refuse what does not go together.
        StreamConfig(keep=self.keep, offload=self.offload, recompute_layers=self.recompute_layers)
        self.setup  # noqa: B018

    @property
    def setup(self) -> Setup:
        second = self.has_reference and self.method == "full"
        return Setup(self.engine, self.gpus, self.optimizer, self.weights, self.master_dtype, second_model=second)

    @property
    def ranks(self) -> Ranks:
        return Ranks(self.gpus, self.sp, self.gpus_per_node, self.ring or 1)

    @property
    def rank(self) -> int | None:
        """Return the rank of adapters, or None in full training."""
        return (self.lora_rank or TABLE_RANK) if self.method == "lora" else None

    @property
    def has_reference(self) -> bool:
        """Return whether a frozen model passes over the same tokens."""
        return self.objective == "dpo"

    def host_left(self, state: TrainingState) -> float:
        """Return the bytes of the host that one GPU's layers may keep activations in; below zero, the state does not fit it."""
        return HOST_SHARE * self.machine.host_bytes / self.ranks.on_a_host - state.host_bytes

    def card(self, state: TrainingState) -> Card:
        chosen = None if isinstance(self.recompute_layers, str) else self.recompute_layers
        host_bytes = max(0.0, self.host_left(state))
        return Card(self.machine.gpu_bytes, host_bytes, self.keep, self.offload, 1 if self._in_turn else chosen)

    @property
    def _in_turn(self) -> bool:
        return self.engine in ("fsdp2", "zero3") or self.sp > 1 or self.weights == "host"


def check_count(name: str, number: int | str | None) -> None:
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")
