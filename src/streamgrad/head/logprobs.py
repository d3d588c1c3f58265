"""Log-probabilities of given tokens under a linear head, differentiable, one chunk of logits at a time.

Forward keeps the log-sum-exp per token (and the entropy where asked for); backward makes a chunk's logits again and turns
them into their own gradient in place: four GEMMs a chunk. Any objective on log-probabilities is then a short function of (B, T).

Shapes: N tokens, V vocabulary, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from streamgrad.core.first_order import first_order_only
from streamgrad.core.replay import as_autocast
from streamgrad.core.sums import accumulator_dtype
from streamgrad.head.logits import HeadGradients, LinearHead, LogitMap
from streamgrad.head.rows import TargetRows, flatten
from streamgrad.head.softmax import product_gradient, token_statistics


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
    """Equals, without ever holding all logits:

        logits = softcap(logit_scale * (hidden @ weight.T + bias)).float() / temperature
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    of the shape of `targets`; both are 0, without gradient, where the target is `ignore_index`. Returns `logprobs`, or
    `(logprobs, entropy)` with `return_entropy=True`; both are differentiable. `chunk_size` is how many tokens have logits at a
    time; `"auto"` takes it from the memory that is free.
    """
    logit_map = LogitMap.build(logit_scale=logit_scale, softcap=softcap, temperature=temperature)
    hidden_NE, targets_N = flatten(hidden, weight, targets)
    rows = TargetRows(
        targets_N,
        vocabulary=weight.shape[0],
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        itemsize=hidden.element_size(),
    )
    operands = [None if tensor is None else as_autocast(tensor) for tensor in (hidden_NE, weight, bias)]
    logprobs_N, entropy_N = _TokenLogprobs.apply(*operands, rows, logit_map, return_entropy)
    logprobs = logprobs_N.view(targets.shape)
    return (logprobs, entropy_N.view(targets.shape)) if return_entropy else logprobs


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        rows: TargetRows,
        logit_map: LogitMap,
        wants_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = accumulator_dtype(hidden_NE.dtype)
        lse_N, logprobs_N = hidden_NE.new_zeros((2, len(hidden_NE)), dtype=dtype)
        entropy_N = torch.zeros_like(lse_N) if wants_entropy else None
        head = LinearHead(weight_VE, bias_V, logit_map)
        with torch.autocast(hidden_NE.device.type, enabled=False):
            for places, targets_N in rows.chunks():
                chunk_lse_N, picked_N, chunk_entropy_N = token_statistics(
                    head.product(hidden_NE[places]), targets_N, logit_map, with_entropy=wants_entropy
                )
                lse_N[places] = chunk_lse_N
                logprobs_N[places] = picked_N - chunk_lse_N
                if entropy_N is not None and chunk_entropy_N is not None:
                    entropy_N[places] = chunk_entropy_N
        ctx.rows, ctx.logit_map = rows, logit_map
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, lse_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dlogprobs_N: Tensor, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, lse_N, entropy_N = ctx.saved_tensors
        wants = ctx.needs_input_grad
        head = LinearHead(weight_VE, bias_V, ctx.logit_map)
        rows = ctx.rows
        gradients = HeadGradients(
            hidden_NE,
            head,
            hidden=wants[0],
            weight=wants[1],
            bias=wants[2],
            skips_rows=rows.skips_some,
            at_once=rows.count <= rows.chunk_size,
        )
        for places, targets_N in rows.chunks():
            chunk_NE = hidden_NE[places]
            dproduct_NV = product_gradient(
                head.product(chunk_NE),
                targets_N,
                ctx.logit_map,
                lse_N[places],
                dlogprobs_N[places],
                entropy_N=None if entropy_N is None else entropy_N[places],
                dentropy_N=None if dentropy_N is None else dentropy_N[places],
            )
            gradients.add(places, chunk_NE, dproduct_NV)
            del dproduct_NV  # or it would live on beside the next chunk's
        sums = (gradients.hidden_NE, gradients.weight_VE, gradients.bias_V)
        cast = [
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, (hidden_NE, weight_VE, bias_V), strict=True)
        ]
        return *cast, None, None, None
