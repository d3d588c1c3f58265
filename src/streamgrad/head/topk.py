"""Divergence of a student from the likeliest tokens of a teacher, which may come from a file or a server.

    logprobs, indices = linear_topk(teacher_hidden, teacher_weight, 32)
    loss = linear_topk_divergence(student_hidden, student_weight, logprobs, indices, kind="jsd").mean()

Only K log-probabilities per token leave a chunk of logits. What is computed from them is small and left to autograd.

Shapes: N tokens, V vocabulary, E model width, K tokens of the teacher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.replay import as_autocast
from streamgrad.engine.shortage import in_head
from streamgrad.head.divergence import divergence_of, kept_tokens, log_probs, teacher_share
from streamgrad.head.linear_head import HeadGradients, LinearHead, LogitMap
from streamgrad.head.targets import IGNORED, TargetRows, check_operands, flatten, refuse_own_operations
from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.autograd import first_order_only, refuse_transforms
from streamgrad.ops.memory_label import labelled

# Stands for the logarithm of 0: its exponential is 0, and differences of two of them are no NaN.
_NOTHING = -1e30
# The most that the K tokens have of the logarithm of all probability, so that the others have some: TRL's number.
_MOST = -1e-7


@torch.no_grad()
def linear_topk(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    chunk_size: int | str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return each token's `k` largest log-probabilities under a linear head, and whose they are, without holding all logits:

        (hidden @ weight.T + bias).float().div(temperature).log_softmax(-1).topk(k)

    Both are (..., k) and have no gradient; where `mask` is false they are 0. `chunk_size` is as for `linear_divergence`.
    """
    if not 1 <= k <= len(weight):
        raise ValueError(f"k must be from 1 to the {len(weight)} tokens of the vocabulary, got {k}.")
    hidden_NE, rows, shape = _rows(hidden, weight, bias, mask, chunk_size)
    head = LinearHead.like(hidden_NE, weight, bias, LogitMap.build(temperature=temperature))
    logprobs_NK = hidden_NE.new_zeros(len(hidden_NE), k, dtype=accumulator_dtype(hidden_NE.dtype))
    indices_NK = torch.zeros(logprobs_NK.shape, dtype=torch.int64, device=hidden.device)
    with torch.autocast(hidden_NE.device.type, enabled=False):
        for places, _ in rows.chunks():
            logprobs_NK[places], indices_NK[places] = log_probs(head, hidden_NE[places]).topk(k, dim=-1)
    return logprobs_NK.view(*shape, k), indices_NK.view(*shape, k)


def linear_topk_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_logprobs: Tensor,
    teacher_indices: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    add_tail: bool = True,
    mask: Tensor | None = None,
    student_bias: Tensor | None = None,
    chunk_size: int | str = "auto",
) -> Tensor:
    """Return the divergence of each token's student from K log-probabilities of a teacher, without holding all logits.

    `teacher_indices` (..., K) are the tokens of `teacher_logprobs` (..., K), in any order; -inf stands for a missing one. The
    student's log-probabilities are those of the same K tokens, at `temperature`.

    With `add_tail=True`, the rest of the vocabulary counts as one more token, for teacher and student. Otherwise it is left out,
    and the K probabilities of each are divided by their sum. TRL's distillation from a server does the same. `kind`, `beta`,
    `mask` and `chunk_size` are as for `linear_divergence`. Only the student gets gradients.
    """
    share = teacher_share(kind, beta)
    if teacher_logprobs.requires_grad and torch.is_grad_enabled():
        raise ValueError("teacher_logprobs needs a gradient, and only the student's is computed. Pass teacher_logprobs.detach().")
    hidden_NE, rows, shape = _rows(student_hidden, student_weight, student_bias, mask, chunk_size)
    indices_NK = _checked_indices(teacher_logprobs, teacher_indices, shape, len(student_weight)).to(hidden_NE.device)
    logit_map = LogitMap.build(temperature=temperature)
    logp_NK = _LogProbsOf.apply(hidden_NE, student_weight, student_bias, indices_NK, logit_map, rows)
    logq_NK = teacher_logprobs.reshape(indices_NK.shape).to(logp_NK)
    there_NK = logq_NK > -torch.inf
    logp_NK, logq_NK = (torch.where(there_NK, log_NK, _NOTHING) for log_NK in (logp_NK, logq_NK))
    complete = _with_tail if add_tail else torch.log_softmax
    divergence_N = divergence_of(complete(logp_NK, dim=-1), complete(logq_NK, dim=-1), share).view(shape)
    return divergence_N if mask is None else torch.where(mask.to(divergence_N.device) != 0, divergence_N, 0.0)


