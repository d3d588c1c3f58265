"""Cross entropy of a head that is more than one plain linear map (an adapter, a quantised weight, several modules), in chunks.

As in `cross_entropy`, one pass is enough, here by autograd: the module makes each chunk's logits, their loss is differentiated at
once into gradient accumulators of the module's parameters, and backward only scales. A module whose chunks would not be those of
the whole (it mixes tokens, or changes a buffer) raises `SeamError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.checks.contents import identity
from streamgrad.engine.checks.guards import NO_ADAPTERS, check_leaves, gradient_of_input
from streamgrad.engine.checks.trial import RunChunks, Trial
from streamgrad.engine.grad_accumulator import GradAccumulators
from streamgrad.engine.kv_chunk import SeamError, Span
from streamgrad.engine.module_walk import modules_of, trainable_parameters
from streamgrad.engine.replay import DRAWING
from streamgrad.engine.shortage import in_head
from streamgrad.head.linear_head import LogitMap
from streamgrad.head.targets import TargetRows
from streamgrad.ops.accumulate import accumulator_dtype, scaled, zeros_for_sum
from streamgrad.ops.autograd import first_order_only, refuse_transforms


def summed_module_cross_entropy(
    module: nn.Module, run: Callable[[Tensor], Tensor], hidden_NE: Tensor, rows: TargetRows, logit_map: LogitMap
) -> tuple[Tensor, int]:
    """Return `(sum of cross entropy over the rows with a target, their number)` for logits `logit_map(run(hidden))`.

    `run` is the module's own forward; it reads the parameters of `module` and no others that need a gradient.
    """
    refuse_transforms("the streamed head")
    parameters = trainable_parameters(module)
    name = f"its language-modelling head, a {type(module).__name__},"
    trial = Trial(modules_of(module), name, _in_parts(run), NO_ADAPTERS, identity(run), is_scaled_later=True)
    trial(hidden_NE.unsqueeze(0), before_backward=torch.is_grad_enabled())
    if not torch.is_grad_enabled() or not (hidden_NE.requires_grad or parameters):
        with torch.no_grad():
            return _total(module, run, hidden_NE, rows, logit_map), rows.count
    return _ModuleCrossEntropy.apply(module, run, rows, logit_map, hidden_NE, *parameters), rows.count


def _in_parts(run: Callable[[Tensor], Tensor]) -> RunChunks:
    def run_parts(hidden_1NE: Tensor, parts: Sequence[Span]) -> Tensor:
        return torch.cat([run(hidden_1NE[:, slice(*span)]) for span in parts], dim=1)

    return run_parts


class _ModuleCrossEntropy(torch.autograd.Function):
    @staticmethod
    @in_head
    def forward(
        ctx: Any,
        module: nn.Module,
        run: Callable[[Tensor], Tensor],
        rows: TargetRows,
        logit_map: LogitMap,
        hidden_NE: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.materialize_grads = False
        accumulators = GradAccumulators(parameters, summed=True)
        dhidden_NE = torch.zeros_like(hidden_NE) if ctx.needs_input_grad[4] else None
        with accumulators.installed_in(modules_of(module)):
            total = _total(module, run, hidden_NE, rows, logit_map, dhidden_NE, accumulators.tensors)
        # Sums stay in fp32 until backward has scaled them; casting them before would round twice.
        ctx.parameter_dtypes = [parameter.dtype for parameter in parameters]
        sums = accumulators.take_sums()
        if not rows.count:  # no chunk has run, but engines wait for a gradient from every rank
            sums = [zeros_for_sum(parameter) for parameter in parameters]
        ctx.save_for_backward(dhidden_NE, *sums)
        return total

    @staticmethod
    @first_order_only
    @in_head
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_NE, *sums = ctx.saved_tensors
        dhidden = None if dhidden_NE is None else scaled(dhidden_NE, dtotal, dhidden_NE.dtype)
        gradients = [
            None if total is None else scaled(total, dtotal, dtype)
            for total, dtype in zip(sums, ctx.parameter_dtypes, strict=True)
        ]
        return None, None, None, None, dhidden, *gradients


def _total(
    module: nn.Module,
    run: Callable[[Tensor], Tensor],
    hidden_NE: Tensor,
    rows: TargetRows,
    logit_map: LogitMap,
    dhidden_NE: Tensor | None = None,
    leaves: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return the summed loss. With `leaves`, the only parameters that `run` may read, add its gradients to them, and write those
    of the hidden states into `dhidden_NE`."""
    total = torch.zeros((), dtype=accumulator_dtype(hidden_NE.dtype), device=hidden_NE.device)
    versions = [(buffer, buffer._version) for buffer in module.buffers()]
    for places, targets_N in rows.chunks():
        leaf_NE = hidden_NE[places].detach().requires_grad_(dhidden_NE is not None)
        with torch.set_grad_enabled(leaves is not None), DRAWING:
            # Heads expect (batch, tokens, width).
            z_NV = run(leaf_NE.unsqueeze(0)).squeeze(0)
            rows.check_width(z_NV.shape[-1])
            if any(buffer._version != version for buffer, version in versions):
                raise SeamError(f"its language-modelling head, a {type(module).__name__}, changes a buffer whenever it is called")
            z_NV = logit_map(z_NV.to(accumulator_dtype(z_NV.dtype)))
            chunk_total = torch.nn.functional.cross_entropy(z_NV, targets_N, reduction="sum")
        if leaves is not None and chunk_total.requires_grad:
            check_leaves(chunk_total, [leaf_NE, *leaves], type(module).__name__)
            chunk_total.backward()
        if dhidden_NE is not None:
            dhidden_NE[places] = gradient_of_input(leaf_NE, module)
        total = total + chunk_total.detach()
    return total
