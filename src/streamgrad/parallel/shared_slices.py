"""Rows that begin alike, of which each beginning is computed once, where the ranks of a group share the row that is made of them.

    shared = share_prefixes(input_ids, attention_mask, completion_mask)             whole rows, the same on every rank
    own = shared_slice(shared, group)
    logprobs = own.unshared(token_logprobs(own.hidden_states(model), weight, own.targets))     (B, T - 1), on every rank

Shapes: B rows of the batch, T their length, M scored tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from streamgrad.attention.trees import Tree
from streamgrad.head.targets import IGNORED
from streamgrad.hf.shared_prefixes import SharedBatch
from streamgrad.parallel.sequence import whole_sequence


@dataclass(frozen=True, eq=False)
class SharedSlice(SharedBatch):
    """What `shared_slice` returns: a rank's slice of the shared row, with the targets that its tokens predict.

    Ranks that predict fewer targets than others have some of -100 at the end.

    Args:
        whole: the batch that is shared.
        group: the ranks that have its slices.
        order: (M,), where each target of `whole` is among those of all ranks, one rank's after the other's.
    """

    whole: SharedBatch
    group: dist.ProcessGroup
    order: Tensor

    def unshared(self, scores: Tensor, fill: float = 0.0) -> Tensor:
        """Return the scores of all ranks, of which `scores` are this rank's, as (B, T - 1), where separate rows would have them.

        Every rank gets them all, and the gradient of the sum of all ranks' losses: average over ranks, as for `whole_sequence`.
        """
        if scores.shape[:2] != self.targets.shape:
            raise ValueError(f"scores have shape {tuple(scores.shape)}. Pass one for each target: {tuple(self.targets.shape)}.")
        return self.whole.unshared(whole_sequence(scores, self.group).index_select(1, self.order.to(scores.device)), fill)


def shared_slice(shared: SharedBatch, group: dist.ProcessGroup) -> SharedSlice:
    """Return this rank's slice of a shared row, for a model whose sequences the ranks of `group` share (`sequence_parallel`)."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    tree = shared.tree
    length = -(-tree.length // ranks)
    if padding := ranks * length - tree.length:  # a tree of its own, which no token of the others sees
        tree = Tree((*tree.ends, ranks * length), (*tree.parents, -1))
    owner_M = shared.places // length
    most = max(1, int(owner_M.bincount(minlength=ranks).max()))
    order_M = torch.empty_like(owner_M)
    for each in range(ranks):
        found = (owner_M == each).nonzero().flatten()
        order_M[found] = each * most + torch.arange(len(found), device=found.device)
    own = (owner_M == rank).nonzero().flatten()
    missing = most - len(own)

    def cut(tensor_1N: Tensor) -> Tensor:
        return pad(tensor_1N, (0, padding)).chunk(ranks, dim=1)[rank].contiguous()

    return SharedSlice(
        input_ids=cut(shared.input_ids),
        position_ids=cut(shared.position_ids),
        targets=pad(shared.targets[:, own], (0, missing), value=IGNORED),
        tree=tree,
        mask=shared.mask,
        places=pad(shared.places[own] - rank * length, (0, missing)),
        slots=shared.slots,
        tokens=shared.tokens,
        moved=shared.moved,
        whole=shared,
        group=group,
        order=order_M,
    )
