"""Routing and weighting of experts, between their matrix products: each is one operation forward and one backward.

A router sends each of T tokens to K experts. The T x K pairs stand in the order of their experts, so that one matrix product
serves all experts (`grouped_mm`), and

    x_SE = spread(x_TE)                          row s is that of its token
    h_SI = weighted_gate(x_SE @ gate_up)         weight of the pair * activation(gate) * up
    out_TE = collected(h_SI @ down)              the sum of a token's rows

equals `sum over k of weight * expert_k(x)`. The weight comes before the last product, not after it: then no gradient needs what
that product made, the widest tensor of all. Spreading and collecting are each other's backward: rows are read where they are and
summed in fp32, where torch's own indexing sorts them once more and adds them one by one.

Shapes: T tokens, K experts of a token, S = T K pairs, E width, I inner width, F = 2 I.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamgrad.ops import fused
from streamgrad.ops.autograd import Function, first_order_only, own


@dataclass(frozen=True)
class Routes:
    """Where rows go: pair s is of token `token_S[s]`, and the pairs of token t are `place_TK[t]`.

    `pair_S` counts pairs as the router does, token by token, and `stop_X` is where each expert's pairs end. Behind the last come
    pairs of no expert, which count for nothing.
    """

    token_S: Tensor
    place_TK: Tensor
    pair_S: Tensor
    stop_X: Tensor

    @classmethod
    def of(cls, chosen_TK: Tensor, experts: int) -> Routes:
        """Return the routes to the chosen of so many experts; a number beyond them is that of none."""
        expert_S, pair_S = chosen_TK.reshape(-1).sort(stable=True)
        place_S = torch.empty_like(pair_S)
        place_S[pair_S] = torch.arange(len(pair_S), device=pair_S.device)
        numbers_X = torch.arange(experts, device=expert_S.device, dtype=expert_S.dtype)
        stop_X = torch.searchsorted(expert_S, numbers_X, right=True, out_int32=True)
        return cls(pair_S // chosen_TK.shape[1], place_S.view(chosen_TK.shape), pair_S, stop_X)


class _Spread(Function):
    @staticmethod
    def forward(ctx: Any, x_TE: Tensor, token_S: Tensor, place_TK: Tensor, stop_X: Tensor) -> Tensor:
        ctx.materialize_grads = False
        ctx.save_for_backward(place_TK, stop_X)
        return x_TE.index_select(0, token_S)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dx_SE: Tensor) -> tuple[Tensor | None, ...]:
        return fused.code_for(dx_SE).sum_of_rows(dx_SE.contiguous(), *ctx.saved_tensors), None, None, None


class _Collected(Function):
    @staticmethod
    def forward(ctx: Any, rows_SE: Tensor, token_S: Tensor, place_TK: Tensor, stop_X: Tensor) -> Tensor:
        ctx.materialize_grads = False
        ctx.save_for_backward(token_S)
        out_TE: Tensor = fused.code_for(rows_SE).sum_of_rows(rows_SE.contiguous(), place_TK, stop_X)
        return out_TE

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dout_TE: Tensor) -> tuple[Tensor | None, ...]:
        return dout_TE.index_select(0, *ctx.saved_tensors), None, None, None


class _WeightedGate(Function):
    @staticmethod
    def forward(ctx: Any, joint_SF: Tensor, weight_S: Tensor, activation: str, consumed: bool) -> Tensor:
        ctx.activation, ctx.consumed = activation, consumed
        ctx.materialize_grads = False
        ctx.save_for_backward(joint_SF, weight_S)
        gate_SI, up_SI = joint_SF.chunk(2, dim=-1)
        return own(fused.code_for(joint_SF).gated_forward(gate_SI, up_SI, activation, weight_S))

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dh_SI: Tensor) -> tuple[Tensor | None, ...]:
        joint_SF, weight_S = ctx.saved_tensors
        in_place = ctx.consumed and not torch._C._autograd._get_current_graph_task_keep_graph()
        written_SF = joint_SF.detach() if in_place else joint_SF.detach().clone()
        gate_SI, up_SI = written_SF.chunk(2, dim=-1)
        _, _, dweight_S = fused.code_for(joint_SF).gated_backward(
            dh_SI.contiguous(), gate_SI, up_SI, ctx.activation, in_place=True, weight_N=weight_S
        )
        if in_place:
            # Lets autograd raise if another function has saved it for backward.
            torch.autograd.graph.increment_version(joint_SF)
        return written_SF, dweight_S.to(weight_S.dtype), None, None


def spread(x_TE: Tensor, routes: Routes) -> Tensor:
    """Return `x_TE[routes.token_S]`."""
    return _Spread.apply(x_TE, routes.token_S, routes.place_TK, routes.stop_X)


def collected(rows_SE: Tensor, routes: Routes) -> Tensor:
    """Return, for each token, the sum of its rows."""
    return _Collected.apply(rows_SE, routes.token_S, routes.place_TK, routes.stop_X)


def weighted_gate(joint_SF: Tensor, weight_TK: Tensor, routes: Routes, activation: str, *, consumed: bool = False) -> Tensor:
    """Return `weight * activation(gate) * up` of pairs.

    `consumed` says that nothing else reads `joint_SF`: the last backward pass may then overwrite it with its gradient.
    """
    # A pair has one weight: pairs are to weights as rows to tokens, with one row of each.
    weight_S1 = _Spread.apply(weight_TK.reshape(-1, 1), routes.pair_S, routes.place_TK.view(-1, 1), routes.stop_X)
    return _WeightedGate.apply(joint_SF, weight_S1.view(-1), activation, consumed)
