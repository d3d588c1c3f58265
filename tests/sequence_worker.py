"""What the ranks of a sequence-parallel test run: one step on slices, and what came of it."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import streamgrad
from engine_worker import Collectives, base_of
from gradients import Step, no_float32
from lora import with_lora
from streamgrad.distributed import sequence_loss, sequence_parallel
from tiny import tiny_model, tokens


@dataclass(frozen=True)
class Case:
    """One model and one batch of 2 sequences of `length` tokens, the ranks' tokens together."""

    family: str = "qwen3"
    length: int = 24
    chunk_size: int | str = 4
    keep: str = "input"
    kind: str = "plain"
    lora: bool = False
    ranks: int = 2
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        model = tiny_model(self.family, num_key_value_heads=4 if self.ranks == 4 else 2)
        if self.lora:
            model = with_lora(model)
            base_of(model).enable_input_require_grads()
        return model

    def batch(self) -> dict[str, Tensor]:
        """The whole sequences, with labels that are shifted."""
        ids = tokens(2, self.length)
        labels, batch = ids.clone(), {"input_ids": ids}
        if self.kind in ("padded", "left padded"):
            mask = torch.ones_like(ids)
            if self.kind == "padded":
                mask[1, 2 * self.length // 5 :] = 0  # the second rank has no token of the second row
                labels[1, 2 * self.length // 5 :] = -100
            else:
                mask[1, : self.length - 5] = 0
                labels[1, : self.length - 4] = -100
            batch["attention_mask"] = mask
        elif self.kind == "packed":
            first, half = self.length // 3, self.length // 2
            lengths = [[first, 1, self.length - first - 1], [half, self.length - half]]  # the second row's at the end of a slice
            batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            labels = labels.masked_fill(batch["position_ids"] == 0, -100)
        elif self.kind == "prompt":
            labels[:, : self.length // 2 + 3] = -100  # the first rank has no label
        elif self.kind == "positions":
            batch["position_ids"] = torch.arange(7, 7 + self.length).expand(2, -1)
        elif self.kind == "embedded":
            del batch["input_ids"]
            generator = torch.Generator().manual_seed(2)
            batch["inputs_embeds"] = torch.randn(2, self.length, 24, generator=generator, dtype=torch.float64)
        return batch | {"shift_labels": nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}


def plain_step(case: Case) -> Step:
    """Stock, one process, the whole sequence."""
    model, batch = case.model(), case.batch()
    embeds = batch["inputs_embeds"].requires_grad_() if case.kind == "embedded" else None
    with no_float32():
        loss = model(**batch, labels=batch["shift_labels"], use_cache=False).loss
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(loss.detach(), gradients if embeds is None else gradients | {"input": embeds.grad})


@dataclass
class Outcome:
    """`step` after averaging over ranks, as engines do; the collectives of forward and backward; what was not one of them."""

    step: Step
    collectives: Counter
    rank_loss: Tensor


def slice_of(batch: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return {name: tensor.chunk(ranks, dim=1)[rank].contiguous() for name, tensor in batch.items()}


def run_case(case: Case) -> Outcome:
    group = dist.group.WORLD
    model = streamgrad.enable(case.model(), chunk_size=case.chunk_size, head_chunk_size=3, keep=case.keep, **case.options)
    sequence_parallel(model, group)
    batch = slice_of(case.batch(), group)
    embeds = batch["inputs_embeds"].requires_grad_() if case.kind == "embedded" else None
    with ExitStack() as during:
        during.enter_context(no_float32())
        seen = during.enter_context(Collectives())
        rank_loss = model(**batch, labels=batch["shift_labels"]).loss
        loss = sequence_loss(rank_loss, batch["shift_labels"], group)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        if gradient is not None:
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)
    if embeds is not None:
        parts = [torch.empty_like(embeds.grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, embeds.grad, group=group)
        gradients["input"] = torch.cat(parts, dim=1) / dist.get_world_size(group)
    return Outcome(Step(loss.detach(), gradients), seen.counts, rank_loss.detach())


def run_cases(cases: list[Case]) -> list[Outcome]:
    return [run_case(case) for case in cases]
