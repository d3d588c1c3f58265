"""What the processes of an engine test run: a tiny model under an engine, a few optimizer steps, and what came of them.

Ranks have batches of different lengths, so different numbers of chunks: an engine that were told about chunks would wait for
ever. Many cases run in one process group, since starting processes takes longer than any case.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import forkserver, set_forkserver_preload
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import streamgrad
from families import small_model
from gradients import assert_as_exact_as_plain, no_float32, worst_gradient_error
from leaving import leave
from lora import with_lora
from streamgrad.memory.engines import rank_bytes
from streamgrad.parallel import make_zero3_leaves
from tiny import FAMILIES, tiny_model, tokens

LENGTHS = (32, 9, 21, 5)  # of the batch of each rank
STEPS = 3
CHUNKS = (1, 4, 16)  # on rank 0


@dataclass(frozen=True)
class Case:
    """One way to train. `chunks` on rank 0; None is the stock model with gradient checkpointing."""

    engine: str
    method: str = "full"
    chunks: int | None = 4
    micro_batches: int = 1
    enable_after: bool = False
    keep: str = "input"
    fused: bool = False  # as on a GPU in 16 bits
    device: str = "cpu"
    offload: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        chunks = "checkpointing" if self.chunks is None else f"{self.chunks} chunks"
        extra = [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1) + ["enabled after"] * self.enable_after
        extra += [f"keep {self.keep}"] * (self.keep != "input") + ["fused"] * self.fused
        extra += [self.device] * (self.device != "cpu") + [f"offload {self.offload}"] * (self.offload != "auto")
        return ", ".join([self.engine, self.method, chunks, *extra, *(f"{key}={value}" for key, value in self.options.items())])


@dataclass
class Outcome:
    """Full parameters after the last step, and how often (collective, elements) was started during it.

    In the steps before, DDP rebuilds its buckets and ZeRO-3 compares its traces of the model. `held` is what this rank keeps of
    parameters and of the optimizer's state, in elements.
    """

    parameters: dict[str, Tensor]
    collectives: Counter
    held: tuple[int, int]

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Return how many collectives of each kind there were, and their elements in all.

        Not the sizes of single buckets: ZeRO fills these in the order in which the gradients of a layer arrive.
        """
        kinds: dict[str, tuple[int, int]] = {}
        for (kind, elements), times in self.collectives.items():
            number, total = kinds.get(kind, (0, 0))
            kinds[kind] = number + times, total + times * elements
        return kinds


