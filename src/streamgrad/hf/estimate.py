"""`estimate`: what a step will hold, by component, on device and host; what it will take; and the longest that fits.

Nothing is allocated and no device is needed: the layer's costs come from a run on tensors without storage (`hf.dry_run`), or
from one that is remembered (`hf.remembered`), the plan from the planner that will make it when the step runs (`memory.planner`),
the bytes of its moments from `moments`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from streamgrad.config import KEEP_POLICIES, OFFLOAD_PLACES, parse_bytes
from streamgrad.hf.remembered import shape_of
from streamgrad.memory.costs import Parts, head_parts
from streamgrad.memory.engines import ENGINES, longest_sequence, rank_bytes
from streamgrad.memory.head_chunk import FREE_SHARE, SHORTEST_CHUNK, head_chunk_within
from streamgrad.memory.model_shape import ModelShape
from streamgrad.memory.phases import Phase, Workload, checkpointing_phases, host_parts, streamed_phases
from streamgrad.memory.planner import HOST_SHARE, MARGIN, SMALL_CHUNKS, Plan, Step, choose_plan, regular_chunk
from streamgrad.memory.seconds import Rates, Seconds, checkpointing_seconds, streamed_seconds

METHODS = ("full", "lora")
OBJECTIVES = ("sft", "dpo", "grpo")
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "none")
DTYPES = ("bfloat16", "float16", "float32")
LONGEST = 1 << 24
# Of a GPU, what a step's tensors may fill where the allocator's segments can grow: the fullest steps that ran held 98.2 to 99.2%
# (benchmarks/results/predicted.jsonl). The planner itself leaves more free.
FILLED = 0.9925
# With host memory: 97.9% ran, and a step 5% longer did not.
FILLED_BESIDE_HOST = 0.98

_DEEPSPEED = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Outlook:
    """One way to compute the step: bytes by component at its worst moment, and its time."""

    name: str
    device_bytes: Parts
    host_bytes: Parts
    moment: str
    fits: bool
    seconds: Seconds
    longest_tokens: int
    plan: Plan | None = None

    @property
    def peak_bytes(self) -> float:
        return sum(self.device_bytes.values())


@dataclass(frozen=True)
class Report:
    """What `estimate` returns. `batch` and `seq_len` are those of one rank; so are all bytes."""

    model: str
    method: str
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
    def title(self) -> str:
        """What is planned, in words."""
        many = f", {self.gpus} GPUs with {self.engine}" if self.gpus > 1 else ""
        optimizer = "no optimizer" if self.optimizer == "none" else self.optimizer
        how = f"{self.model}, {self.method}, {self.objective}, {optimizer}{many}"
        return f"{how}: {self.batch} x {self.seq_len:,} tokens"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with totals and the plan in words."""
        row = dataclasses.asdict(self)
        for name in ("streamed", "checkpointing"):
            outlook: Outlook = getattr(self, name)
            row[name]["plan"] = None if outlook.plan is None else str(outlook.plan)
            row[name] |= {"peak_bytes": outlook.peak_bytes, "seconds": vars(outlook.seconds) | {"total": outlook.seconds.total}}
        return row


