"""Operands of a linear head, what the model may do to its logits, and the same written out on full logits."""

from __future__ import annotations

import torch
from torch.nn import functional as F

# Odd sizes: tokens, width, vocabulary.
N, E, V = 31, 19, 47


def operands(dtype=torch.float64, *, bias: bool = True, seed: int = 0, n: int = N, e: int = E, v: int = V):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, offset = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((n, e), (v, e), (v,)))
    targets = torch.randint(0, v, (n,), generator=generator)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden, weight * 0.4, offset)]
    return (*leaves[:2], leaves[2] if bias else None, targets)


def reference_logits(hidden, weight, bias, *, logit_scale=1.0, softcap=None, temperature=1.0):
    logits = logit_scale * F.linear(hidden, weight, bias)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature


def gradients_of(loss, leaves):
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


MAPS = [
    {},
    {"temperature": 0.7},
    {"logit_scale": 0.3},
    {"softcap": 2.5},
    {"softcap": 2.5, "logit_scale": 1.7, "temperature": 1.3},
]
