"""Sequence parallelism: the ranks of a group share every sequence, each with a contiguous slice of its tokens.

    streamgrad.enable(model)
    streamgrad.parallel.sequence_parallel(model, group)
    loss = model(input_ids=ids_BT, position_ids=positions_BT, labels=targets_BT, shift_labels=targets_BT).loss  # slices
    streamgrad.parallel.sequence_loss(loss, targets_BT, group).backward()

A loss that is no mean over tokens, such as DPO's, is computed from the scores of whole sequences, by every rank:

    logprobs_BT = whole_sequence(streamgrad.token_logprobs(hidden_BTE, weight, targets_BT), group)

`engine.ulysses` and `engine.ring` have the equations, `hf.sequence_slices` what happens to a call of the model.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _world

from streamgrad.engine.ulysses import Ulysses
from streamgrad.hf.discover import unwrap
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.sequence_slices import SequenceGroup, check_heads
from streamgrad.memory.traffic import check_ring

ModelT = TypeVar("ModelT")


def sequence_parallel(model: ModelT, group: dist.ProcessGroup | None, *, ring: int = 1, in_evaluation: bool = False) -> ModelT:
    """Let the ranks of `group` share every sequence that the enabled `model` is given in training mode.

    With `in_evaluation`, they share it in evaluation mode too, as a reference model needs it that scores the policy's slices.

    Each rank passes its slice of `input_ids` (or `inputs_embeds`), `position_ids`, `attention_mask` and `shift_labels`, in the
    order of the group's ranks, and gets the hidden states, logits and loss of its slice:

        model(slice r) on every rank r   =   slice r of model(the whole sequence)

    Backward gives each rank its part of the gradient of the sum of all ranks' losses: the SUM over ranks is the gradient. Engines
    that average need `sequence_loss`. A model without a group uses the one that Accelerate's `sp_size` makes, and need not call
    this. `None` removes the model from its group. Returns `model`.

    Args:
        ring: how many ranks have the same heads. The P ranks of the group are `ring` groups of P / ring consecutive ones, which
            trade tokens for heads, so P / ring divides the number of attention heads. Ranks with the same heads gather each
            other's keys and values. With 1, all ranks trade heads; with P, none do. Every rank must call this at the same time,
            as it makes process groups.
    """
    inner = unwrap(model)
    installed = InstalledForward.on(inner.get_decoder())
    if installed is None:
        raise ValueError(f"{type(inner).__name__} is not enabled. Call streamgrad.enable(model) before sequence_parallel.")
    if group is None:
        installed.stream.group = None
        return model
    _check_ring(ring, group)
    check_heads(inner.config, dist.get_world_size(group), ring)
    installed.stream.group = SequenceGroup.with_ring(group, ring, in_evaluation=in_evaluation)
    return model


def _check_ring(ring: int, group: dist.ProcessGroup) -> None:
    """Raise on all ranks if one was given a ring that cannot be, or another one: they would wait for each other's groups."""
    ranks = dist.get_process_group_ranks(group)
    gathered = [(1, 0) for _ in ranks]
    dist.all_gather_object(gathered, (ring, len(_world.pg_names)), group=group)
    rings, groups = (list(values) for values in zip(*gathered, strict=True))
    if len(set(rings)) > 1:
        raise ValueError(f"the ranks that share a sequence disagree about ring: {rings}, from the first rank to the last.")
    check_ring(ring, len(ranks))
    if ring > 1 and ranks != sorted(ranks):
        raise ValueError(f"ring={ring} needs a group whose ranks are in increasing order, not {ranks}.")
    if ring > 1 and len(set(groups)) > 1:  # torch names a new group by this number
        raise ValueError(
            f"ring={ring} makes process groups, which needs ranks that are in equally many: they are in {groups}, from the first "
            "rank to the last. Call sequence_parallel before you make groups that only some of these ranks are in."
        )


def sequence_loss(loss: Tensor, targets: Tensor, group: dist.ProcessGroup, *, ignore_index: int = -100) -> Tensor:
    """Return the mean over the targets of a whole sequence, on every rank, from the model's means over slices:

        sum_r count_r loss_r / sum_r count_r          count_r: targets of rank r that are not `ignore_index`

    Its gradient is scaled so that the AVERAGE over ranks, which DDP, FSDP and DeepSpeed take, is the gradient of this mean.
    `loss` may be NaN on a rank without targets, as a mean over nothing is.
    """
    count = (targets != ignore_index).sum().to(loss.device)
    wide = loss.to(torch.promote_types(loss.dtype, torch.float32))  # 16 bits cannot count a long sequence
    totals = torch.stack([torch.where(count > 0, wide.detach() * count, 0.0), count.to(wide.dtype)])
    dist.all_reduce(totals, group=group)
    total, counts = totals.unbind(0)
    own = torch.where(count > 0, wide, 0.0) * (dist.get_world_size(group) * count / counts)
    return (own + (total / counts - own).detach()).to(loss.dtype)


def whole_sequence(scores: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the scores of all tokens, (batch, tokens, ...), on every rank, from those of each rank's slice. Equals

        torch.cat([the scores of rank 0, the scores of rank 1, ...], dim=1)

    Backward gives each rank's scores the gradient of the sum of all ranks' losses. Where every rank computes the same loss of
    whole sequences, such as `dpo_loss`, the AVERAGE over ranks, which DDP, FSDP and DeepSpeed take, is its gradient.
    """
    slices = Ulysses(group, scores.shape[1], scores.shape[1], scores.device)
    slices.check_agreement({"batch size": scores.shape[0], "tokens of a slice": scores.shape[1]})
    return slices.joined(scores.byte() if scores.dtype == torch.bool else scores).to(scores.dtype)
