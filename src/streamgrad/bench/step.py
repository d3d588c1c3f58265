"""One training step, forward and backward, by several methods on the same random inputs: time and memory.

The peers are configured as their authors would: transformers' gradient checkpointing with SDPA, and on top of it Liger's kernels
(with its fused linear cross entropy), or mini-sequences.
"""

from __future__ import annotations

import copy
import gc
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import streamgrad
from streamgrad.attention.backends import preferred
from streamgrad.bench.names import METHODS
from streamgrad.bench.objective import OBJECTIVES
from streamgrad.bench.peers import (
    HEAD_PIECES,
    MLP_PIECE_TOKENS,
    apply_liger,
    flash_name,
    mini_sequence_loss,
    shard_for_one_rank,
    split_mlps,
    zero3_for_one_rank,
)
from streamgrad.bench.records import EVERYTHING, Session, device_name, median_ms, rows_in, versions
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config, preset_model
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.costs import KEYS_AT_ONCE
from streamgrad.memory.device import allocator_settings
from streamgrad.memory.live_bytes import peak_bytes_of


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One method at one shape; the measurements are None where `error` says why.

    The step has `batch` rows of `seq_len` tokens: for DPO those of all pairs, for GRPO one a completion.
    `peak_bytes` and `reserved_bytes` are the allocator's, weights and gradients included; `host_bytes` is pinned host memory.
    `kernel_ms` is the time of a step's kernels by kind, from the profiler. Where only `layers` of the model's layers were run,
    `ballast_bytes` of device memory stood for the others: their weights, gradients and whatever they keep on the device.
    `accumulates`: gradients of an earlier step were there, and this one's were added to them. `flash` is what torch's flash
    operators ran (`peers.use_flash`). `allocator` has the settings of torch's allocator.
    """

    benchmark: str
    method: str
    model: str
    training: str = "full"
    objective: str = "sft"
    batch: int = 1
    seq_len: int
    layers: int
    step_ms: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    host_bytes: int
    ballast_bytes: int = 0
    kernel_ms: dict[str, float] | None = None
    accumulates: bool = False
    flash: str = "FA2"
    policy: dict[str, Any]
    error: str | None
    device: str
    versions: dict[str, str]
    allocator: str = ""
    command: str


def measure_steps(
    *,
    model: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    config: StreamConfig,
    runs: int,
    command: str,
    warm_ups: int = 4,
    layers: int | None = None,
    training: str = "full",
    objective: str = "sft",
    batches: Sequence[int] = (1,),
    kernels: bool = False,
    accumulates: bool = False,
    benchmark: str = "step",
    ballast: Callable[[PreTrainedModel, int], int] | None = None,
    budgets: dict[int, int] | None = None,
    device: torch.device | None = None,
    session: Session = EVERYTHING,
) -> Iterator[StepRecord]:
    """A record per method, length and batch. Each method gets a model of its own, made from the same seed.

    Args:
        layers: how many of the model's layers to build; all of them unless given.
        training: "full", or "lora" for adapters of rank 32 on every linear map of the layers.
        objective: "sft"; or "dpo", "grpo" with a reference pass, by streamgrad alone.
        batches: rows of a step.
        kernels: profile some more steps of streamgrad's.
        accumulates: gradients stay from step to step, as between two steps of an optimizer.
        ballast: of the built model and a number of tokens, bytes to be held on the device while it is measured.
        budgets: `memory_budget` by length, in place of the one in `config`.
        device: the GPU unless given. On a CPU, `peak_bytes` is counted above what the step found.
        session: cells that it has are left out.
    """
    _check_choices(methods, objective)
    preset = preset_config(model)
    if device is None:
        if not torch.cuda.is_available():
            raise ValueError(f"bench {benchmark} measures a GPU, and torch sees none.")
        device = torch.device("cuda")
    shared: dict[str, Any] = {
        "benchmark": benchmark, "model": model, "training": training, "objective": objective,
        "layers": layers or preset.num_hidden_layers, "device": device_name(device),
        "versions": versions("transformers", "liger-kernel", "triton", "deepspeed", "flash-attn-3", "flash-attn-4"),
        "command": command, "accumulates": accumulates, "flash": flash_name(),
        "allocator": allocator_settings(),
    }  # fmt: skip
    for method in sorted(methods, key=METHODS.index):
        streams = "streamgrad" in method
        pending = []
        for length, batch in itertools.product(lengths, batches):
            cell = shared | {"method": method, "batch": batch, "seq_len": length}
            used = replace(config, memory_budget=budgets[length]) if budgets else config
            if session.has(cell, vars(used) if streams else {}):
                session.tell(f"{model} {method} at {batch} x {length:,}: measured before")
            else:
                pending.append((cell, used))
        if not pending:
            continue
        clear_memory()
        torch.manual_seed(0)
        if "liger" in method:
            apply_liger(preset.model_type, fused_loss=method.startswith("liger"))
        network = preset_model(model, device=device, layers=layers)
        reference = None
        if training == "lora":
            _attach_lora(network)
        elif objective != "sft":
            reference = copy.deepcopy(network).requires_grad_(False)
        if not streams:
            network.gradient_checkpointing_enable(offload=method == "liger-offload")
        if method == "mst":
            split_mlps(network)
        if method == "streamgrad-fsdp2":
            shard_for_one_rank(network, device)
        engine = zero3_for_one_rank(network, device) if method == "streamgrad-zero3" else None
        for cell, used in pending:
            batch, length = cell["batch"], cell["seq_len"]
            session.tell(f"{model} {method} at {batch} x {length:,}")
            if streams:
                streamgrad.enable(network, used)
                if reference is not None:
                    streamgrad.enable(reference, used)
            ids_BT = torch.randint(0, network.config.vocab_size, (batch, length), device=device)
            held_bytes = ballast(network, batch * length) if ballast else 0
            outcome = _measure(
                _step_of(method, objective, network, ids_BT, reference, engine, accumulates), device, runs, warm_ups=warm_ups,
                kernels=kernels and streams, held_bytes=held_bytes,
            )  # fmt: skip
            installed = InstalledForward.on(network.get_decoder())
            yield StepRecord(
                **cell,
                **outcome,
                host_bytes=installed.stream.host_store.total_bytes if installed else 0,
                ballast_bytes=held_bytes,
                policy=_policy_of(used, installed) if installed else _peers_policy(method),
            )
            streamgrad.disable(network)
            if reference is not None:
                streamgrad.disable(reference)
        network = reference = installed = engine = None  # or the next method would be measured beside them


def _check_choices(methods: Sequence[str], objective: str) -> None:
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"methods={unknown[0]!r} is not a choice. Pass some of {', '.join(METHODS)}.")
    if "streamgrad-zero3" in methods and any("liger" in method for method in methods):
        raise ValueError(
            "DeepSpeed replaces torch's linear map for the rest of the process, and Liger transformers' modules, so that neither "
            "can be measured beside the other. Measure streamgrad-zero3 and the methods with liger in two commands."
        )
    if objective not in OBJECTIVES:
        raise ValueError(f"objective={objective!r} is not a choice. Pass one of {', '.join(OBJECTIVES)}.")
    others = [method for method in methods if "streamgrad" not in method]
    if objective != "sft" and others:
        raise ValueError(f"methods={others[0]!r} has steps of sft only, not of objective={objective!r}. Leave it out.")


def peaks_in(path: Path, *, method: str, model: str, lengths: Sequence[int]) -> dict[int, int]:
    """By length, the peak bytes of the latest record of a method."""
    peaks = {
        row["seq_len"]: row["peak_bytes"]
        for row in rows_in(path)
        if (row["method"], row["model"], row.get("batch", 1), row.get("flash", "FA2")) == (method, model, 1, "FA2")
    }
    missing = [length for length in lengths if not peaks.get(length)]
    if missing:
        raise ValueError(f"{path} has no record of {method} with {model} at {missing[0]} tokens. Measure it first.")
    return {length: peaks[length] for length in lengths}


def _policy_of(config: StreamConfig, installed: InstalledForward) -> dict[str, Any]:
    """The options, what they came to, and the bound on a kernel's workspace (records of before there was one lack it)."""
    plan = installed.stream.planner.latest
    sizes = list(plan.chunk_sizes) if plan else []
    outcome = {"plan": str(plan), "chunk_sizes": sizes, "kernel": preferred(installed.stream.backends)[0].name}
    return vars(config) | outcome | {"keys_at_once": KEYS_AT_ONCE}


