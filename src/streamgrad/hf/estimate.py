"""`estimate`: what a step holds, by component, on device and host; how long it takes; and the longest sequence that fits.

Nothing is allocated and no device is needed. The layer's costs come from the table of presets or a dry run (`hf.shapes`), the
plan and whether it fits from `memory.fit`, the bytes of each phase from `memory.phases`, and the time from `memory.seconds`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streamgrad.config import KEEP_POLICIES, OFFLOAD_PLACES, parse_bytes
from streamgrad.hf.shapes import TABLE_RANK, shape_of
from streamgrad.memory.costs import QUANTIZED_SIZES, Parts
from streamgrad.memory.engines import ENGINES
from streamgrad.memory.fit import FILLED, FILLED_BESIDE_HOST, Card, copies_to_fp32, gradient_share, resident_parts
from streamgrad.memory.phases import Workload, checkpointing_phases, host_parts, largest
from streamgrad.memory.planner import HOST_SHARE, Plan
from streamgrad.memory.seconds import Rates, Seconds, checkpointing_seconds, streamed_seconds

METHODS = ("full", "lora")
OBJECTIVES = ("sft", "dpo", "grpo")
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "none")
DTYPES = ("bfloat16", "float16", "float32")
QUANTIZATIONS = tuple(QUANTIZED_SIZES)


@dataclass(frozen=True)
class Outlook:
    """One way to compute the step: bytes by component in its largest phase, and its time."""

    name: str
    device_bytes: Parts
    host_bytes: Parts
    phase: str
    fits: bool
    seconds: Seconds
    longest_tokens: int
    plan: Plan | None = None

    @property
    def peak_bytes(self) -> float:
        return sum(self.device_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, with totals and the plan in words."""
        said = {"plan": None if self.plan is None else str(self.plan), "peak_bytes": self.peak_bytes}
        return dataclasses.asdict(self) | said | {"seconds": vars(self.seconds) | {"total": self.seconds.total}}


