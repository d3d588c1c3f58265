"""One weight in both of its uses, embeddings and head, with one gradient.

    embedded, weight_of_head = weight[ids], weight

Autograd alone makes a gradient of each use, both as large as the vocabulary, and adds them at the end of backward, where all
other gradients are there too. Here the head's gradient waits until that of the embeddings arrives, which is added to it in blocks
of the vocabulary.

Shapes: V vocabulary, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.checks.guards import check_versions
from streamgrad.memory.costs import tied_block_rows
from streamgrad.ops.autograd import Function
from streamgrad.ops.memory_label import labelled


def embedded_with_tied_weight(ids: Tensor, weight_VE: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor]:
    """Return `F.embedding(ids, weight, padding_idx)`, and the weight for a head to multiply with.

    Where backward reaches only one of the two, the weight's gradient is that one's.
    """
    # F.embedding counts negative indices from the end; what it calls takes -1 for none.
    padding = -1 if padding_idx is None else padding_idx % len(weight_VE)
    embedded, weight_of_head = _Tied.apply(ids, weight_VE, padding)
    return embedded, weight_of_head


class _Tied(Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight_VE: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        # For checkpointing, which counts what is saved. Backward reads another reference: a program may run it through the one
        # output and later through the other, whose graphs were apart without this node.
        ctx.save_for_backward(ids)
        ctx.ids, ctx.version = ids, ids._version
        ctx.padding, ctx.vocabulary = padding, len(weight_VE)
        ctx.materialize_grads = False
        return torch.embedding(weight_VE, ids), weight_VE.detach()

    @staticmethod
    @labelled("gradients")
    def backward(ctx: Any, dembedded: Tensor | None, dhead_VE: Tensor | None) -> tuple[None, Tensor | None, None]:
        ids = ctx.ids
        if dembedded is None:
            return None, dhead_VE, None
        check_versions([ids], [ctx.version], "the embeddings")
        if dhead_VE is None:
            return None, _rows_gradient(dembedded, ids, ctx.vocabulary, ctx.padding), None
        block = tied_block_rows(ctx.vocabulary, dhead_VE.shape[1], dhead_VE.element_size())
        for first in range(0, ctx.vocabulary, block):
            # Streamed heads return a gradient that nobody else has, and none that can be differentiated; so it may be changed.
            total = dhead_VE[first : first + block]
            outside = (ids < first) | (ids >= first + len(total)) | (ids == ctx.padding)
            places = (ids - first).masked_fill_(outside, len(total))
            total += _rows_gradient(dembedded, places, len(total) + 1, len(total))[:-1]
        return None, dhead_VE, None


def _rows_gradient(dembedded: Tensor, ids: Tensor, rows: int, padding: int) -> Tensor:
    """Return what the embeddings of `rows` ids get; the row `padding` gets nothing."""
    return torch.ops.aten.embedding_dense_backward(dembedded, ids, rows, padding, False)