def _peers_policy(method: str) -> dict[str, Any]:
    policy = {"gradient_checkpointing": True, "attention": "sdpa"}
    return policy | {"mlp_piece_tokens": MLP_PIECE_TOKENS, "head_pieces": HEAD_PIECES} if method == "mst" else policy


def _step_of(
    method: str, objective: str, network: Any, ids_BT: torch.Tensor, reference: Any, engine: Any, accumulates: bool
) -> Callable[[], None]:
    def step() -> None:
        if not accumulates:
            network.zero_grad(set_to_none=True)
        if method == "mst":
            loss = mini_sequence_loss(network, ids_BT)
        else:
            loss = OBJECTIVES[objective](engine or network, ids_BT, reference)
        (engine.backward if engine else torch.autograd.backward)(loss)

    return step


def _measure(
    step: Callable[[], None], device: torch.device, runs: int, *, warm_ups: int, kernels: bool, held_bytes: int
) -> dict[str, Any]:
    """The measurements of a `StepRecord`.

    Four steps warm up, unless the caller knows better: kernels are compiled in the first, the allocator has settled after the
    second, and by the fourth a shape of a few thousand tokens has been given to the kernel that it will stay with.
    """
    clear_memory()
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    nothing = {"step_ms": None, "peak_bytes": None, "reserved_bytes": None, "kernel_ms": None}
    try:
        ballast = torch.empty(held_bytes, dtype=torch.uint8, device=device)
        for _ in range(warm_ups):
            step()
        step_ms = median_ms(step, device, runs)
        peak = torch.cuda.max_memory_allocated(device) if on_cuda else peak_bytes_of(step, device)[1]
        reserved = torch.cuda.max_memory_reserved(device) if on_cuda else None
        kernel_ms = _kernel_ms(step) if kernels else None
        del ballast
    except torch.OutOfMemoryError:
        return nothing | {"error": "out of memory"}
    except ValueError as error:
        return nothing | {"error": str(error)}
    return {"step_ms": step_ms, "peak_bytes": peak, "reserved_bytes": reserved, "kernel_ms": kernel_ms, "error": None}


