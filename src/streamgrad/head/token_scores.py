"""Log-probabilities and other scores of given tokens under a linear head, one chunk of logits at a time: four GEMMs a chunk.

    logprobs = token_logprobs(hidden, weight, targets)
    scores = token_scores(hidden, weight, targets, fields=("log_probs", "entropy", "is_top1"))

Any objective on log-probabilities is then a short function of (B, T). Log-probabilities and entropies are differentiable; the
other scores are for metrics and weights, and carry no gradient. Forward keeps the log-sum-exp (and the entropy) of each token;
backward recomputes a chunk's logits and turns them into their own gradient.

Shapes: N tokens, V vocabulary, E model width.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.replay import as_autocast
from streamgrad.engine.shortage import in_head
from streamgrad.head.linear_head import HeadGradients, LinearHead, LogitMap
from streamgrad.head.softmax import product_gradient, token_statistics
from streamgrad.head.targets import TargetRows, check_operands, flatten, refuse_own_operations
from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.autograd import first_order_only, refuse_transforms
from streamgrad.ops.memory_label import labelled, memory_label

# In the order in which `_TokenScores` returns them.
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk_size: int | str = "auto",
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probabilities of `targets` under a linear head without ever holding all logits. Equals

        logits = softcap(logit_scale * (hidden @ weight.T + bias)).float() / temperature
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    of the shape of `targets`; both are 0, without gradient, where the target is `ignore_index`. Returns `logprobs`, or
    `(logprobs, entropy)` with `return_entropy=True`; both are differentiable. `chunk_size` is the number of tokens whose logits
    exist at a time; `"auto"` chooses it by the memory that is free.
    """
    check_operands(hidden, weight, bias)
    scores = token_scores(
        hidden,
        weight,
        targets,
        fields=("log_probs", "entropy") if return_entropy else ("log_probs",),
        bias=bias,
        logit_map=LogitMap.build(logit_scale=logit_scale, softcap=softcap, temperature=temperature),
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
    return (scores["log_probs"], scores["entropy"]) if return_entropy else scores["log_probs"]


def token_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    fields: Sequence[str] = ("log_probs",),
    bias: Tensor | None = None,
    logit_map: LogitMap | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    chunk_size: int | str = "auto",
    limit_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Return scores of `targets` without ever holding all logits `z = logit_map(hidden @ weight.T + bias).float()`.

    With `logp = z.log_softmax(-1)`:

        log_probs         (1 - s) * logp[target] + s * logp.mean(-1), for label_smoothing s (0: the log-probability itself)
        entropy           -(logp.exp() * logp).sum(-1)
        log_sum_sq_probs  (2 * logp).logsumexp(-1), without gradient
        mean_logits       z.mean(-1), without gradient
        is_top1           z.argmax(-1) == target

    Each has the shape of `targets` and is 0 where the target is `ignore_index`. Only `log_probs` and what `fields` names are
    computed. Under autocast the product has autocast's dtype, and the gradients of `weight` and `bias` keep their own.
    `chunk_size` is the number of tokens whose logits exist at a time; "auto" chooses it by the memory that is free, within
    `limit_bytes` for all that the process holds on the device.
    """
    unknown = [field for field in fields if field not in FIELDS]
    if unknown:
        raise ValueError(f"fields must be among {', '.join(FIELDS)}, got {unknown[0]!r}.")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing} must be at least 0 and below 1; 0 leaves it out.")
    refuse_transforms("the streamed head")
    refuse_own_operations(hidden, weight, bias)
    hidden_NE, targets_N = flatten(hidden, weight, targets)
    rows = TargetRows(
        targets_N,
        vocabulary=weight.shape[0],
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        itemsize=as_autocast(hidden_NE[:0]).element_size(),
        limit_bytes=limit_bytes,
    )
    values = _TokenScores.apply(
        as_autocast(hidden_NE), weight, bias, rows, logit_map or LogitMap(), label_smoothing, frozenset(fields)
    )
    return {field: value.view(targets.shape) for field, value in zip(FIELDS, values, strict=True) if value is not None}


class _TokenScores(torch.autograd.Function):
    @staticmethod
    @in_head
    @labelled("token scores")
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        rows: TargetRows,
        logit_map: LogitMap,
        smoothing: float,
        fields: frozenset[str],
    ) -> tuple[Tensor | None, ...]:
        head = LinearHead.like(hidden_NE, weight_VE, bias_V, logit_map)
        lse_N = hidden_NE.new_zeros(len(hidden_NE), dtype=accumulator_dtype(hidden_NE.dtype))
        scores = {field: torch.zeros_like(lse_N) for field in FIELDS if field in fields or field == "log_probs"}
        if "is_top1" in scores:
            scores["is_top1"] = scores["is_top1"].bool()
        with torch.autocast(hidden_NE.device.type, enabled=False):
            for places, targets_N in rows.chunks():
                chunk_lse_N, chunk_scores = _scores_of(
                    head.product(hidden_NE[places]), targets_N, logit_map, smoothing, scores.keys()
                )
                lse_N[places] = chunk_lse_N
                for field, values_N in chunk_scores.items():
                    scores[field][places] = values_N
        ctx.rows, ctx.logit_map, ctx.smoothing = rows, logit_map, smoothing
        # Targets too, so that autograd notices if a program changes its own before backward.
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, lse_N, scores.get("entropy"), rows.targets_N)
        ctx.mark_non_differentiable(*(scores[field] for field in FIELDS[2:] if field in scores))
        # An entropy that is only logged gets no gradient, and then costs nothing in backward.
        ctx.materialize_grads = False
        return tuple(scores.get(field) for field in FIELDS)

    @staticmethod
    @first_order_only
    @in_head
    @labelled("token scores")
    def backward(ctx: Any, dlogprobs_N: Tensor | None, dentropy_N: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, lse_N, entropy_N, _ = ctx.saved_tensors
        if dlogprobs_N is None:
            dlogprobs_N = torch.zeros_like(lse_N)
        head, rows, wants = LinearHead.like(hidden_NE, weight_VE, bias_V, ctx.logit_map), ctx.rows, ctx.needs_input_grad
        gradients = HeadGradients(
            hidden_NE,
            head,
            hidden=wants[0],
            weight=wants[1],
            bias=wants[2],
            skips_rows=rows.skips_some,
            at_once=rows.count <= rows.chunk_size and weight_VE.dtype == hidden_NE.dtype,
        )
        for places, targets_N in rows.chunks():
            chunk_NE = hidden_NE[places]
            entropies = () if dentropy_N is None else (entropy_N[places], dentropy_N[places])
            given = (targets_N, ctx.logit_map, lse_N[places], dlogprobs_N[places], *entropies)
            # No local variable may hold the logits, or they would still exist beside those of the next chunk.
            add = functools.partial(gradients.add, places, chunk_NE)
            with memory_label("logits"):
                if ctx.smoothing:
                    add(_smoothed_gradient(ctx.smoothing, head.product(chunk_NE), *given))
                else:
                    add(product_gradient(head.product(chunk_NE), *given))
        return *gradients.rounded(hidden_NE, weight_VE, bias_V), None, None, None, None


@labelled("logits")
def _scores_of(
    product_NV: Tensor, targets_N: Tensor, logit_map: LogitMap, smoothing: float, fields: Collection[str]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return `(lse, scores)` of one chunk."""
    lse_N, picked_N, entropy_N = token_statistics(product_NV, targets_N, logit_map, with_entropy="entropy" in fields)
    scores = {} if entropy_N is None else {"entropy": entropy_N}
    if "mean_logits" in fields or smoothing:
        mean_N = _mean_logits(product_NV, logit_map)
        if "mean_logits" in fields:
            scores["mean_logits"] = mean_N
        if smoothing:
            picked_N = (1.0 - smoothing) * picked_N + smoothing * mean_N
    if "log_sum_sq_probs" in fields:
        z_NV = logit_map(product_NV.to(lse_N.dtype))
        scores["log_sum_sq_probs"] = (2.0 * z_NV).logsumexp(dim=-1) - 2.0 * lse_N
    if "is_top1" in fields:
        # The map is increasing, so the largest product is the largest logit; argmax takes the first of equal ones.
        scores["is_top1"] = product_NV.argmax(dim=-1) == targets_N
    return lse_N, scores | {"log_probs": picked_N - lse_N}


def _mean_logits(product_NV: Tensor, logit_map: LogitMap) -> Tensor:
    dtype = accumulator_dtype(product_NV.dtype)
    if logit_map.tanh:
        return logit_map(product_NV.to(dtype)).mean(dim=-1)
    return logit_map.scale * product_NV.mean(dim=-1, dtype=dtype)


def _smoothed_gradient(
    smoothing: float,
    product_NV: Tensor,
    targets_N: Tensor,
    logit_map: LogitMap,
    lse_N: Tensor,
    dlogprobs_N: Tensor,
    *entropies: Tensor,
) -> Tensor:
    """Return `product_gradient` with label smoothing s: d(log_probs)/dz = (onehot - p) + s (1 / V - onehot)."""
    z_NV = product_NV.to(lse_N.dtype, copy=True)
    slope_NV = logit_map.apply_(z_NV, with_slope=True)[1]
    gradient_NV = product_gradient(product_NV, targets_N, logit_map, lse_N, dlogprobs_N, *entropies)
    moved_N1 = (smoothing * dlogprobs_N).unsqueeze(1)
    moved_NV = z_NV.copy_(moved_N1 / z_NV.shape[1]).scatter_add_(1, targets_N.unsqueeze(1), -moved_N1)
    return gradient_NV.add_(moved_NV.mul_(logit_map.scale if slope_NV is None else slope_NV))
