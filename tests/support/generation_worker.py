"""GRPO and RLOO on ranks that share sequences, and stock TRL in one process on the completions that those ranks have sampled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch import Tensor

from gradients import no_float32
from streamgrad.parallel import shared_slice
from trainer_kinds import build, load
from trainers import history, trl_on_full_logits

ULYSSES = "deepspeed.runtime.sequence_parallel.parallel_state_sp"
# Two prompts a generation, one on each of two ranks; and one, whose completions two ranks have. Completions are trained on twice,
# so that ratios are not 1, then others are sampled. The loss of each kind is normalised in another way.
RUNS = {
    "grpo": {"num_generations": 2, "top_entropy_quantile": 0.7, "epsilon": 0.01},
    "rloo": {"num_generations": 4, "epsilon": 0.01},
}
SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 0.05}


@dataclass
class Sampled:
    """What one generation was asked for, and what it gave."""

    prompts: list[list[int]]
    completions: list[list[int]]


@dataclass
class Trained:
    """What a run logged, the weights that it ended with, its generations, and how many of its calls computed a prompt once."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    sampled: list[Sampled]
    shared: int = 0


@contextmanager
def shuffled_by(rank: int) -> Iterator[None]:
    """Let what is shuffled without a generator of its own be shuffled in an order that each rank has for itself."""
    stock = torch.randperm

    def randperm(count: int, *, generator: torch.Generator | None = None, **options: Any) -> Tensor:
        return stock(count, generator=generator or torch.Generator().manual_seed(rank), **options)

    with mock.patch("torch.randperm", randperm):
        yield


@contextmanager
def sequences_shared() -> Iterator[None]:
    """Let trainers find what Accelerate's `sp_size` leaves behind, with DDP in the place of DeepSpeed."""
    parallelism = ParallelismConfig(sp_size=dist.get_world_size(), sp_backend="deepspeed")
    state = SimpleNamespace(_SEQUENCE_PARALLEL_GROUP=dist.group.WORLD)
    with (
        mock.patch.object(ParallelismConfig, "_validate_accelerator"),  # which knows no DDP on processors
        mock.patch.object(Accelerator, "parallelism_config", parallelism),
        mock.patch.dict(sys.modules, {ULYSSES: state}),
    ):
        yield


def _run(name: str, trainer: Any, generate: Any) -> Trained:
    """Train with `generate(prompt_ids, the trainer's own generation)`, which returns completions."""
    stock, sampled = trainer._generate_single_turn, list[Sampled]()

    def generation(prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        completions = generate(prompt_ids, lambda: stock(prompt_ids, *args, **kwargs))
        sampled.append(Sampled(prompt_ids, completions))
        return (completions, None) if name == "grpo" else completions

    trainer._generate_single_turn = generation
    with no_float32(), trl_on_full_logits():
        logs = history(trainer)
    counted = trainer.state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args), trainer.state.epoch
    logs.append(dict(zip(("tokens", "samples of a step", "epoch"), counted, strict=True)))
    return Trained(logs, {key: each.detach().clone() for key, each in trainer.model.named_parameters()}, sampled)


def trained_together(name: str, saved: str, method: str = "full") -> Trained:
    """On a rank: our trainer. Completions end early, at places that differ between rows and ranks."""
    rank = dist.get_rank()

    def generate(prompt_ids: list[list[int]], own: Any) -> list[list[int]]:
        completions = own()[0] if name == "grpo" else own()
        return [ids[: 3 + (3 * rank + row) % 5] for row, ids in enumerate(completions)]

    with (
        sequences_shared(), shuffled_by(rank), no_float32(), trl_on_full_logits(),
        mock.patch("streamgrad.trl.scoring.shared_slice", wraps=shared_slice) as sharing,
    ):  # fmt: skip
        options = SETTINGS | RUNS[name]
        trainer = build(name, saved, load(saved), streamed=True, method=method, ddp_backend="gloo", **options)
        trained = _run(name, trainer, generate)
    return replace(trained, shared=sharing.call_count)


def trained_alone(name: str, saved: str, ranks: list[list[Sampled]], method: str = "full") -> Trained:
    """Stock TRL in one process, whose generations are those of the ranks, one after the other."""
    generations = iter(zip(*ranks, strict=True))

    def generate(prompt_ids: list[list[int]], own: Any) -> list[list[int]]:
        parts = next(generations)
        assert prompt_ids == [ids for part in parts for ids in part.prompts], "ranks were given other prompts"
        return [ids for part in parts for ids in part.completions]

    with shuffled_by(0), no_float32(), trl_on_full_logits():
        trainer = build(name, saved, load(saved), streamed=False, method=method, **SETTINGS | RUNS[name])
        return _run(name, trainer, generate)
