"""Cross entropy of a linear head in one pass: three GEMMs a chunk, and never more than one chunk of logits.

The gradient is linear in the upstream gradient. So forward chooses an upstream gradient and turns each chunk's logits into their
own gradient in place, while they exist; backward only scales.

The chosen value is the mantissa m of `1 / divisor = m 2^k`, where the caller will divide the sum by `divisor`. It is of order 1,
so that fp16 can hold the kept gradients, while those of a mean would underflow; and backward multiplies by a power of two, which
rounds nothing. Only an upstream gradient that is no power of two rounds the gradient of 16-bit hidden states once more.

Shapes: N tokens, V vocabulary, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.replay import as_autocast
from streamgrad.engine.shortage import in_head
from streamgrad.head.linear_head import GRADIENT_LABELS, HeadGradients, LinearHead, LogitMap
from streamgrad.head.softmax import product_gradient, token_statistics
from streamgrad.head.targets import TargetRows, check_operands, flatten, refuse_own_operations
from streamgrad.ops.accumulate import accumulator_dtype, scaled
from streamgrad.ops.autograd import first_order_only, refuse_transforms
from streamgrad.ops.memory_label import labelled, memory_label


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    logit_scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    chunk_size: int | str = "auto",
) -> Tensor:
    """Return the cross entropy of a linear head without ever holding all logits. Equals

        logits = softcap(logit_scale * (hidden @ weight.T + bias)).float() / temperature
        torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=..., reduction=...)

    `softcap(z) = softcap * tanh(z / softcap)` if given. `reduction` is "mean" or "sum". Targets are used as they are: shift them
    yourself for next-token prediction. With no target at all the mean is NaN and the gradients are zero, as in torch.
    Arithmetic after the product is fp32, or fp64 for fp64 operands. `chunk_size` is the number of tokens whose logits exist at a
    time; `"auto"` chooses it by the memory that is free.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}. For single terms, call token_logprobs.')
    check_operands(hidden, weight, bias)
    logit_map = LogitMap.build(logit_scale=logit_scale, softcap=softcap, temperature=temperature)
    hidden_NE, targets_N = flatten(hidden, weight, targets)
    rows = TargetRows(
        targets_N,
        vocabulary=weight.shape[0],
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        itemsize=as_autocast(hidden_NE[:0]).element_size(),
    )
    divisor = 1 if reduction == "sum" else None
    total, count = summed_cross_entropy(hidden_NE, weight, bias, rows, logit_map, divisor=divisor)
    return total if reduction == "sum" else quotient(total, count)


def quotient(total: Tensor, count: int, divisor: float | Tensor | None = None) -> Tensor:
    """Return `total / divisor`, for the total of `count` rows; the divisor is their number if it is None.

    For a count of 0 the gradient is zero, as that of torch's cross entropy is, also where the value is 0 / 0.
    """
    divisor = count if divisor is None else divisor
    return total / divisor if count else torch.where(torch.ones_like(total, dtype=torch.bool), total.detach() / divisor, total)


def summed_cross_entropy(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    rows: TargetRows,
    logit_map: LogitMap,
    *,
    divisor: float | Tensor | None = None,
) -> tuple[Tensor, int]:
    """Return the sum over the rows that carry a target, and the number of these rows.

    `divisor` is what the caller will divide the sum by (default: the number of rows). It does not change the value, but lets
    gradients be rounded only once.
    """
    refuse_transforms("the streamed head")
    refuse_own_operations(hidden_NE, weight_VE, bias_V)
    rows.check_width(len(weight_VE))
    operands = [None if tensor is None else as_autocast(tensor) for tensor in (hidden_NE, weight_VE, bias_V)]
    if not torch.is_grad_enabled():
        operands = [None if tensor is None else tensor.detach() for tensor in operands]
    expected = rows.count if divisor is None else divisor
    if not rows.count:  # all gradients are zero, and would be 0 * (0 / 0) for a divisor of 0
        expected = 1
    return _SummedCrossEntropy.apply(*operands, rows, logit_map, expected), rows.count


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @in_head
    @labelled("hidden states")
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        rows: TargetRows,
        logit_map: LogitMap,
        divisor: float | Tensor,
    ) -> Tensor:
        wants = ctx.needs_input_grad[:3]
        ctx.materialize_grads = False
        head = LinearHead(weight_VE, bias_V, logit_map)
        # Backward scales these sums, so that of the weight stays in fp32 until then.
        gradients = HeadGradients(hidden_NE, head, hidden=wants[0], weight=wants[1], bias=wants[2], skips_rows=rows.skips_some)
        total = torch.zeros((), dtype=accumulator_dtype(hidden_NE.dtype), device=hidden_NE.device)
        upstream = torch.frexp(torch.ones_like(total) / (divisor.to(total) if isinstance(divisor, Tensor) else divisor)).mantissa
        with torch.autocast(hidden_NE.device.type, enabled=False):
            for places, targets_N in rows.chunks():
                total += _chunk_total(places, hidden_NE[places], targets_N, head, gradients if any(wants) else None, upstream)
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden_NE, weight_VE, bias_V)]
        ctx.save_for_backward(gradients.hidden_NE, gradients.weight_VE, gradients.bias_V, upstream)
        return total

    @staticmethod
    @first_order_only
    @in_head
    @labelled("hidden states")
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        *sums, upstream = ctx.saved_tensors
        factor = dtotal / upstream
        gradients = []
        for total, dtype, label in zip(sums, ctx.dtypes, GRADIENT_LABELS, strict=True):
            with memory_label(label):
                gradients.append(None if total is None else scaled(total, factor, dtype))
        return *gradients, None, None, None


@labelled("logits")
def _chunk_total(
    places: Tensor | slice,
    chunk_NE: Tensor,
    targets_N: Tensor,
    head: LinearHead,
    gradients: HeadGradients | None,
    upstream: Tensor,
) -> Tensor:
    """Return the chunk's sum and add its gradients to `gradients`. A separate function, so that returning frees the logits."""
    product_NV = head.product(chunk_NE)
    lse_N, picked_N, _ = token_statistics(product_NV, targets_N, head.logit_map)
    if gradients is not None:
        dlogprobs_N = (-upstream).expand_as(lse_N)
        gradients.add(places, chunk_NE, product_gradient(product_NV, targets_N, head.logit_map, lse_N, dlogprobs_N))
    return (lse_N - picked_N).sum()
