"""A linear head: the GEMM that makes a chunk of logits, the map applied to them, and the two GEMMs of their gradient.

    z = logit_map(hidden @ weight^T + bias)

The product is computed in the operands' dtype, as in the stock head; `head.softmax` does everything between it and its gradient.

Shapes: N tokens, V vocabulary, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from streamgrad.ops.accumulate import accumulator_dtype, add_product_
from streamgrad.ops.memory_label import labelled, memory_label

# Memory labels of the gradients of `hidden`, `weight` and `bias`.
GRADIENT_LABELS = ("hidden states", "gradients", "gradients")


@dataclass(frozen=True)
class LogitMap:
    """The map that a model applies to its logits: `scale * z`, or if `tanh` is set, `scale * tanh(inner_scale * z)`.

    A softcap c is `inner_scale = 1 / c`, `tanh`, `scale = c`; granite's logits_scaling s is `scale = 1 / s`.
    """

    scale: float = 1.0
    tanh: bool = False
    inner_scale: float = 1.0

    @classmethod
    def build(cls, *, logit_scale: float = 1.0, softcap: float | None = None, temperature: float = 1.0) -> LogitMap:
        """Return the map `softcap(logit_scale * z) / temperature`."""
        for name, value, neutral in (("softcap", softcap, None), ("temperature", temperature, 1.0)):
            if value is not neutral and not (isinstance(value, Real | Tensor) and value > 0):
                raise ValueError(f"{name}={value!r} must be positive: logits are divided by it. Pass {neutral} to leave it out.")
        if softcap is None:
            return cls(scale=logit_scale / temperature)
        return cls(scale=softcap / temperature, tanh=True, inner_scale=logit_scale / softcap)

    def __call__(self, z: Tensor) -> Tensor:
        if self.tanh:
            return self.scale * torch.tanh(self.inner_scale * z)
        return z if self.scale == 1.0 else self.scale * z

    def apply_(self, z_NV: Tensor, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
        """Map the logits in place; return them, and d(mapped)/d(z) if asked for and not just the constant `scale`."""
        if not self.tanh:
            return (z_NV if self.scale == 1.0 else z_NV.mul_(self.scale)), None
        t_NV = z_NV.mul_(self.inner_scale).tanh_()
        slope_NV = t_NV.square().neg_().add_(1.0).mul_(self.scale * self.inner_scale) if with_slope else None
        return t_NV.mul_(self.scale), slope_NV

    def gradient_(self, dmapped_NV: Tensor, slope_NV: Tensor | None) -> Tensor:
        """Turn d(loss)/d(mapped) into d(loss)/d(z) in place, with the slope that `apply_` returned."""
        if slope_NV is not None:
            return dmapped_NV.mul_(slope_NV)
        return dmapped_NV if self.scale == 1.0 else dmapped_NV.mul_(self.scale)


@dataclass(frozen=True)
class LinearHead:
    """`weight` (V, E), an optional `bias` (V) and the map applied to the logits."""

    weight_VE: Tensor
    bias_V: Tensor | None
    logit_map: LogitMap

    @classmethod
    def like(cls, hidden_NE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, logit_map: LogitMap) -> LinearHead:
        """Return the head in the dtype of the hidden states.

        It is cast inside of an autograd function, so that the weight's gradient has the weight's dtype.
        """
        return cls(weight_VE.to(hidden_NE.dtype), None if bias_V is None else bias_V.to(hidden_NE.dtype), logit_map)

    @labelled("logits")
    def product(self, hidden_NE: Tensor) -> Tensor:
        """Return `hidden @ weight^T + bias`, a fresh tensor that the caller may overwrite."""
        return torch.nn.functional.linear(hidden_NE, self.weight_VE, self.bias_V)


class HeadGradients:
    """Sums over chunks of the gradients of `hidden`, `weight` and `bias`; only those asked for are allocated.

    The sum of a 16-bit weight is fp32, so that it is rounded once. `at_once` says that there is a single chunk and that its
    gradient will not be scaled: then the GEMM itself rounds, without an fp32 copy. Without `skips_rows`, every row of `hidden` is
    in some chunk, and its gradient need not start from zero.
    """

    def __init__(
        self,
        hidden_NE: Tensor,
        head: LinearHead,
        *,
        hidden: bool,
        weight: bool,
        bias: bool,
        skips_rows: bool = True,
        at_once: bool = False,
    ) -> None:
        self._head, self._wants_weight, self._wants_bias, self._at_once = head, weight, bias, at_once
        with memory_label("hidden states"):
            self.hidden_NE = (torch.zeros_like if skips_rows else torch.empty_like)(hidden_NE) if hidden else None
        self._weight_VE: Tensor | None = None
        self._bias_V: Tensor | None = None

    def add(self, rows: Tensor | slice, hidden_NE: Tensor, dproduct_NV: Tensor) -> None:
        """Add one chunk: `rows` are its places in the full `hidden`, `hidden_NE` their values."""
        sum_dtype = accumulator_dtype(dproduct_NV.dtype)
        if self.hidden_NE is not None:
            # With few rows, cuBLAS splits the sum over V; an fp32 output keeps it from adding the parts in 16 bits.
            wide = sum_dtype if dproduct_NV.is_cuda else dproduct_NV.dtype
            with memory_label("hidden states"):
                self.hidden_NE[rows] = _product(dproduct_NV, self._head.weight_VE, wide).to(self.hidden_NE.dtype)
        if self._weight_VE is not None:
            add_product_(self._weight_VE, dproduct_NV.mT, hidden_NE)
        elif self._wants_weight:
            with memory_label("gradients"):
                self._weight_VE = _product(dproduct_NV.mT, hidden_NE, dproduct_NV.dtype if self._at_once else sum_dtype)
        if self._wants_bias:
            with memory_label("gradients"):
                term_V = dproduct_NV.sum(dim=0, dtype=sum_dtype)
            self._bias_V = term_V if self._bias_V is None else self._bias_V.add_(term_V)

    @property
    @labelled("gradients")
    def weight_VE(self) -> Tensor | None:
        """Return the sum of the weight's gradients: None if not asked for, zeros if there was no chunk."""
        if self._weight_VE is None and self._wants_weight:
            return torch.zeros_like(self._head.weight_VE)
        return self._weight_VE

    @property
    @labelled("gradients")
    def bias_V(self) -> Tensor | None:
        """Return the sum of the bias's gradients, by the rules of `weight_VE`."""
        if self._bias_V is None and self._wants_bias and self._head.bias_V is not None:
            return torch.zeros_like(self._head.bias_V)
        return self._bias_V

    def rounded(self, *operands: Tensor | None) -> list[Tensor | None]:
        """Return the sums for `hidden`, `weight` and `bias`, in the dtypes of these `operands`."""
        results: list[Tensor | None] = []
        sums = (self.hidden_NE, self.weight_VE, self.bias_V)
        for total, operand, label in zip(sums, operands, GRADIENT_LABELS, strict=True):
            with memory_label(label):
                results.append(None if total is None or operand is None else total.to(operand.dtype))
        return results


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `left @ right`, summed in fp32 or better and rounded to `dtype` once."""
    if left.dtype != dtype and left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)