def estimate(
    model: Any,
    seq_len: int | None = None,
    *,
    batch: int = 1,
    method: str = "full",
    lora_rank: int | None = None,
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
    """What one training step of a model will hold and take, streamed and with plain gradient checkpointing.

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
        gpu_memory, host_memory: of one GPU, and of the machine that all `gpus` are in.
        keep, offload: as for `StreamConfig`.
    """
    for name, value, choices in (
        ("method", method, METHODS),
        ("objective", objective, OBJECTIVES),
        ("optimizer", optimizer, OPTIMIZERS),
        ("engine", engine, ENGINES),
        ("dtype", dtype, DTYPES),
        ("keep", keep, KEEP_POLICIES),
        ("offload", offload, OFFLOAD_PLACES),
    ):
        if value not in choices:
            raise ValueError(f"{name}={value!r} is not a choice. Pass one of {', '.join(map(repr, choices))}.")
    for name, number in (("seq_len", seq_len), ("batch", batch), ("gpus", gpus), ("lora_rank", lora_rank)):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise ValueError(f"{name}={number!r} will not do: it counts something. Pass a whole number of at least 1.")
    if lora_rank is not None and method != "lora":
        raise ValueError(f"lora_rank={lora_rank} is for method='lora', and method is {method!r}. Leave one of them out.")
    if (engine == "none") != (gpus == 1):
        raise ValueError(
            f"engine={engine!r} with gpus={gpus}: several GPUs need an engine, and one needs none. Pass engine='none' with "
            f"gpus=1, or one of {', '.join(ENGINES[1:])} with gpus of at least 2."
        )
    gpu_bytes, host_bytes = _amount("gpu_memory", gpu_memory), _amount("host_memory", host_memory)
    rank = (lora_rank or 32) if method == "lora" else None
    shape = shape_of(model, dtype=dtype, lora_rank=rank)
    rows = 2 * batch if objective == "dpo" else batch
    resident, share = _resident(shape, engine, gpus, optimizer, reference=objective == "dpo" and method == "full")
    card = _Card(gpu_bytes, HOST_SHARE * host_bytes / gpus, keep, offload)
    load = Workload(shape, rows, seq_len or 1, resident, share)
    longest = _longest(load, lambda longer: card.holds(*card.streamed(longer, smallest=True)))
    plainly = _longest(load, lambda longer: card.holds(None, _worst(checkpointing_phases(longer))))
    if not seq_len and not longest:
        raise ValueError(
            f"nothing fits {gpu_memory}, not even batch={batch} of 128 tokens: weights, optimizer state and the engine's buffers "
            f"alone take {sum(resident.values()) / 2**30:.1f} GiB on each GPU. Pass a smaller batch, method='lora', "
            "optimizer='adamw8bit', an engine that shards with more GPUs, or a larger GPU."
        )
    load = replace(load, sequence=seq_len or longest)
    reference = objective == "dpo"
    products = (3 if shape.head_trainable else 2) + (objective != "sft")  # log-probabilities make their logits again in backward
    rates = rates or Rates()
    plan, moment = card.streamed(load)
    streamed = Outlook(
        name="streamgrad",
        device_bytes=moment.parts,
        host_bytes=host_parts(load, plan.policies),
        moment=moment.name,
        fits=card.holds(plan, moment),
        seconds=streamed_seconds(load, plan.policies, plan.chunk_sizes, rates, head_products=products, reference=reference),
        longest_tokens=longest,
        plan=replace(plan, peak_bytes=moment.total_bytes),
    )
    moment = _worst(checkpointing_phases(load))
    checkpointing = Outlook(
        name="gradient checkpointing",
        device_bytes=moment.parts,
        host_bytes={},
        moment=moment.name,
        fits=card.holds(None, moment),
        seconds=checkpointing_seconds(load, rates, head_products=3 if shape.head_trainable else 2, reference=reference),
        longest_tokens=plainly,
    )
    return Report(
        model=model if isinstance(model, str) else type(model).__name__,
        method=f"lora of rank {rank}" if rank else method,
        objective=objective,
        optimizer=optimizer,
        engine=engine,
        gpus=gpus,
        batch=batch,
        seq_len=load.sequence,
        gpu_memory=gpu_bytes,
        host_memory=host_bytes,
        dtype=dtype,
        keep=keep,
        offload=offload,
        streamed=streamed,
        checkpointing=checkpointing,
        assumptions=tuple(_assumptions(dtype, method, objective, optimizer, engine, rates)),
    )


def _amount(name: str, value: int | str) -> int:
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True)
class _Card:
    """The memory that a step may use, and the options that plans are made with."""

    device_bytes: float
    host_bytes: float
    keep: str
    offload: str

    def streamed(self, load: Workload, *, smallest: bool = False) -> tuple[Plan, Phase]:
        """The plan that the planner makes within this memory, or the smallest there is, and its worst moment."""
        shape = load.shape
        step = Step(
            costs=shape.profile.costs,
            layers=shape.layers,
            shape=load.batch,
            resident_bytes=sum(load.with_positions.values()),
            layer_gradient_bytes=load.gradient_share * shape.profile.costs.gradients,
            head_bytes=self._held_by_head(load),
            head_gradient_bytes=load.gradients(0),
            embedding_bytes=sum(load.at_embeddings.values()),
            # With adapters the first layer's input is made to require a gradient.
            leaf_bytes=0.0 if shape.outside_trainable else load.tokens * shape.profile.costs.input,
        )
        plan, _ = choose_plan(
            step,
            keep=self.keep,
            offload=self.offload,
            chunk_size=regular_chunk(load.rows, load.sequence, SMALL_CHUNKS[-1]) if smallest else None,
            budget_bytes=0.0 if smallest else (1.0 - MARGIN) * self.device_bytes,
            host_budget_bytes=self.host_bytes,
        )
        return plan, _worst(streamed_phases(load, plan.policies, plan.chunk_sizes, self._head_rows(load, plan)))

    def holds(self, plan: Plan | None, moment: Phase) -> bool:
        """Whether the worst moment of a step fits the GPU, and what its plan keeps on the host the host."""
        on_host = 0.0 if plan is None else plan.host_bytes
        filled = FILLED_BESIDE_HOST if on_host else FILLED
        return moment.total_bytes <= filled * self.device_bytes and on_host <= self.host_bytes

    def _held_by_head(self, load: Workload) -> float:
        """As a model with a streamed head announces it to the planner (`hf.causal_lm`)."""
        shape = load.shape
        hidden, logits = load.tokens * shape.width, 2 * min(load.tokens, SHORTEST_CHUNK) * shape.vocabulary
        return sum(head_parts(hidden * shape.itemsize, logits * shape.itemsize, shape.head_trainable, shape.itemsize).values())

    def _head_rows(self, load: Workload, plan: Plan) -> int:
        """The head's chunk: an eighth of what is free when it starts."""
        shape = load.shape
        kept = sum(sum(shape.profile.costs.kept(policy).values()) for policy in plan.policies if not policy.on_host)
        used = sum(load.with_positions.values()) + load.tokens * (kept + 3 * shape.profile.costs.input)
        free = int(max(0.0, self.device_bytes - used)) // FREE_SHARE
        return min(head_chunk_within(free, load.tokens, shape.vocabulary, shape.itemsize), load.tokens)


