"""Divergence between a student's and a teacher's next-token distributions, both of linear heads, one chunk of logits at a time.

    loss = linear_divergence(student_hidden, student_weight, teacher_hidden, teacher_weight, kind="jsd").mean()

Forward makes a chunk of both logits and keeps none; backward makes them again and turns them into the gradient of the student's:
six GEMMs a chunk.

Shapes: N tokens, V vocabulary, E model width, which may be another one for the teacher.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.replay import as_autocast
from streamgrad.engine.shortage import in_head
from streamgrad.head.linear_head import HeadGradients, LinearHead, LogitMap
from streamgrad.head.targets import IGNORED, TargetRows, check_operands, flatten, refuse_own_operations
from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.autograd import first_order_only, refuse_transforms
from streamgrad.ops.memory_label import labelled

_BETAS = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}


def linear_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    kind: str = "forward_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    chunk_size: int | str = "auto",
) -> Tensor:
    """Return the divergence of each token's two distributions without ever holding all logits of either model. With

        p = softmax((student_hidden @ student_weight.T + student_bias).float() / temperature)
        q = softmax((teacher_hidden @ teacher_weight.T + teacher_bias).float() / temperature)
        m = beta q + (1 - beta) p

    it is the sum over the vocabulary of

        forward_kl   q (log q - log p)
        reverse_kl   p (log p - log q)
        jsd          beta q (log q - log m) + (1 - beta) p (log p - log m)      (arXiv 2306.13649; beta is 0.5 unless given)

    in the shape (...) of the hidden states (..., E), and 0 without a gradient where `mask` is false. Gradients are those of the
    student; a teacher that needs one is refused. Multiply a family's logit scale into the hidden states; a softcap has no place
    here. `chunk_size` is the number of tokens whose logits exist at a time; `"auto"` chooses it by the memory that is free.
    """
    share = teacher_share(kind, beta)
    refuse_transforms("the streamed head")
    for hidden, weight, bias in ((student_hidden, student_weight, student_bias), (teacher_hidden, teacher_weight, teacher_bias)):
        check_operands(hidden, weight, bias)
        refuse_own_operations(hidden, weight, bias)
    _check_teacher(student_weight, teacher_hidden, teacher_weight, teacher_bias)
    kept = kept_tokens(student_hidden, mask)
    student_NE, kept_N = flatten(student_hidden, student_weight, kept)
    teacher_NE, _ = flatten(teacher_hidden, teacher_weight, kept)
    student_NE, teacher_NE = as_autocast(student_NE), as_autocast(teacher_NE)
    rows = TargetRows(
        kept_N,
        vocabulary=student_weight.shape[0],
        ignore_index=IGNORED,
        chunk_size=chunk_size,
        itemsize=2 * accumulator_dtype(student_NE.dtype).itemsize,
    )
    logit_map = LogitMap.build(temperature=temperature)
    student, teacher = (student_NE, student_weight, student_bias), (teacher_NE, teacher_weight, teacher_bias)
    return _LinearDivergence.apply(*student, *teacher, logit_map, rows, share).view(kept.shape)


def teacher_share(kind: str, beta: float | None) -> float:
    """Return the teacher's share of the mixture, whose limits 0 and 1 stand for the two KL divergences."""
    if kind not in _BETAS:
        raise ValueError(f"kind must be one of {', '.join(_BETAS)}, got {kind!r}.")
    if beta is not None and (kind != "jsd" or not 0.0 < beta < 1.0):
        raise ValueError(
            f"beta={beta} with kind={kind!r}: beta is for jsd alone, and between 0 and 1. For its limits pass kind='forward_kl' "
            "or 'reverse_kl', without beta."
        )
    return _BETAS[kind] if beta is None else beta


def _check_teacher(student_weight: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if len(student_weight) != len(weight):
        raise ValueError(
            f"the student's vocabulary has {len(student_weight)} tokens and the teacher's {len(weight)}. Pass models with one "
            "tokenizer, and cut off the rows that only pad a weight."
        )
    for name, tensor in (("teacher_hidden", hidden), ("teacher_weight", weight), ("teacher_bias", bias)):
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} needs a gradient, and only the student's is computed. Pass {name}.detach().")


