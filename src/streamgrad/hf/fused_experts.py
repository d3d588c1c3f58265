"""Experts of transformers with the parts around their matrix products fused (`ops.experts`), which stay transformers' own.

Experts are recognised by how transformers calls them: a forward that hands over to `grouped_mm_experts_forward`, for weights
with a gate, without biases, and with a gate that is transformers' default. That function may read no name that was unknown when
this was written: a release that gives experts one more property runs as it is, until the property is known here.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations import moe

from streamgrad.ops.experts import Routes, collected, spread, weighted_gate

# What `grouped_mm_experts_forward` reads, of its module and otherwise, in transformers 5.5 to 5.22.
_KNOWN_NAMES = {
    "_apply_gate", "_grouped_linear", "_is_expert_parallel", "act_fn", "arange", "argsort", "clamp_", "cumsum", "device",
    "down_proj", "down_proj_bias", "dtype", "empty_like", "expand", "float", "gate_up_proj", "gate_up_proj_bias", "has_bias",
    "has_gate", "has_post_expert_norm", "histc", "int", "int32", "is_transposed", "masked_fill", "masked_fill_", "num_experts",
    "post_expert_norm", "reshape", "size", "sort", "sum", "to", "torch", "type", "unsqueeze", "up_proj", "up_proj_bias",
    "view",
}  # fmt: skip
# What experts must be, and what they are taken for where a release does not say.
_PROPERTIES = {
    "has_gate": True, "is_concatenated": True, "has_bias": False, "has_post_expert_norm": False, "_is_expert_parallel": False,
}  # fmt: skip


class _Any(nn.Module):
    def forward(self) -> None: ...


# The forward that transformers gives to classes of experts; `functools.wraps` leaves its code as it is.
_DISPATCHING = moe.use_experts_implementation(_Any).forward.__code__


def is_of_experts(forward: Any) -> bool:
    """Return whether a class's forward is the one that transformers gives to experts."""
    return getattr(forward, "__code__", None) is _DISPATCHING


def fused_experts(module: Any, activation: str, wants: Callable[..., bool]) -> Callable[..., Tensor] | None:
    """Return a function that equals the forward of experts with this activation, or None where they do what is not known."""
    forward = type(module).forward
    properties = {name: getattr(module, name, usual) for name, usual in _PROPERTIES.items()}
    own_gate = "_apply_gate" in module.__dict__ or type(module)._apply_gate is not moe._default_apply_gate
    if properties != _PROPERTIES or own_gate or not set(moe.grouped_mm_experts_forward.__code__.co_names) <= _KNOWN_NAMES:
        return None
    interface = inspect.getclosurevars(forward).nonlocals["experts_interface"]
    stock = types.MethodType(forward, module)

    def fused(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        implementation = interface.get_interface(module.config._experts_implementation, None)
        gate_up, down = module.gate_up_proj, module.down_proj
        is_usual = hidden_states.dim() == top_k_index.dim() == 2 and top_k_index.shape == top_k_weights.shape
        if implementation is not moe.grouped_mm_experts_forward or not is_usual or not wants(hidden_states, gate_up, down):
            return stock(hidden_states, top_k_index, top_k_weights)
        routes = Routes.of(top_k_index, module.num_experts)
        joint = moe._grouped_linear(spread(hidden_states, routes), gate_up, routes.stop_X, is_transposed=module.is_transposed)
        inner = weighted_gate(joint, top_k_weights, routes, activation)
        return collected(moe._grouped_linear(inner, down, routes.stop_X, is_transposed=module.is_transposed), routes)

    return fused
