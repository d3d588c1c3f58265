"""`estimate`: what a step holds, by component, on device and host; how long it takes; and the longest sequence that fits.

Nothing is allocated and no device is needed. The layer's costs come from the table of presets or a dry run (`shapes`), what
stays for the whole step from `memory.training_state`, the plan and whether it fits from `memory.fit`, the bytes of each phase
from `memory.phases`, and the time from `memory.seconds` and `memory.traffic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from streamgrad.engine.policy import LayerPolicy
from streamgrad.hf.estimates.assumptions import assumptions
from streamgrad.hf.estimates.options import Options, check_count, full_dtype, memory_bytes
from streamgrad.hf.estimates.remedies import Changes, in_python, why_nothing_fits
from streamgrad.hf.estimates.report import Outlook, Report
from streamgrad.hf.estimates.shapes import shape_of
from streamgrad.memory.costs import ModelShape, Parts, sum_of
from streamgrad.memory.phases import Workload, checkpointing_phases, host_parts, largest
from streamgrad.memory.seconds import Rates, Seconds, checkpointing_seconds, streamed_seconds
from streamgrad.memory.this_machine import machine
from streamgrad.memory.traffic import (
    SharedSequences,
    beside_seconds,
    exchange_seconds,
    key_heads,
    ring_seconds,
    shared_shape,
    smallest_ring,
)
from streamgrad.memory.training_state import TrainingState, training_state


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
    weights: str = "device",
    engine: str = "none",
    gpus: int = 1,
    gpus_per_node: int = 8,
    sp: int = 1,
    ring: int | None = None,
    master_dtype: str = "auto",
    dtype: str = "bfloat16",
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    host_memory: int | str | None = None,
    keep: str = "auto",
    offload: str = "auto",
    recompute_layers: int | str = "auto",
    rates: Rates | None = None,
) -> Report:
    """Return what one training step of a model holds and takes, streamed and with plain gradient checkpointing.

    ```python
    report = streamgrad.estimate("qwen3-8b", 65_536, gpu="h100", optimizer="in-backward")
    print(report)
    report.streamed.peak_bytes, report.streamed.longest_tokens, report.streamed.device_bytes["kept inputs"]
    ```

    Args:
        model: a preset's name or its name on the hub, a directory with a `config.json`, another name on the hub, a configuration,
            or a model (its configuration is read, not its weights or adapters).
        seq_len: tokens of each sequence; by default the most that fit when streamed.
        batch: pairs for DPO, completions for GRPO, sequences for SFT; on each rank, or on each `sp` ranks that share them.
        method: "full", or "lora" with adapters of rank `lora_rank` (32 unless given) on every linear map of the layers.
        quantization: "nf4" or "int8" for QLoRA: how bitsandbytes keeps the linear maps of the layers; "none" as they are.
        optimizer: "adamw", "adamw8bit", "sgd" or "none"; "in-backward", AdamW whose steps free gradients in backward; "host",
            AdamW with its state and all gradients on the host.
        weights: "host" if layers wait in host memory and come one ahead; else "device".
        gpus, gpus_per_node, sp: GPUs in all, in one machine, and to one sequence.
        ring: how many of the `sp` GPUs have the same heads, as for `parallel.sequence_parallel`; by default as few as can be.
        master_dtype: what FSDP2 keeps trained 16-bit weights in: "auto" as Accelerate does with mixed precision, in float32.
        gpu: a card's name, such as "rtx4090"; by default this machine's GPU or, where it has none, an H100 with 80 GB.
        gpu_memory, host_memory: of one GPU, and of the machine that it is in, in place of the card's and this machine's.
        keep, offload, recompute_layers: as for `StreamConfig`.
        rates: FLOPs a second, in place of the card's.
    """
    place = machine(
        gpu=gpu,
        gpu_bytes=memory_bytes("gpu_memory", gpu_memory),
        host_bytes=memory_bytes("host_memory", host_memory),
        rates=rates,
    )
    options = Options(
        batch=batch, method=method, lora_rank=lora_rank, quantization=quantization, objective=objective, optimizer=optimizer,
        weights=weights, engine=engine, gpus=gpus, gpus_per_node=gpus_per_node, sp=sp, ring=ring,
        master_dtype=full_dtype(master_dtype), dtype=full_dtype(dtype), keep=keep, offload=offload,
        recompute_layers=recompute_layers, machine=place,
    )  # fmt: skip
    (report,) = estimate_lengths(model, [seq_len], options)
    return report


@dataclass(frozen=True)
class Estimator:
    """Holds a model's shape and how it is trained, and estimates steps of any length."""

    shape: ModelShape
    options: Options

    @property
    def state(self) -> TrainingState:
        return training_state(self.shape, self.options.setup)

    @property
    def held(self) -> Parts:
        """Return what one GPU holds of weights, optimizer state and gradients when backward ends."""
        gradients = self.state.gradient_share * self.shape.itemsize * self.shape.trainable
        return sum_of(self.state.device, {"gradients": gradients})

    def load(self, tokens: int) -> Workload:
        """Return the step of sequences of so many tokens, of which a rank has 1/sp."""
        options, state = self.options, self.state
        rows = (2 if options.objective == "dpo" else 1) * options.batch
        own = -(-tokens // options.sp)
        shape, ranks = shared_shape(self.shape, options.ranks), options.ranks
        return SharedSequences(shape, rows, own, state.device, state.gradient_share, ranks=ranks.sequence, ring=ranks.ring)

    def longest(self) -> int:
        """Return the tokens of the longest sequence that fits when streamed, or 0."""
        fits = self.options.host_left(self.state) >= 0
        return self.options.sp * self.options.card(self.state).longest(self.load(1)) if fits else 0

    def longest_checkpointed(self) -> int:
        """Return the tokens of the longest sequence that fits with transformers' gradient checkpointing, or 0."""
        fits = self.options.host_left(self.state) >= 0
        return self.options.sp * self.options.card(self.state).longest_with_checkpointing(self.load(1)) if fits else 0

    def streamed(self, load: Workload, longest: int) -> Outlook:
        """Return the outlook of a streamed step, whose planner has what the state leaves of both memories."""
        options, state = self.options, self.state
        card = options.card(state)
        plan, phase = card.planned(load)
        # Objectives on log-probabilities make their logits again in backward.
        products = _head_products(load) + (options.objective != "sft")
        seconds = streamed_seconds(
            load, plan.policies, plan.chunk_sizes, options.machine.rates, head_products=products, reference=options.has_reference
        )
        return Outlook(
            name="streamgrad",
            device_bytes=phase.parts,
            host_bytes=sum_of(state.host, host_parts(load, plan.policies)),
            phase=phase.name,
            fits=card.holds(plan, phase) and options.host_left(state) >= 0,
            seconds=self._with_traffic(seconds, load, plan.policies),
            longest_tokens=longest,
            plan=replace(plan, peak_bytes=phase.total_bytes),
        )

    def checkpointed(self, load: Workload, longest: int) -> Outlook:
        """Return the outlook of a step with transformers' gradient checkpointing."""
        options, phase = self.options, largest(checkpointing_phases(load))
        seconds = checkpointing_seconds(
            load, options.machine.rates, head_products=_head_products(load), reference=options.has_reference
        )
        return Outlook(
            name="gradient checkpointing",
            device_bytes=phase.parts,
            host_bytes=self.state.host,
            phase=phase.name,
            fits=options.card(self.state).holds(None, phase) and options.host_left(self.state) >= 0,
            seconds=self._with_traffic(seconds, load, [LayerPolicy("input")] * self.shape.layers),
            longest_tokens=longest,
        )

    def _with_traffic(self, seconds: Seconds, load: Workload, policies: Sequence[LayerPolicy]) -> Seconds:
        options, links = self.options, self.options.machine.links
        return replace(
            seconds,
            exchanges=exchange_seconds(load, policies, options.ranks, links),
            ring=ring_seconds(load, policies, options.ranks, links),
            beside=beside_seconds(load, options.setup, self.state, options.ranks, links),
        )


def estimator_of(model: Any, options: Options) -> Estimator:
    """Return the estimator of a model, whose shape is looked up or measured."""
    shape = shape_of(model, dtype=options.dtype, lora_rank=options.rank).quantized(options.quantization)
    return Estimator(shape, replace(options, ring=_checked_ring(model, shape, options)))


def estimate_lengths(model: Any, lengths: Sequence[int | None], options: Options) -> list[Report]:
    """Return a report for each length, from one shape of the model. None stands for the longest that fits."""
    name = model if isinstance(model, str) else type(model).__name__
    return reports_of(name, estimator_of(model, options), lengths)


def reports_of(
    name: str, estimator: Estimator, lengths: Sequence[int | None], spelled: Callable[[Changes], str] = in_python
) -> list[Report]:
    """Return a report for each length, or for the longest that fits where it is None. Errors name options as `spelled`."""
    for length in lengths:
        check_count("seq_len", length)
    longest, checkpointed = estimator.longest(), estimator.longest_checkpointed()
    if None in lengths and not longest:
        raise ValueError(why_nothing_fits(estimator, spelled))
    return [_report(name, estimator, length or longest, longest, checkpointed) for length in lengths]


def _checked_ring(model: Any, shape: ModelShape, options: Options) -> int:
    """Return the ring that was asked for, or the smallest that works; raise where ranks would have no whole heads."""
    heads, ranks = shape.profile.query_heads, options.sp
    if ranks == 1:
        return 1
    if not key_heads(shape):
        raise ValueError(
            f"sp={ranks}: the ranks of a sequence share the heads of its attention, and this model's layers have none. Pass sp=1."
        )
    ring = options.ring or smallest_ring(ranks, heads)
    if heads % (ranks // ring):
        from streamgrad.hf.configs import config_of
        from streamgrad.hf.sequence_slices import check_heads

        check_heads(config_of(model), ranks, ring)  # which raises, as it does in training
    return ring


def _head_products(load: Workload) -> int:
    return 3 if load.shape.head_trainable else 2


def _report(model: str, estimator: Estimator, tokens: int, longest: int, checkpointed: int) -> Report:
    options, load, place = estimator.options, estimator.load(tokens), estimator.options.machine
    same = {field.name: getattr(options, field.name) for field in fields(Report) if hasattr(options, field.name)}
    own = {
        "model": model,
        "method": f"lora of rank {options.rank}" if options.rank else options.method,
        "seq_len": tokens,
        "gpu": place.gpu,
        "gpu_memory": place.gpu_bytes,
        "host_memory": place.host_bytes,
        "streamed": estimator.streamed(load, longest),
        "checkpointing": estimator.checkpointed(load, checkpointed),
        "assumptions": tuple(assumptions(options, estimator.shape)),
    }
    return Report(**same | own)