def _rows(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, mask: Tensor | None, chunk_size: int | str
) -> tuple[Tensor, TargetRows, torch.Size]:
    """Return the hidden states (N, E), the chunks of those that count, and the shape of the tokens."""
    refuse_transforms("the streamed head")
    check_operands(hidden, weight, bias)
    refuse_own_operations(hidden, weight, bias)
    kept = kept_tokens(hidden, mask)
    hidden_NE, kept_N = flatten(hidden, weight, kept)
    hidden_NE = as_autocast(hidden_NE)
    rows = TargetRows(
        kept_N,
        vocabulary=len(weight),
        ignore_index=IGNORED,
        chunk_size=chunk_size,
        itemsize=accumulator_dtype(hidden_NE.dtype).itemsize,
    )
    return hidden_NE, rows, kept.shape


def _checked_indices(logprobs: Tensor, indices: Tensor, shape: torch.Size, vocabulary: int) -> Tensor:
    if logprobs.shape != indices.shape or logprobs.shape[:-1] != shape or logprobs.shape[-1] < 1:
        raise ValueError(
            f"teacher_logprobs has shape {tuple(logprobs.shape)} and teacher_indices {tuple(indices.shape)}. Pass both as "
            f"({', '.join(map(str, shape))}, K), K tokens for each of the student's."
        )
    if indices.numel():
        low, high = torch.stack(indices.aminmax()).tolist()
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"teacher_indices has the token {low if low < 0 else high}, outside the student's vocabulary of {vocabulary}. "
                "Pass models with one tokenizer; a missing one is 0 with a log-probability of -inf."
            )
    return indices.reshape(-1, indices.shape[-1]).long()


def _with_tail(log_NK: Tensor, dim: int) -> Tensor:
    """Return the log-probabilities and, behind them, that of all other tokens together."""
    known_N1 = log_NK.logsumexp(dim, keepdim=True).clamp(max=_MOST)
    return torch.cat([log_NK, torch.log(-torch.expm1(known_N1))], dim)


class _LogProbsOf(torch.autograd.Function):
    """Log-probabilities of K tokens for each position: four GEMMs a chunk. With logits z of p = softmax(z) and upstream u:

    dz = u at the K tokens - p sum(u)
    """

    @staticmethod
    @in_head
    @labelled("token scores")
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        indices_NK: Tensor,
        logit_map: LogitMap,
        rows: TargetRows,
    ) -> Tensor:
        ctx.materialize_grads = False
        head = LinearHead.like(hidden_NE, weight_VE, bias_V, logit_map)
        logprobs_NK = hidden_NE.new_zeros(indices_NK.shape, dtype=accumulator_dtype(hidden_NE.dtype))
        with torch.autocast(hidden_NE.device.type, enabled=False):
            for places, _ in rows.chunks():
                logprobs_NK[places] = log_probs(head, hidden_NE[places]).gather(-1, indices_NK[places])
        ctx.logit_map, ctx.rows = logit_map, rows
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, indices_NK)
        return logprobs_NK

    @staticmethod
    @first_order_only
    @in_head
    @labelled("token scores")
    def backward(ctx: Any, upstream_NK: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, indices_NK = ctx.saved_tensors
        rows, (hidden, weight, bias, *_) = ctx.rows, ctx.needs_input_grad
        head = LinearHead.like(hidden_NE, weight_VE, bias_V, ctx.logit_map)
        gradients = HeadGradients(hidden_NE, head, hidden=hidden, weight=weight, bias=bias, skips_rows=rows.skips_some)
        for places, _ in rows.chunks():
            chunk_NE = hidden_NE[places]
            # No local variable may hold the gradient of the logits, or it would still exist beside that of the next chunk.
            gradients.add(places, chunk_NE, _product_gradient(head, chunk_NE, indices_NK[places], upstream_NK[places]))
        return *gradients.rounded(hidden_NE, weight_VE, bias_V), None, None, None


@labelled("logits")
def _product_gradient(head: LinearHead, hidden_NE: Tensor, indices_NK: Tensor, upstream_NK: Tensor) -> Tensor:
    upstream_NK = upstream_NK * head.logit_map.scale
    gradient_NV = log_probs(head, hidden_NE).exp_().mul_(-upstream_NK.sum(dim=-1, keepdim=True))
    return gradient_NV.scatter_add_(-1, indices_NK, upstream_NK).to(hidden_NE.dtype)