def kept_tokens(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Return, in place of targets, 0 for the tokens that count and `IGNORED` for the others."""
    kept = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    if mask is None:
        return kept
    if mask.shape != kept.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)}. Pass one entry per token, of shape {tuple(kept.shape)}.")
    return kept.masked_fill_(mask.to(kept.device) == 0, IGNORED)


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    @in_head
    @labelled("token scores")
    def forward(
        ctx: Any,
        student_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        teacher_NE: Tensor,
        teacher_weight_VE: Tensor,
        teacher_bias_V: Tensor | None,
        logit_map: LogitMap,
        rows: TargetRows,
        beta: float,
    ) -> Tensor:
        ctx.materialize_grads = False
        student = LinearHead.like(student_NE, weight_VE, bias_V, logit_map)
        teacher = LinearHead.like(teacher_NE, teacher_weight_VE, teacher_bias_V, logit_map)
        divergence_N = student_NE.new_zeros(len(student_NE), dtype=accumulator_dtype(student_NE.dtype))
        with torch.autocast(student_NE.device.type, enabled=False):
            for places, _ in rows.chunks():
                divergence_N[places] = _divergence(student, student_NE[places], teacher, teacher_NE[places], beta)
        ctx.logit_map, ctx.rows, ctx.beta = logit_map, rows, beta
        ctx.save_for_backward(student_NE, weight_VE, bias_V, teacher_NE, teacher_weight_VE, teacher_bias_V)
        return divergence_N

    @staticmethod
    @first_order_only
    @in_head
    @labelled("token scores")
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor | None, ...]:
        student_NE, weight_VE, bias_V, teacher_NE, teacher_weight_VE, teacher_bias_V = ctx.saved_tensors
        rows, (hidden, weight, bias, *_) = ctx.rows, ctx.needs_input_grad
        student = LinearHead.like(student_NE, weight_VE, bias_V, ctx.logit_map)
        teacher = LinearHead.like(teacher_NE, teacher_weight_VE, teacher_bias_V, ctx.logit_map)
        gradients = HeadGradients(student_NE, student, hidden=hidden, weight=weight, bias=bias, skips_rows=rows.skips_some)
        for places, _ in rows.chunks():
            chunk_NE = student_NE[places]
            # No local variable may hold the gradient of the logits, or it would still exist beside that of the next chunk.
            gradients.add(
                places,
                chunk_NE,
                _product_gradient(student, chunk_NE, teacher, teacher_NE[places], ctx.beta, upstream_N[places]),
            )
        return *gradients.rounded(student_NE, weight_VE, bias_V), None, None, None, None, None, None


@labelled("logits")
def log_probs(head: LinearHead, hidden_NE: Tensor) -> Tensor:
    """Return one chunk's log-probabilities of all tokens, a fresh tensor that the caller may overwrite."""
    z_NV = head.logit_map(head.product(hidden_NE).to(accumulator_dtype(hidden_NE.dtype)))
    return z_NV.sub_(z_NV.logsumexp(dim=-1, keepdim=True))


@labelled("logits")
def _divergence(student: LinearHead, student_NE: Tensor, teacher: LinearHead, teacher_NE: Tensor, share: float) -> Tensor:
    """Return one chunk's divergences."""
    return divergence_of(log_probs(student, student_NE), log_probs(teacher, teacher_NE), share)


def divergence_of(logp_NV: Tensor, logq_NV: Tensor, share: float) -> Tensor:
    """Return the divergence of each row, from the log-probabilities of student and teacher, which has `share` of the mixture."""
    if share == 0.0:
        return _kl(logq_NV, logp_NV)
    if share == 1.0:
        return _kl(logp_NV, logq_NV)
    logm_NV = log_mixture(logp_NV, logq_NV, share)
    return share * _kl(logq_NV, logm_NV) + (1.0 - share) * _kl(logp_NV, logm_NV)


@labelled("logits")
def _product_gradient(
    student: LinearHead, student_NE: Tensor, teacher: LinearHead, teacher_NE: Tensor, beta: float, upstream_N: Tensor
) -> Tensor:
    """Return d(loss)/d(student's product) of one chunk. With logits z of p = softmax(z) and the divergence D:

    forward_kl   dD/dz = p - q
    otherwise    dD/dz = p (g - sum(p g))          g = log p - log q, or (1 - beta) (log p - log m)
    """
    logp_NV, logq_NV = log_probs(student, student_NE), log_probs(teacher, teacher_NE)
    if beta == 0.0:
        gradient_NV = logp_NV.exp_().sub_(logq_NV.exp_())
    else:
        other_NV = logq_NV if beta == 1.0 else log_mixture(logp_NV, logq_NV, beta)
        gap_NV = torch.sub(logp_NV, other_NV, out=other_NV)
        if beta != 1.0:
            gap_NV.mul_(1.0 - beta)
        p_NV = logp_NV.exp_()
        gradient_NV = gap_NV.sub_((p_NV * gap_NV).sum(dim=-1, keepdim=True)).mul_(p_NV)
    return gradient_NV.mul_(upstream_N.unsqueeze(1) * student.logit_map.scale).to(student_NE.dtype)


def _kl(loga_NV: Tensor, logb_NV: Tensor) -> Tensor:
    return (loga_NV - logb_NV).mul_(loga_NV.exp()).sum(dim=-1)


def log_mixture(logp_NV: Tensor, logq_NV: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(logp_NV + math.log1p(-beta), logq_NV + math.log(beta))
