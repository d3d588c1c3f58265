"""Experts of transformers with the parts around their matrix products fused (`ops.experts`); the products stay transformers' own.

Experts are recognised by how transformers calls them: a forward that hands over to `grouped_mm_experts_forward`, for weights
with a gate, without biases, and with a gate that is transformers' default. All names that this
function reads have to be among those known here: if a release of transformers reads another one, its experts run unfused.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
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
# As they are at import time, to compare with: a program may replace them later.
_EXPERTS, _GATE, _PRODUCTS = moe.grouped_mm_experts_forward, moe._default_apply_gate, (moe._grouped_linear, moe._grouped_mm)


def is_of_experts(forward: Any) -> bool:
    """Return whether a class's forward is the one that transformers gives to experts."""
    return getattr(forward, "__code__", None) is _DISPATCHING


def fused_experts(module: Any, activation: str, wants: Callable[..., bool]) -> Callable[..., Tensor] | None:
    """Return a function that equals the forward of experts with this activation, or None where they do what is not known."""
    properties = {name: getattr(module, name, usual) for name, usual in _PROPERTIES.items()}
    has_own_gate = "_apply_gate" in module.__dict__ or getattr(type(module), "_apply_gate", None) is not _GATE
    if properties != _PROPERTIES or has_own_gate or not _is_known_code(_EXPERTS, _GATE, *_PRODUCTS):
        return None
    interface = inspect.getclosurevars(type(module).forward).nonlocals["experts_interface"]
    stock = types.MethodType(type(module).forward, module)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        # Looked up in every call, as transformers does it.
        implementation = interface.get_interface(module.config._experts_implementation, None)
        is_stock = implementation is _EXPERTS and (moe._grouped_linear, moe._grouped_mm) == _PRODUCTS
        result: Tensor = (fused if is_stock else stock)(*args, **kwargs)
        return result

    def fused(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        is_usual = hidden_states.dim() == top_k_index.dim() == 2 and top_k_index.shape == top_k_weights.shape
        # A gradient without the weight of its pair is soon too large for fp16.
        if not is_usual or hidden_states.dtype is torch.float16 or not wants(hidden_states):
            return stock(hidden_states, top_k_index, top_k_weights)
        weight = module.gate_up_proj  # once, and not both weights at a time: a program may have them made for each call
        if not wants(hidden_states, weight):
            return stock(hidden_states, top_k_index, top_k_weights)
        routes = Routes.of(top_k_index, module.num_experts)
        transposed = {"is_transposed": module.is_transposed}
        joint = moe._grouped_linear(spread(hidden_states, routes), weight, routes.stop_X, **transposed)
        del weight
        inner = weighted_gate(joint, top_k_weights, routes, activation, consumed=not torch._C._len_torch_function_stack())
        rows = moe._grouped_linear(inner, module.down_proj, routes.stop_X, **transposed)
        return collected(rows, routes).to(hidden_states.dtype)

    return forward


@functools.cache
def _is_known_code(experts: Any, *others: Any) -> bool:
    """Return whether these are functions of transformers itself, and the first reads nothing that is not known here."""
    codes = [getattr(function, "__code__", None) for function in (experts, *others)]
    own = all(code is not None and code.co_filename == moe.__file__ for code in codes)
    return own and set(experts.__code__.co_names) <= _KNOWN_NAMES
