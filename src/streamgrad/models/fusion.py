"""Fused norms, gated activations and rotary embeddings in place of transformers' own, for the duration of one layer call.

A module is recognised by its code: its class's forward must have the very bytecode of one of the functions below, as written in
dozens of transformers' families. Nothing else is touched: a forward that is written differently, is wrapped, or was patched by
another library (Liger, kernels from the hub) runs as it stands.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations

from streamgrad.core.fused import Norm, gated, rms_norm, rotary
from streamgrad.models.forwards import temporary_attribute


class Fusion:
    """The fused parts among some modules, say those of one layer."""

    def __init__(self, modules: Iterable[nn.Module], *, mode: str) -> None:
        """`mode` is `StreamConfig.compile`: "auto" fuses 16-bit values on CUDA, "on" all values, "off" none."""
        self.mode = mode
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._rotary_globals: dict[int, dict[str, Any]] = {}
        for module in modules if mode != "off" else ():
            known = _known_parts(type(module))  # type: ignore[arg-type]
            if known.rotary_globals is not None:
                self._rotary_globals[id(known.rotary_globals)] = known.rotary_globals
            if known.replacement is not None and "forward" not in module.__dict__:
                forward = known.replacement(self, module)
                if forward is not None:
                    self._forwards.append((module, forward))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, the recognised parts run fused."""
        with ExitStack() as restore:
            for module, forward in self._forwards:
                restore.enter_context(temporary_attribute(module, "forward", forward))
            for names in self._rotary_globals.values():
                stock = names["apply_rotary_pos_emb"]
                restore.callback(names.__setitem__, "apply_rotary_pos_emb", stock)
                names["apply_rotary_pos_emb"] = functools.partial(self._rotary, stock)
            yield

    def wants(self, *tensors: Tensor) -> bool:
        """All of one floating dtype, and of one that is worth it."""
        first = tensors[0]
        if any(tensor.dtype != first.dtype for tensor in tensors) or torch.is_autocast_enabled(first.device.type):
            return False
        return self.mode == "on" or (first.is_cuda and first.dtype.itemsize == 2)

    def _rotary(self, stock: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        angles_of_all_heads = cos.dim() == 3 and unsqueeze_dim == 1 and cos.shape == sin.shape == (*cos.shape[:2], q.shape[-1])
        if not (angles_of_all_heads and self.wants(q, k, cos, sin)):
            return stock(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotary(q, cos, sin), rotary(k, cos, sin)


@dataclass(frozen=True)
class _KnownParts:
    """What is known about a class of modules."""

    replacement: Callable[[Fusion, Any], Callable[[Tensor], Tensor] | None] | None = None
    rotary_globals: dict[str, Any] | None = None  # where its forward looks `apply_rotary_pos_emb` up


@functools.cache
def _known_parts(kind: type) -> _KnownParts:
    forward = kind.forward  # type: ignore[attr-defined]
    names, code = getattr(forward, "__globals__", {}), getattr(forward, "__code__", None)
    rotates = code is not None and "apply_rotary_pos_emb" in code.co_names
    if rotates and _same_code(names["apply_rotary_pos_emb"], _apply_rotary) and _same_code(names["rotate_half"], _rotate_half):
        return _KnownParts(rotary_globals=names)
    if _same_code(forward, _llama_norm) or _same_code(forward, _olmo_norm):
        return _KnownParts(lambda fusion, module: _fused_norm(fusion, module, Norm(module.variance_epsilon)))
    if _same_code(forward, _gemma_norm) and _same_code(getattr(kind, "_norm", None), _gemma_norm_helper):
        return _KnownParts(lambda fusion, module: _fused_norm(fusion, module, Norm(module.eps, weight_offset=1.0)))
    if _same_code(forward, _gated_mlp) or _same_code(forward, _gated_mlp_in_one_line):
        return _KnownParts(_fused_gated_mlp)
    if _same_code(forward, _joint_gated_mlp):
        return _KnownParts(_fused_joint_gated_mlp)
    return _KnownParts()


def _same_code(function: Any, reference: Any) -> bool:
    """Whether two functions do the same, by the same instructions on the same names and constants."""
    code, other = getattr(function, "__code__", None), reference.__code__
    if code is None:
        return False
    # The first constant is the docstring, or None.
    return (code.co_code, code.co_names, code.co_consts[1:]) == (other.co_code, other.co_names, other.co_consts[1:])


# --- What is recognised. These functions are compared with, and never called. ---------------------------------------------


def _llama_norm(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)


def _olmo_norm(self: Any, hidden_states: Any) -> Any:
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)


def _gemma_norm(self: Any, x: Any) -> Any:
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)


def _gemma_norm_helper(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _gated_mlp(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _gated_mlp_in_one_line(self: Any, hidden_state: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


def _joint_gated_mlp(self: Any, hidden_states: Any) -> Any:
    up_states = self.gate_up_proj(hidden_states)
    gate, up_states = up_states.chunk(2, dim=-1)
    up_states = up_states * self.activation_fn(gate)
    return self.down_proj(up_states)


def _rotate_half(x: Any) -> Any:
    """As there: a docstring has a part in the code of a function."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _apply_rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """As there: a docstring has a part in the code of a function."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)  # type: ignore[name-defined]  # noqa: F821
    k_embed = (k * cos) + (rotate_half(k) * sin)  # type: ignore[name-defined]  # noqa: F821
    return q_embed, k_embed


# --- What runs instead ----------------------------------------------------------------------------------------------------


def _fused_norm(fusion: Fusion, module: Any, norm: Norm) -> Callable[[Tensor], Tensor]:
    stock = types.MethodType(type(module).forward, module)
    return lambda x: rms_norm(x, module.weight, norm) if fusion.wants(x, module.weight) else stock(x)


def _fused_gated_mlp(fusion: Fusion, module: Any) -> Callable[[Tensor], Tensor] | None:
    stock, activation = types.MethodType(type(module).forward, module), _activation_of(module)

    def forward(x: Tensor) -> Tensor:
        assert activation is not None
        return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation)) if fusion.wants(x) else stock(x)

    return forward if activation else None


def _fused_joint_gated_mlp(fusion: Fusion, module: Any) -> Callable[[Tensor], Tensor] | None:
    stock, activation = types.MethodType(type(module).forward, module), _activation_of(module)

    def forward(x: Tensor) -> Tensor:
        assert activation is not None
        if not fusion.wants(x):
            return stock(x)
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
        return module.down_proj(gated(gate, up, activation))

    return forward if activation else None


def _activation_of(module: nn.Module) -> str | None:
    """Its name in `streamgrad.core.fused.ACTIVATIONS`; None for another one, and for one that hooks watch."""
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    if not isinstance(activation, nn.Module) or "forward" in activation.__dict__:
        return None
    hooks = (activation._forward_hooks, activation._forward_pre_hooks, activation._backward_hooks, activation._backward_pre_hooks)
    if any(hooks):
        return None
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return _ACTIVATION_NAMES.get(type(activation))


_ACTIVATION_NAMES: dict[type, str] = {
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
}
