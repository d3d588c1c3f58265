"""Completions that ranks generate alone and train on together, where they share sequences by Accelerate's `sp_size`.

    P ranks that share sequences   =   one process of stock TRL with the same arguments

Each of the P ranks generates 1/P of the completions, for other prompts or with other random numbers than the others, and gets
their rewards and advantages: so far, ranks are those of any data-parallel run, and TRL gathers each completion once. Then every
rank is given the completions of all P, and computes its slice of them (`sliced_rows`), where models score them too.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from streamgrad.engine.temporary import temporary_attribute, temporary_attributes
from streamgrad.hf.libraries.deepspeed import ulysses_group
from streamgrad.trl.sliced_rows import rows_cut_inside


def check_generations(args: Any, ranks: int) -> None:
    """Raise unless `ranks` ranks can generate equal parts of what they train on, and that is whole groups of completions."""
    own, groups = args.per_device_train_batch_size * args.steps_per_generation, args.world_size // ranks
    if own % ranks or own * groups % args.num_generations:
        raise ValueError(
            f"sp_size={ranks} lets {ranks} ranks train on {own} completions that they generate together "
            f"(per_device_train_batch_size * steps_per_generation), {own * groups} on all {args.world_size} ranks. The first "
            f"number must be a multiple of {ranks}, the second one of num_generations={args.num_generations}. Change "
            "gradient_accumulation_steps or steps_per_generation."
        )


def rows_of_group(rows: dict[str, Any], group: dist.ProcessGroup, unfit: Sequence[str] = ()) -> dict[str, Any]:
    """Return what TRL knows of the rows of all ranks, in their order: `rows` of this rank and of the others.

    Prompts get their padding on the left, what belongs to completions on the right, as if one process had padded them all. What
    cannot be cut, `unfit` among it, or is not there on every rank, is refused on all of them, so that none waits for another.
    """
    widths = {rows["prompt_ids"].shape[1], rows["completion_ids"].shape[1], 1}
    unfit = [*unfit, *(name for name, value in rows.items() if not _can_be_cut(value, widths))]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    own = {} if unfit else {name: value.cpu() for name, value in rows.items()}
    dist.all_gather_object(gathered, (unfit, own), group=group)
    names = [set(each) for _, each in gathered]
    refused = [*chain(*(each for each, _ in gathered)), *sorted(set.union(*names) - set.intersection(*names))]
    if refused:
        raise ValueError(
            f"{refused[0]} cannot be passed on where ranks share sequences (sp_size): completions of text alone can be cut. "
            "Launch with another configuration, such as that of ZeRO-3."
        )
    device = rows["prompt_ids"].device
    return {name: _joined(name, [each[name] for _, each in gathered]).to(device) for name in rows}


def _can_be_cut(value: Any, widths: set[int]) -> bool:
    return isinstance(value, Tensor) and (value.ndim < 2 or (value.ndim == 2 and value.shape[1] in widths))


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if parts[0].ndim == 0:  # a number about the rows of all ranks, which all have
        return parts[0]
    if parts[0].ndim == 2:
        width = max(part.shape[1] for part in parts)
        value = 1.0 if name == "importance_sampling_ratio" else 0.0  # the ratio of a token without a correction
        left = name.startswith("prompt")
        missing = [width - part.shape[1] for part in parts]
        parts = [pad(part, (n, 0) if left else (0, n), value=value) for part, n in zip(parts, missing, strict=True)]
    return torch.cat(parts)


@contextmanager
def _in_evaluation(model: Any) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


class SharedGenerations:
    """The part of a trainer with which GRPO and RLOO train on completions that ranks share; alone, TRL's own code runs."""

    model: Any
    args: Any
    accelerator: Any
    use_vllm: bool
    _buffered_inputs: Any

    @property
    def _ranks(self) -> int:
        """The ranks that share a sequence."""
        parallelism = self.accelerator.parallelism_config
        return 1 if parallelism is None else int(parallelism.sp_size)

    @property
    def _shares(self) -> bool:
        """Whether ranks share the rows that are scored now: evaluation has whole ones."""
        return self._ranks > 1 and self.model.training

    def get_sp_size(self) -> int:
        """Return 1: the loader has a batch for each step, and none is cut for the ranks."""
        return 1

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return how many completions a step has; the ranks that share one count it once."""
        stock: Any = super()
        return int(stock.get_total_train_batch_size(args)) // self._ranks

    def get_train_dataloader(self) -> Any:
        """Return a loader that gives each rank the prompts of the completions that it generates."""
        stock: Any = super()
        ranks, load = self._ranks, stock._get_dataloader

        def fewer(*, batch_size: int, **options: Any) -> Any:
            return load(batch_size=batch_size // ranks, **options)

        total = self.args.generation_batch_size // ranks
        with temporary_attributes([(self, "_get_dataloader", fewer), (self.args, "generation_batch_size", total)]):
            return stock.get_train_dataloader()

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if not self._shares or self.use_vllm:
            return stock._generate_single_turn(*args, **kwargs)
        with _in_evaluation(self.model):  # in which a rank has whole sequences
            return stock._generate_single_turn(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        stock: Any = super()
        if not self._shares:
            return dict(stock._generate_and_score_completions(inputs))
        group = ulysses_group()
        score = partial(_scores_of_own, self._get_per_token_logps_and_entropies, group)
        with temporary_attribute(self, "_get_per_token_logps_and_entropies", score):
            rows = rows_of_group(stock._generate_and_score_completions(inputs), group)
        if "num_items_in_batch" in rows:  # which TRL divides by the number of all ranks
            rows["num_items_in_batch"] = rows["num_items_in_batch"] * self._ranks
        return rows

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        stock: Any = super()
        before = self._buffered_inputs
        inputs = stock._prepare_inputs(generation_batch)
        if self._shares and self._buffered_inputs is not before:
            # TRL has shuffled the rows, by other random numbers on each rank.
            for value in (value for rows in self._buffered_inputs for value in rows.values()):
                dist.broadcast(value, group_src=0, group=ulysses_group())
        return inputs

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if not self._shares:
            return stock._get_per_token_logps_and_entropies(model, *args, **kwargs)
        with rows_cut_inside(model):
            return stock._get_per_token_logps_and_entropies(model, *args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's loss. Where ranks share sequences (`sp_size`), what TRL gathers for it has each completion once."""
        stock: Any = super()
        if not self._shares:
            return stock.compute_loss(*args, **kwargs)
        gather, ranks, processes = self.accelerator.gather, self._ranks, self.accelerator.num_processes

        def once(tensor: Tensor) -> Tensor:
            return torch.cat(gather(tensor).chunk(processes)[::ranks])

        with temporary_attribute(self.accelerator, "gather", once):
            return stock.compute_loss(*args, **kwargs)


def _scores_of_own(
    score: Any,
    group: dist.ProcessGroup,
    model: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Return the scores of this rank's rows, which all ranks of the group compute together with those of the others."""
    start = input_ids.shape[1] - logits_to_keep
    parts = {"ids": input_ids, "mask": attention_mask}
    own = {f"prompt_{name}": tensor[:, :start] for name, tensor in parts.items()}
    own |= {f"completion_{name}": tensor[:, start:] for name, tensor in parts.items()}
    rows = rows_of_group(own, group, unfit=[name for name, value in options.items() if isinstance(value, Tensor)])
    whole = [torch.cat([rows[f"prompt_{name}"], rows[f"completion_{name}"]], dim=1) for name in parts]
    logprobs, entropies, balance = score(model, *whole, rows["completion_ids"].shape[1], batch_size, **options)
    first = dist.get_rank(group) * len(input_ids)
    scores = (None if each is None else each[first : first + len(input_ids), :logits_to_keep] for each in (logprobs, entropies))
    return *scores, balance