def build(method: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A family's name as the method: that family, trained in full. The weights are float32 numbers, whatever the dtype."""
    if method == "granitemoehybrid":  # with layers that have states
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return small_model(method).float().to(dtype)
    if method in FAMILIES:
        return tiny_model(method, dtype=dtype)
    model = tiny_model("qwen3", dtype=dtype, tie_word_embeddings=method == "tied")
    return with_lora(model) if method == "lora" else model


def base_of(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def batches_of(rank: int, step: int, micro_batches: int, device: str = "cpu") -> list[dict]:
    batches = []
    for index in range(micro_batches):
        ids = tokens(2, LENGTHS[rank] - index, seed=rank + 10 * step + 100 * index).to(device)
        batches.append({"input_ids": ids, "labels": ids.clone()})
    return batches


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam: its updates hardly change when every gradient is twice too large.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@dataclass
class Reference:
    """Parameters after the last step of plain backpropagation in one process, and the same computed in float64."""

    plain: dict[str, Tensor]
    truth: dict[str, Tensor]

    @classmethod
    def of(cls, train: Callable[[torch.dtype], dict[str, Tensor]]) -> Reference:
        with no_float32():
            truth = train(torch.float64)
        return cls(train(torch.float32), truth)

    def check(self, parameters: dict[str, Tensor]) -> None:
        assert_as_exact_as_plain(parameters, self.plain, self.truth)


def plain_backprop(method: str, world_size: int, micro_batches: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """One process, the stock model, the batches of all ranks; parameters after the last step."""
    model = build(method, dtype)
    optimizer = optimizer_for(model)
    for step in range(STEPS):
        for rank in range(world_size):
            for batch in batches_of(rank, step, micro_batches):
                (model(**batch).loss / (world_size * micro_batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


class Ddp:
    """`step` takes the micro-batches of one optimizer step; only the last one is reduced."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        self.model = model
        # Every gradient is a bucket of its own. DDP fills larger ones in order of arrival, which is a layer's own affair.
        self.wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-6, **case.options)
        self.wrapped.register_comm_hook(None, self._reduce)
        self.optimizer = optimizer_for(model)
        self._buckets: Counter = Counter()

    def _reduce(self, state, bucket):  # without annotations, which DDP would read
        """What DDP does by itself, from C++ and so out of sight of a dispatch mode."""
        self._buckets["all-reduce of a bucket", bucket.buffer().numel()] += 1
        return allreduce_hook(None, bucket)

    def unseen_collectives(self) -> Counter:
        buckets, self._buckets = self._buckets, Counter()
        return buckets

    def step(self, batches: list[dict]) -> None:
        for index, batch in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else self.without_reduction():
                (self.wrapped(**batch).loss / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def without_reduction(self) -> Any:
        return self.wrapped.no_sync()

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def held_parameters(self) -> int:
        values = self.model.parameters()
        return sum((value.to_local() if isinstance(value, DTensor) else value).numel() for value in values)


class Fsdp2(Ddp):
    def __init__(self, model: nn.Module, case: Case) -> None:
        self.model = model
        options = dict(case.options)
        if options.pop("hsdp", False):
            options["mesh"] = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
        units = [*base_of(model).model.layers, *([base_of(model).lm_head] if options.pop("head_too", False) else [])]
        for unit in units:
            fully_shard(unit, **options)
        self.wrapped = fully_shard(model, **options)
        self.optimizer = optimizer_for(model)

    def unseen_collectives(self) -> Counter:
        return Counter()

    @contextlib.contextmanager
    def without_reduction(self) -> Iterator[None]:
        self.wrapped.set_requires_gradient_sync(False)
        yield
        self.wrapped.set_requires_gradient_sync(True)

    def parameters(self) -> dict[str, Tensor]:
        full = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in full.items()}


class Zero:
    def __init__(self, model: nn.Module, case: Case) -> None:
        import deepspeed

        self.model, self.stage = model, int(case.engine[-1])
        zero = {
            "stage": self.stage, "reduce_bucket_size": 3000,
            # What is smaller than the defaults is never sharded, and all of a tiny model is.
            "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0,
        }  # fmt: skip
        self.optimizer = optimizer_for(model)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=self.optimizer,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": case.micro_batches,
                "gradient_clipping": 0.0,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": zero | case.options,
            },
        )

    def step(self, batches: list[dict]) -> None:
        for batch in batches:
            self.engine.backward(self.engine(**batch).loss)
            self.engine.step()

    def unseen_collectives(self) -> Counter:
        return Counter()

    def parameters(self) -> dict[str, Tensor]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.model.parameters()), enabled=self.stage == 3):
            return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def held_parameters(self) -> int:
        return sum(value.ds_tensor.numel() if self.stage == 3 else value.numel() for value in self.model.parameters())


ENGINES: dict[str, type] = {"ddp": Ddp, "fsdp2": Fsdp2, "zero1": Zero, "zero2": Zero, "zero3": Zero}


def run_case(case: Case) -> Outcome:
    model = build(case.method).to(case.device)
    if case.method == "lora":
        base_of(model).enable_input_require_grads()  # as trainers do for checkpointing of a model with frozen embeddings
    if case.engine == "zero3":
        make_zero3_leaves(model)

    def enable() -> None:
        size, compiled = LENGTHS[0] // case.chunks, "on" if case.fused else "auto"
        streamgrad.enable(model, chunk_size=size, head_chunk_size=3, keep=case.keep, fused_kernels=compiled, offload=case.offload)

    if case.chunks is None:
        base_of(model).gradient_checkpointing_enable()
    elif not case.enable_after:
        enable()
    engine = ENGINES[case.engine](model, case)
    if case.chunks is not None and case.enable_after:
        enable()
    for step in range(STEPS):
        with Collectives() if step == STEPS - 1 else contextlib.nullcontext() as seen:
            engine.step(batches_of(dist.get_rank(), step, case.micro_batches, case.device))
        unseen = engine.unseen_collectives()
    parameters = {name: value.cpu() for name, value in engine.parameters().items()}
    return Outcome(parameters, seen.counts + unseen, (engine.held_parameters(), held_state(engine.optimizer)))


def held_state(optimizer: torch.optim.Optimizer) -> int:
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel() for tensor in tensors)


class Collectives(TorchDispatchMode):
    """`counts` of (operation, elements it was given) of every collective that starts inside the block from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace == "c10d":
            elements = sum(leaf.numel() for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self.counts[function.name(), elements] += 1
        return function(*args, **(kwargs or {}))


def run_cases(cases: list[Case]) -> list[Outcome]:
    if any(case.engine.startswith("zero") for case in cases):
        prepare_deepspeed()
    return [run_case(case) for case in cases]


def with_checkpointing(cases: list[Case]) -> list[Case]:
    """Each case after its stock counterpart, without repetition."""
    listed: list[Case] = []
    for case in cases:
        stock = replace(case, chunks=None, enable_after=False, keep="input", fused=False, offload="auto")
        listed += [entry for entry in (stock, case) if entry not in listed]
    return listed


def expected_to_be_held(case: Case, parameters: dict[str, Tensor], world_size: int) -> tuple[float, float]:
    """Elements on all ranks, by the formulas; shards are rounded up, and some ranks have more rows than others."""
    numbers = {
        "parameters": sum(value.numel() for value in parameters.values()),
        "trainable": sum(value.numel() for name, value in parameters.items() if case.method != "lora" or "lora_" in name),
    }
    sizes = {"parameter_size": 1, "gradient_size": 1, "optimizer_size": 1}  # SGD with momentum
    expected = rank_bytes(case.engine, unit=0, ranks=world_size, **numbers, **sizes)
    return world_size * expected.parameters, world_size * expected.optimizer


def check_cases(subtests: Any, cases: list[Case], *, world_size: int = 2) -> None:
    """Every rank's parameters are those of plain backpropagation, and its communication that of gradient checkpointing."""
    cases = with_checkpointing(cases)
    ranks: list[list[Outcome]] = launch(run_cases, cases, world_size=world_size)
    references: dict[tuple[str, int], Reference] = {}
    for index, case in enumerate(cases):
        if case.chunks is None:
            continue
        key = case.method, case.micro_batches
        if key not in references:
            references[key] = Reference.of(functools.partial(plain_backprop, case.method, world_size, case.micro_batches))
            start = {name: parameter.detach() for name, parameter in build(case.method).named_parameters()}
            moved, _ = worst_gradient_error(start, references[key].plain)
            assert moved > 0.05, "training hardly moved, so nothing would be compared"
        with subtests.test(f"{case}, bytes"):
            held = [sum(numbers) for numbers in zip(*(outcomes[index].held for outcomes in ranks), strict=True)]
            assert held == pytest.approx(expected_to_be_held(case, references[key].plain, world_size), rel=0.05)
        stock = cases.index(replace(case, chunks=None, enable_after=False, keep="input", fused=False, offload="auto"))
        for rank, outcomes in enumerate(ranks):
            with subtests.test(f"{case}, rank {rank}"):
                references[key].check(outcomes[index].parameters)
                actual, expected = outcomes[index].traffic(), outcomes[stock].traffic()
                assert actual == expected, f"{actual} instead of {expected}"
                assert actual, "no collective was seen"


def launch(function: Callable, *args: Any, world_size: int = 2, timeout_s: float = 900.0) -> list[Any]:
    """`function(*args)` in a process group of `world_size` new processes: what each rank returned, or a rank's error."""
    # A process that has looked for a GPU cannot be forked into one that uses it.
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    serve_forks()
    with tempfile.TemporaryDirectory() as folder:
        given = (world_size, folder, timeout_s, function, args)
        processes = mp.start_processes(_worker, given, nprocs=world_size, join=False, start_method=method)
        try:
            deadline = time.monotonic() + timeout_s
            while not processes.join(timeout=max(0.0, deadline - time.monotonic())):  # returns whenever one of them has ended
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{function.__name__} on {world_size} ranks did not finish within {timeout_s} s")
        finally:
            for process in processes.processes:
                process.kill()
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def serve_forks() -> None:
    """Starts, once, the process that later ones are forked from: it has imported what takes each of them ten seconds."""
    set_forkserver_preload([__name__])
    with mock.patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu"}):
        forkserver.ensure_running()


def _worker(rank: int, world_size: int, folder: str, timeout_s: float, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
    )
    result = function(*args)
    torch.save(result, Path(folder) / f"{rank}.pt")
    dist.barrier()
    leave()


def prepare_deepspeed() -> None:
    """DeepSpeed on processes without a GPU; without this it compiles a shared-memory transport for a minute."""
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