def _longest(load: Workload, fits: Callable[[Workload], bool]) -> int:
    return longest_sequence(lambda tokens: 0.0 if fits(replace(load, sequence=tokens)) else 1.0, 0.0, step=128, limit=LONGEST)


def _worst(moments: list[Phase]) -> Phase:
    return max(moments, key=lambda moment: moment.total_bytes)


def _resident(shape: ModelShape, engine: str, gpus: int, optimizer: str, *, reference: bool) -> tuple[Parts, float]:
    """What stays on one rank for the whole step, and the part of each gradient that stays."""
    parameters = shape.layers * shape.layer_parameters + shape.outside_parameters
    # FSDP2 gathers what is outside of the layers as one unit, DeepSpeed one module of it after the other.
    outside = shape.outside_parameters if engine == "fsdp2" else shape.head_parameters
    count = rank_bytes(
        engine,
        parameters=parameters,
        trainable=shape.layers * shape.layer_trainable + shape.outside_trainable,
        unit=max(shape.layer_parameters, outside),
        ranks=gpus,
        parameter_size=shape.itemsize,
        gradient_size=shape.itemsize,
        optimizer_size=_optimizer_size(optimizer, shape.itemsize, engine),
    )
    weights = count.parameters + (parameters * shape.itemsize if reference else 0.0)
    share = 1.0 / gpus if engine in ("zero2", "zero3", "fsdp2") else 1.0
    return {"weights": weights, "optimizer state": count.optimizer, "other": count.working}, share


def _optimizer_size(optimizer: str, itemsize: int, engine: str) -> int:
    """Bytes per trainable parameter. torch's AdamW keeps its two moments in the weights' dtype, DeepSpeed in fp32 with a copy."""
    if optimizer == "none":
        return 0
    copied = 4 if engine in _DEEPSPEED and itemsize == 2 else 0
    return copied + {"adamw": 2 * (4 if copied else itemsize), "adamw8bit": 2, "sgd": 0}[optimizer]


def _assumptions(dtype: str, method: str, objective: str, optimizer: str, engine: str, rates: Rates) -> list[str]:
    """In words: what the numbers depend on and a user may have otherwise."""
    said = [
        f"weights and gradients in {dtype}; gradients are set to None between steps",
        f"tensors fill at most {100 * FILLED:g}% of the GPU ({100 * FILLED_BESIDE_HOST:g}% where host memory is used too), with "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True; {100 * HOST_SHARE:.0f}% of the host is free",
        f"time is FLOPs over rates: products {rates.gemm / 1e12:.0f}, attention forward {rates.attention_forward / 1e12:.0f} and "
        f"backward {rates.attention_backward / 1e12:.0f} TFLOP/s, or launches where chunks are small; elementwise work, copies "
        "and communication are not counted",
        "checkpointing is transformers' own, with SDPA, eager norms and a loss on full logits",
    ]
    if optimizer == "adamw":
        fp32 = engine in _DEEPSPEED and dtype != "float32"
        said.append("AdamW's moments and a copy of the weights in fp32, as DeepSpeed keeps them" if fp32
                    else f"AdamW's moments in {dtype}, as torch keeps them")  # fmt: skip
    if objective == "dpo":
        said.append("a batch of pairs is one pass of twice as many sequences, of `seq_len` tokens each; " + (
            "the reference is a second, frozen model on the same GPU, whole" if method == "full"
            else "the reference is the model without its adapters"))  # fmt: skip
    if objective == "grpo":
        said.append("the update alone, without a reference (TRL's beta=0); generating completions is not counted")
    return said