@dataclass(frozen=True)
class Report:
    """What `estimate` returns. `batch` and `seq_len` are those of one rank; so are all bytes."""

    model: str
    method: str
    quantization: str
    objective: str
    optimizer: str
    engine: str
    gpus: int
    batch: int
    seq_len: int
    gpu_memory: int
    host_memory: int
    dtype: str
    keep: str
    offload: str
    streamed: Outlook
    checkpointing: Outlook
    assumptions: tuple[str, ...]

    @property
    def setup(self) -> str:
        """Return in words what is trained, and how."""
        many = f", {self.gpus} GPUs with {self.engine}" if self.gpus > 1 else ""
        optimizer = "no optimizer" if self.optimizer == "none" else self.optimizer
        method = self.method if self.quantization == "none" else f"{self.method} on {self.quantization}"
        return f"{self.model}, {method}, {self.objective}, {optimizer}{many}"

    @property
    def title(self) -> str:
        """Return in words what is planned."""
        return f"{self.setup}: {self.batch} x {self.seq_len:,} tokens"

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return dataclasses.asdict(self) | {name: getattr(self, name).to_dict() for name in ("streamed", "checkpointing")}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Everything about a step but its model and its length, as `estimate` takes it. Raises `ValueError` for a wrong value."""

    batch: int
    method: str
    lora_rank: int | None
    quantization: str
    objective: str
    optimizer: str
    engine: str
    gpus: int
    dtype: str
    gpu_memory: int | str
    host_memory: int | str
    keep: str
    offload: str
    rates: Rates

    def __post_init__(self) -> None:
        choices = {
            "method": METHODS, "quantization": QUANTIZATIONS, "objective": OBJECTIVES, "optimizer": OPTIMIZERS, "engine": ENGINES,
            "dtype": DTYPES, "keep": KEEP_POLICIES, "offload": OFFLOAD_PLACES,
        }  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}.")
        for name in ("batch", "gpus", "lora_rank"):
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
        if (self.engine == "none") != (self.gpus == 1):
            raise ValueError(
                f"engine={self.engine!r} with gpus={self.gpus}: several GPUs need an engine, and one needs none. Pass "
                f"engine='none' with gpus=1, or one of {', '.join(ENGINES[1:])} with gpus of at least 2."
            )
        for name in ("gpu_memory", "host_memory"):
            try:
                parse_bytes(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None

    @property
    def rank(self) -> int | None:
        """Return the rank of adapters, or None in full training."""
        return (self.lora_rank or TABLE_RANK) if self.method == "lora" else None

    @property
    def has_reference(self) -> bool:
        """Return whether a frozen model passes over the same tokens."""
        return self.objective == "dpo"

    @property
    def card(self) -> Card:
        host_bytes = HOST_SHARE * parse_bytes(self.host_memory) / self.gpus
        # Engines that gather a layer's parameters do so for its own turn alone.
        segments = 1 if self.engine in ("fsdp2", "zero3") else None
        return Card(parse_bytes(self.gpu_memory), host_bytes, self.keep, self.offload, segments)


def estimate(
    model: Any,
    seq_len: int | None = None,
    *,
    batch: int = 1,
    method: str = "full",
    lora_rank: int | None = None,
    quantization: str = "none",
    objective: str = "sft",
    optimizer: str = "adamw",
    engine: str = "none",
    gpus: int = 1,
    dtype: str = "bfloat16",
    gpu_memory: int | str = "80GiB",
    host_memory: int | str = "256GiB",
    keep: str = "auto",
    offload: str = "auto",
    rates: Rates | None = None,
) -> Report:
    """Return what one training step of a model holds and takes, streamed and with plain gradient checkpointing.

    ```python
    report = streamgrad.estimate("qwen3-8b", 65_536, gpu_memory="80GiB")
    report.streamed.peak_bytes, report.streamed.longest_tokens, report.streamed.device_bytes["kept inputs"]
    ```

    Args:
        model: a preset's name, a directory with a `config.json`, a name on the hub, a configuration, or a model (its
            configuration is read, not its weights or adapters).
        seq_len: tokens of each sequence; by default the most that fit when streamed.
        batch: pairs for DPO, completions for GRPO, sequences for SFT; on each rank.
        method: "full", or "lora" with adapters of rank `lora_rank` (32 unless given) on every linear map of the layers.
        quantization: "nf4" or "int8" for QLoRA: how bitsandbytes keeps the linear maps of the layers; "none" as they are.
        gpu_memory, host_memory: of one GPU, and of the machine that all `gpus` are in.
        keep, offload: as for `StreamConfig`.
    """
    options = Options(
        batch=batch, method=method, lora_rank=lora_rank, quantization=quantization, objective=objective, optimizer=optimizer,
        engine=engine, gpus=gpus, dtype=dtype, gpu_memory=gpu_memory, host_memory=host_memory, keep=keep, offload=offload,
        rates=rates or Rates(),
    )  # fmt: skip
    (report,) = estimate_lengths(model, [seq_len], options)
    return report


def step_of(model: Any, options: Options) -> Workload:
    """Return the step with sequences of one token, for `replace` to lengthen."""
    shape = shape_of(model, dtype=options.dtype, lora_rank=options.rank).quantized(options.quantization)
    resident = resident_parts(
        shape,
        engine=options.engine,
        gpus=options.gpus,
        optimizer=options.optimizer,
        second_model=options.has_reference and options.method == "full",
    )
    rows = 2 * options.batch if options.objective == "dpo" else options.batch
    return Workload(shape, rows, 1, resident, gradient_share(options.engine, options.gpus))


def estimate_lengths(model: Any, lengths: Sequence[int | None], options: Options) -> list[Report]:
    """Return a report for each length, from one shape of the model. None stands for the longest that fits."""
    for length in lengths:
        check_count("seq_len", length)
    load = step_of(model, options)
    longest, checkpointed = options.card.longest(load), options.card.longest_with_checkpointing(load)
    if None in lengths and not longest:
        raise ValueError(
            f"nothing fits {options.gpu_memory}, not even batch={options.batch} of 128 tokens: weights, optimizer state and the "
            f"engine's buffers alone take {sum(load.resident.values()) / 2**30:.1f} GiB on each GPU. Pass a smaller batch, "
            "method='lora', optimizer='adamw8bit', an engine that shards with more GPUs, or a larger GPU."
        )
    name = model if isinstance(model, str) else type(model).__name__
    loads = [replace(load, sequence=length or longest) for length in lengths]
    return [
        _report(name, options, streamed_outlook(own, options, longest), _checkpointed(own, options, checkpointed), own)
        for own in loads
    ]


def check_count(name: str, number: int | None) -> None:
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
        raise ValueError(f"{name} must be a whole number of at least 1, got {number!r}.")


def streamed_outlook(load: Workload, options: Options, longest: int) -> Outlook:
    card = options.card
    plan, phase = card.planned(load)
    # Objectives on log-probabilities make their logits again in backward.
    products = _head_products(load) + (options.objective != "sft")
    return Outlook(
        name="streamgrad",
        device_bytes=phase.parts,
        host_bytes=host_parts(load, plan.policies),
        phase=phase.name,
        fits=card.holds(plan, phase),
        seconds=streamed_seconds(
            load, plan.policies, plan.chunk_sizes, options.rates, head_products=products, reference=options.has_reference
        ),
        longest_tokens=longest,
        plan=replace(plan, peak_bytes=phase.total_bytes),
    )


def _checkpointed(load: Workload, options: Options, longest: int) -> Outlook:
    phase = largest(checkpointing_phases(load))
    products, reference = _head_products(load), options.has_reference
    return Outlook(
        name="gradient checkpointing",
        device_bytes=phase.parts,
        host_bytes={},
        phase=phase.name,
        fits=options.card.holds(None, phase),
        seconds=checkpointing_seconds(load, options.rates, head_products=products, reference=reference),
        longest_tokens=longest,
    )


def _head_products(load: Workload) -> int:
    return 3 if load.shape.head_trainable else 2


def _report(model: str, options: Options, streamed: Outlook, checkpointing: Outlook, load: Workload) -> Report:
    return Report(
        model=model,
        method=f"lora of rank {options.rank}" if options.rank else options.method,
        quantization=options.quantization,
        objective=options.objective,
        optimizer=options.optimizer,
        engine=options.engine,
        gpus=options.gpus,
        batch=options.batch,
        seq_len=load.sequence,
        gpu_memory=parse_bytes(options.gpu_memory),
        host_memory=parse_bytes(options.host_memory),
        dtype=options.dtype,
        keep=options.keep,
        offload=options.offload,
        streamed=streamed,
        checkpointing=checkpointing,
        assumptions=tuple(_assumptions(options, load.shape.itemsize)),
    )


def common_assumptions(options: Options) -> list[str]:
    """Return in words what all numbers depend on and a user may have otherwise."""
    dtype, rates = options.dtype, options.rates
    return [
        f"weights and gradients in {dtype}; gradients are set to None between steps",
        f"tensors fill at most {100 * FILLED:g}% of the GPU ({100 * FILLED_BESIDE_HOST:g}% where host memory is used too), with "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True; {100 * HOST_SHARE:.0f}% of the host is free",
        f"time is FLOPs over rates: products {rates.gemm / 1e12:.0f}, attention forward {rates.attention_forward / 1e12:.0f} and "
        f"backward {rates.attention_backward / 1e12:.0f} TFLOP/s, or launches where chunks are small; elementwise work, copies "
        "and communication are not counted",
    ]


def _assumptions(options: Options, itemsize: int) -> list[str]:
    """Return in words what the numbers of a report depend on."""
    dtype = options.dtype
    said = [
        *common_assumptions(options),
        "checkpointing is transformers' own, with SDPA, eager norms and a loss on full logits",
    ]
    if options.optimizer == "adamw" and copies_to_fp32(options.engine, itemsize):
        said.append("AdamW's moments and a copy of the weights in fp32, as DeepSpeed keeps them")
    elif options.optimizer == "adamw":
        said.append(f"AdamW's moments in {dtype}, as torch keeps them")
    if options.quantization != "none":
        said.append(
            f"the linear maps of the layers in {options.quantization}, as bitsandbytes keeps them, without double quantisation; "
            "embeddings, head, norms and stacked experts as they are; dequantising takes memory, and its time is not counted"
        )
    if options.objective == "dpo":
        reference = (
            "a second, frozen model on the same GPU, whole" if options.method == "full" else "the model without its adapters"
        )
        pairs = "a batch of pairs is one pass of twice as many sequences, of `seq_len` tokens each"
        said.append(f"{pairs}; the reference is {reference}")
    if options.objective == "grpo":
        said.append("the update alone, without a reference (TRL's beta=0); generating completions is not counted")
    return said
