"""Softmax of one chunk of logits: the statistics of each row that forward needs, and the gradient that overwrites the logits.

Both functions run as Triton kernels (`softmax_kernels`) on a GPU, and as the torch code below elsewhere, for fp64, and without
Triton. Either way arithmetic is fp32, or fp64 for an fp64 product.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from streamgrad.head.linear_head import LogitMap
from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.triton_support import kernels_for


def token_statistics(
    product_NV: Tensor, targets_N: Tensor, logit_map: LogitMap, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return `(lse, picked, entropy)` of each row. With `z = logit_map(product)`:

        lse = logsumexp(z),   picked = z[target],   entropy = -sum_v p_v log p_v   where log p = z - lse

    `product_NV` is only read. `entropy` is None unless asked for.
    """
    kernels = _kernels_for(product_NV)
    if kernels is not None:
        return kernels.token_statistics(product_NV, targets_N, logit_map, with_entropy=with_entropy)
    z_NV = logit_map(product_NV.to(accumulator_dtype(product_NV.dtype)))
    lse_N = z_NV.logsumexp(dim=-1)
    picked_N = z_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1)
    if not with_entropy:
        return lse_N, picked_N, None
    logp_NV = z_NV - lse_N.unsqueeze(1)
    return lse_N, picked_N, -(logp_NV.exp().mul_(logp_NV)).sum(dim=-1)


def product_gradient(
    product_NV: Tensor,
    targets_N: Tensor,
    logit_map: LogitMap,
    lse_N: Tensor,
    dlogprobs_N: Tensor,
    entropy_N: Tensor | None = None,
    dentropy_N: Tensor | None = None,
) -> Tensor:
    """Return d(loss)/d(product) in the product's dtype, rounded once; the product may be overwritten. With p = exp(z - lse):

    d(logprob)/dz = onehot(target) - p,    d(entropy)/dz = -p (log p + entropy),    dz/d(product) = slope of logit_map
    """
    kernels = _kernels_for(product_NV)
    if kernels is not None:
        return kernels.product_gradient(product_NV, targets_N, logit_map, lse_N, dlogprobs_N, entropy_N, dentropy_N)
    z_NV, slope_NV = logit_map.apply_(product_NV.to(accumulator_dtype(product_NV.dtype)), with_slope=True)
    logp_NV, dlogprobs_N1 = z_NV.sub_(lse_N.unsqueeze(1)), dlogprobs_N.unsqueeze(1)
    if entropy_N is not None and dentropy_N is not None:
        factor_NV = (logp_NV + entropy_N.unsqueeze(1)).mul_(dentropy_N.unsqueeze(1)).add_(dlogprobs_N1)
        dz_NV = logp_NV.exp_().mul_(factor_NV).neg_()
    else:
        dz_NV = logp_NV.exp_().mul_(dlogprobs_N1).neg_()
    dz_NV.scatter_add_(1, targets_N.unsqueeze(1), dlogprobs_N1)
    return logit_map.gradient_(dz_NV, slope_NV).to(product_NV.dtype)


def _kernels_for(product_NV: Tensor) -> ModuleType | None:
    return kernels_for(product_NV, "streamgrad.head.softmax_kernels")
