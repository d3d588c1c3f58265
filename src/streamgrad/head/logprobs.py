"""Log-probabilities of given tokens under a linear head, differentiable, one chunk of logits at a time.

Forward keeps the log-sum-exp per token (and the entropy where asked for); backward makes a chunk's logits again and turns
them into their own gradient in place: four GEMMs a chunk. Any objective on log-probabilities is then a short function of (B, T).

Shapes: N tokens, V vocabulary, E model width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from streamgrad.core.replay import as_autocast
from streamgrad.core.sums import accumulator_dtype
from streamgrad.head.logits import HeadGradients, LinearHead, LogitMap
from streamgrad.head.rows import TargetRows, flatten


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
    chunk_size: int = 2048,
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equals, without ever holding all logits:

        logits = softcap(logit_scale * (hidden @ weight.T + bias)).float() / temperature
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    of the shape of `targets`; both are 0, without gradient, where the target is `ignore_index`. Returns `logprobs`, or
    `(logprobs, entropy)` with `return_entropy=True`; both are differentiable.
    """
    logit_map = LogitMap.build(logit_scale=logit_scale, softcap=softcap, temperature=temperature)
    hidden_NE, targets_N = flatten(hidden, weight, targets)
    rows = TargetRows(targets_N, vocabulary=weight.shape[0], ignore_index=ignore_index, chunk_size=chunk_size)
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
                z_NV, _ = head.logits(hidden_NE[places])
                chunk_lse_N = z_NV.logsumexp(dim=-1)
                lse_N[places] = chunk_lse_N
                logprobs_N[places] = z_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) - chunk_lse_N
                if entropy_N is not None:
                    logp_NV = z_NV.sub_(chunk_lse_N.unsqueeze(1))
                    entropy_N[places] = -(logp_NV.exp() * logp_NV).sum(dim=-1)
        ctx.rows, ctx.logit_map = rows, logit_map
        ctx.save_for_backward(hidden_NE, weight_VE, bias_V, lse_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs_N: Tensor, dentropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NE, weight_VE, bias_V, lse_N, entropy_N = ctx.saved_tensors
        wants = ctx.needs_input_grad
        head = LinearHead(weight_VE, bias_V, ctx.logit_map)
        gradients = HeadGradients(hidden_NE, head, hidden=wants[0], weight=wants[1], bias=wants[2])
        for places, targets_N in ctx.rows.chunks():
            chunk_NE = hidden_NE[places]
            z_NV, slope_NV = head.logits(chunk_NE, with_slope=True)
            dlogprobs_N1 = dlogprobs_N[places].unsqueeze(1)
            logp_NV = z_NV.sub_(lse_N[places].unsqueeze(1))
            # d(logprob)/dz = onehot - p  and  d(entropy)/dz = -p (log p + entropy)
            if entropy_N is not None and dentropy_N is not None:
                factor_NV = (logp_NV + entropy_N[places].unsqueeze(1)).mul_(dentropy_N[places].unsqueeze(1)).add_(dlogprobs_N1)
                dz_NV = logp_NV.exp_().mul_(factor_NV).neg_()
            else:
                dz_NV = logp_NV.exp_().mul_(dlogprobs_N1).neg_()
            dz_NV.scatter_add_(1, targets_N.unsqueeze(1), dlogprobs_N1)
            gradients.add(places, chunk_NE, head.gradient_of_product(dz_NV, slope_NV))
        sums = (gradients.hidden_NE, gradients.weight_VE, gradients.bias_V)
        cast = [
            None if total is None else total.to(tensor.dtype)
            for total, tensor in zip(sums, (hidden_NE, weight_VE, bias_V), strict=True)
        ]
        return *cast, None, None, None
