"""Batches as people have them. Each kind is a function from a model to the keyword arguments of its forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tiny import tokens

LENGTH = 23


def _lengths_mask(lengths: list[int], *, left: bool) -> Tensor:
    mask = torch.zeros(len(lengths), LENGTH, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, LENGTH - length if left else 0 : LENGTH if left else length] = 1
    return mask


def labelled(length: int, rows: int = 1) -> dict:
    """Rows of one length, all of whose tokens are labels."""
    ids = tokens(rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def plain(model) -> dict:
    ids = tokens(2, LENGTH)
    return {"input_ids": ids, "labels": ids.clone()}


def right_padded(model) -> dict:
    ids, mask = tokens(3, LENGTH), _lengths_mask([23, 11, 4], left=False)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def left_padded(model) -> dict:
    ids, mask = tokens(3, LENGTH), _lengths_mask([23, 11, 4], left=True)
    labels = ids.masked_fill(mask == 0, -100)
    first_real = mask.argmax(dim=1)
    labels[torch.arange(3), first_real] = -100  # it would be predicted from padding
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def dense_mask(model) -> dict:
    """A 4-D mask: causal, and every token blind to two random earlier ones."""
    ids = tokens(2, LENGTH)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(visible.shape, generator=generator) < 0.15
    visible &= ~hidden | torch.eye(LENGTH, dtype=torch.bool)
    dtype = next(model.parameters()).dtype
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)
    return {"input_ids": ids, "attention_mask": bias, "labels": ids.clone()}


def packed(model) -> dict:
    """Three documents in one row and two in the other, told apart by position_ids that restart.

    use_cache=False is for the stock model, which sees packing only where it makes no cache.
    """
    ids = tokens(2, LENGTH)
    positions = torch.stack([_restarting([9, 1, 13]), _restarting([4, 19])])
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100), "use_cache": False}


def packed_flat(model) -> dict:
    """What DataCollatorWithFlattening makes with return_flash_attn_kwargs and return_seq_idx: one row, and the boundaries."""
    ids, positions = tokens(1, LENGTH), _restarting([9, 1, 13]).unsqueeze(0)
    ends = torch.tensor([0, 9, 10, 23], dtype=torch.int32)
    documents = torch.tensor([0] * 9 + [1] + [2] * 13, dtype=torch.int32).unsqueeze(0)
    return {
        "input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100),
        "use_cache": False, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 13, "max_length_k": 13,
        "seq_idx": documents,
    }  # fmt: skip


def _restarting(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def embedded(model) -> dict:
    generator = torch.Generator().manual_seed(2)
    dtype = next(model.parameters()).dtype
    embeds = torch.randn(2, LENGTH, model.config.hidden_size, generator=generator).to(dtype)
    return {"inputs_embeds": embeds, "labels": tokens(2, LENGTH)}


def prompt_masked(model) -> dict:
    """A long prompt (several chunks without a label) and an answer."""
    batch = plain(model)
    batch["labels"][:, :17] = -100
    return batch


def multi_turn(model) -> dict:
    batch = plain(model)
    batch["labels"][:, :4] = batch["labels"][:, 9:15] = batch["labels"][0, 20:] = -100
    return batch


def counted(model) -> dict:
    """One micro-batch of a gradient-accumulation window: the loss is a sum over all its tokens."""
    return right_padded(model) | {"num_items_in_batch": torch.tensor(77)}


def single_token(model) -> dict:
    ids = tokens(2, 1)
    return {"input_ids": ids, "labels": ids.clone(), "num_items_in_batch": 1}


def unlabelled(model) -> dict:
    batch = plain(model)
    batch["labels"][:] = -100
    return batch


KINDS: dict[str, Callable] = {
    kind.__name__: kind
    for kind in (
        plain, right_padded, left_padded, dense_mask, packed, packed_flat, embedded,
        prompt_masked, multi_turn, counted, single_token, unlabelled,
    )
}  # fmt: skip