def _kernel_ms(step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of a step's kernels: attention, matrix products, copies, everything else.

    The mean of three steps that follow three others, as those do that are timed: a device that has rested while a profiler
    starts runs faster than one at its limit of power.
    """
    warm, counted = 3, 3
    schedule = torch.profiler.schedule(wait=0, warmup=warm, active=counted, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], schedule=schedule) as profile:
        for _ in range(warm + counted):
            step()
            torch.cuda.synchronize()
            profile.step()
    totals = dict.fromkeys(("attention", "gemm", "copy", "other"), 0.0)
    for event in profile.key_averages():
        totals[kernel_kind(event.key)] += event.self_device_time_total / counted / 1e3
    return {kind: round(ms, 3) for kind, ms in totals.items()}


def kernel_kind(name: str) -> str:
    """By the words in a kernel's name."""
    name = name.lower()
    for kind, words in (
        ("attention", ("sdpa", "flash", "fmha", "attention", "dot_do_o", "convert_dq")),
        ("gemm", ("gemm", "nvjet", "cublas", "cutlass", "splitk")),
        ("copy", ("memcpy", "memset")),
    ):
        if any(word in name for word in words):
            return kind
    return "other"


def _attach_lora(network: PreTrainedModel) -> None:
    peft = importlib.import_module("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    network.add_adapter(peft.LoraConfig(r=32, lora_alpha=32, target_modules=targets))
    network.enable_input_require_grads()


def clear_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()
