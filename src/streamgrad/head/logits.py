"""Logits of one chunk of tokens, in the precision of the loss, and the two GEMMs that consume their gradient.

    z = logit_map(hidden @ weight^T + bias)

The product is made in the operands' dtype, as the stock head makes it, and everything after it in fp32 (fp64 for fp64).

Shapes: N tokens, V vocabulary, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from streamgrad.core.sums import accumulator_dtype, add_product_, zeros_for_sum


@dataclass(frozen=True)
class LogitMap:
    """What a model does to its logits: `scale * z`, or with `tanh` set `scale * tanh(inner_scale * z)`.

    A softcap of c is `inner_scale = 1 / c`, `tanh`, `scale = c`; granite's logits_scaling s is `scale = 1 / s`.
    """

    scale: float = 1.0
    tanh: bool = False
    inner_scale: float = 1.0

    @classmethod
    def build(cls, *, logit_scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0) -> LogitMap:
        """`softcap(logit_scale * z) / temperature`."""
        for name, value in (("softcap", softcap), ("temperature", temperature)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive: logits are divided by it. Pass None or 1.0 to leave it out.")
        if softcap is None:
            return cls(scale=logit_scale / temperature)
        return cls(scale=softcap / temperature, tanh=True, inner_scale=logit_scale / softcap)

    def __call__(self, z: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.inner_scale * z) if self.tanh else self.scale * z

    def apply_(self, z_NV: Tensor, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
        """The mapped logits, in place, and d(mapped)/d(z) as a tensor where it is not the constant `scale`."""
        if not self.tanh:
            return (z_NV if self.scale == 1.0 else z_NV.mul_(self.scale)), None
        t_NV = z_NV.mul_(self.inner_scale).tanh_()
        slope_NV = t_NV.square().neg_().add_(1.0).mul_(self.scale * self.inner_scale) if with_slope else None
        return t_NV.mul_(self.scale), slope_NV


@dataclass(frozen=True)
class LinearHead:
    """`weight` (V, E), an optional `bias` (V) and what happens to the logits."""

    weight_VE: Tensor
    bias_V: Tensor | None
    logit_map: LogitMap

    def logits(self, hidden_NE: Tensor, *, with_slope: bool = False) -> tuple[Tensor, Tensor | None]:
        """`(z_NV, slope_NV)`; `z_NV` is a fresh tensor that the caller may overwrite."""
        product_NV = torch.nn.functional.linear(hidden_NE, self.weight_VE, self.bias_V)
        return self.logit_map.apply_(product_NV.to(accumulator_dtype(product_NV.dtype)), with_slope=with_slope)

    def gradient_of_product(self, dz_NV: Tensor, slope_NV: Tensor | None) -> Tensor:
        """d(loss)/d(product) from d(loss)/d(z), in place, in the dtype of the GEMMs that follow."""
        if slope_NV is not None:
            dz_NV.mul_(slope_NV)
        elif self.logit_map.scale != 1.0:
            dz_NV.mul_(self.logit_map.scale)
        return dz_NV.to(self.weight_VE.dtype)


class HeadGradients:
    """Sums over chunks of the gradients of `hidden`, `weight` and `bias`; what nobody asked for is never allocated."""

    def __init__(self, hidden_NE: Tensor, head: LinearHead, *, hidden: bool, weight: bool, bias: bool) -> None:
        self.head = head
        self.hidden_NE = torch.zeros_like(hidden_NE) if hidden else None
        self.weight_VE = zeros_for_sum(head.weight_VE) if weight else None
        self.bias_V = zeros_for_sum(head.bias_V) if bias and head.bias_V is not None else None

    def add(self, rows: Tensor | slice, hidden_NE: Tensor, dproduct_NV: Tensor) -> None:
        """One chunk: `rows` are its places in the full `hidden`, `hidden_NE` their values."""
        if self.hidden_NE is not None:
            self.hidden_NE[rows] = dproduct_NV @ self.head.weight_VE
        if self.weight_VE is not None:
            add_product_(self.weight_VE, dproduct_NV.mT, hidden_NE)
        if self.bias_V is not None:
            self.bias_V += dproduct_NV.sum(dim=0, dtype=self.bias_V.dtype)
