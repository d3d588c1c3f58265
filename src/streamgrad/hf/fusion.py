"""Fused norms, gated activations, experts and rotary embeddings in place of transformers' own, while one layer is called.

A module is recognised by its code: its class's forward must have exactly the bytecode of one of the functions below, which dozens
of transformers' families share, or be the one that all experts share (`fused_experts`). Nothing else is touched: a forward that
is written differently, is wrapped, or was patched by another library (Liger, kernels from the hub) runs as it is.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from transformers import activations

from streamgrad.engine.linear_maps import nobody_watches
from streamgrad.engine.temporary import temporary_attributes
from streamgrad.hf.fused_experts import fused_experts, is_of_experts
from streamgrad.hf.known_code import same_code
from streamgrad.ops.autograd import in_transform
from streamgrad.ops.fused import Norm, gated, rms_norm, rotary


class Fusion:
    """The parts of some modules, such as those of one layer, that can run fused."""

    def __init__(self, modules: Iterable[nn.Module], *, mode: str) -> None:
        """Find these parts. `mode` is `StreamConfig.fused_kernels`: "auto" fuses 16-bit values on CUDA, "on" all, "off" none."""
        self._wants = functools.partial(_wants, mode)
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []
        self._rotary_globals: dict[int, dict[str, Any]] = {}
        for module in modules if mode != "off" else ():
            forward = type(module).forward
            form, rotates = _form_of(forward)
            if "forward" in module.__dict__:
                continue
            fused = None if form is None else _fused_forward(module, form, forward, self._wants)
            if fused is not None:
                self._forwards.append((module, fused))
            if rotates:
                names = forward.__globals__
                if id(names) not in self._rotary_globals and _is_known_rotary(_stock_rotary(names)):
                    self._rotary_globals[id(names)] = names

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Run the recognised parts fused within the block."""
        with ExitStack() as restore:
            restore.enter_context(temporary_attributes((module, "forward", forward) for module, forward in self._forwards))
            for names in self._rotary_globals.values():
                restore.enter_context(_RotarySwitch.on(names, self._wants))
            yield


def _wants(mode: str, first: Tensor, *others: Tensor) -> bool:
    """Return whether tensors have one dtype, which `mode` fuses; under autocast 16 bits only, which it does not cast here.

    Transforms of torch.func differentiate the stock code only.
    """
    dtype = first.dtype
    for other in others:
        if other.dtype is not dtype:
            return False
    is_wanted = mode == "on" or (first.is_cuda and dtype.itemsize == 2)
    if is_wanted and dtype.itemsize > 2 and torch.is_autocast_enabled(first.device.type):
        return False
    return is_wanted and not in_transform()


class _RotarySwitch:
    """A stand-in for `apply_rotary_pos_emb` in one file of transformers, while any thread runs a layer with it fused.

    Threads that asked for it run the fused function, all others the stock one. The last thread to leave puts that back.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, names: dict[str, Any]) -> None:
        self._names, self._stock, self._users = names, names["apply_rotary_pos_emb"], 0
        self._here = threading.local()

    @classmethod
    @contextmanager
    def on(cls, names: dict[str, Any], wants: Callable[..., bool]) -> Iterator[None]:
        with cls._lock:
            current = names["apply_rotary_pos_emb"]
            switch = names["apply_rotary_pos_emb"] = current if isinstance(current, cls) else cls(names)
            switch._users += 1
        before = getattr(switch._here, "wants", None)
        switch._here.wants = wants
        try:
            yield
        finally:
            switch._here.wants = before
            with cls._lock:
                switch._users -= 1
                if not switch._users and names["apply_rotary_pos_emb"] is switch:
                    names["apply_rotary_pos_emb"] = switch._stock

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        wants = getattr(self._here, "wants", None)
        same_for_all_heads = cos.dim() == 3 and unsqueeze_dim == 1 and cos.shape == sin.shape == (*cos.shape[:2], q.shape[-1])
        needs_gradient = cos.requires_grad or sin.requires_grad
        if wants is None or needs_gradient or not same_for_all_heads or not wants(q, k, cos, sin):
            return self._stock(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return rotary(q, k, cos, sin)


def _stock_rotary(names: dict[str, Any]) -> Any:
    found = names.get("apply_rotary_pos_emb")
    return found._stock if isinstance(found, _RotarySwitch) else found


def _is_known_rotary(function: Any) -> bool:
    halves = getattr(function, "__globals__", {}).get("rotate_half")
    return same_code(function, _apply_rotary) and same_code(halves, _rotate_half)


def _fused_forward(module: Any, form: str, forward: Any, wants: Callable[..., bool]) -> Callable[..., Tensor] | None:
    """Return a fused function that equals `forward`, the one of the module's class in this form, or None if none is known."""
    stock = types.MethodType(forward, module)
    if form == "gemma norm":
        if not same_code(getattr(type(module), "_norm", None), _gemma_norm_helper):
            return None
        return _fused_norm(module, Norm(module.eps, weight_offset=1.0), stock, wants)
    if form == "norm":
        return _fused_norm(module, Norm(module.variance_epsilon), stock, wants)
    activation = _activation_of(module)
    if activation is None:
        return None
    if form == "experts":
        return fused_experts(module, activation, wants)
    return (_fused_joint_mlp if form == "joint mlp" else _fused_mlp)(module, activation, stock, wants)


@functools.lru_cache(maxsize=1024)
def _form_of(forward: Any) -> tuple[str | None, bool]:
    """Return the form that a forward is written in, or None, and whether it looks `apply_rotary_pos_emb` up in its file.

    Cached by function, as a class's forward may be replaced.
    """
    rotates = "apply_rotary_pos_emb" in getattr(getattr(forward, "__code__", None), "co_names", ())
    if is_of_experts(forward):
        return "experts", rotates
    return next((form for reference, form in _FORMS.items() if same_code(forward, reference)), None), rotates


# --- Code that is recognised: these functions are only compared with, never called ---------------------------------------


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


_FORMS = {
    _llama_norm: "norm",
    _olmo_norm: "norm",
    _gemma_norm: "gemma norm",
    _gated_mlp: "mlp",
    _gated_mlp_in_one_line: "mlp",
    _joint_gated_mlp: "joint mlp",
}


def _rotate_half(x: Any) -> Any:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def _apply_rotary(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)  # type: ignore[name-defined]  # noqa: F821
    k_embed = (k * cos) + (rotate_half(k) * sin)  # type: ignore[name-defined]  # noqa: F821
    return q_embed, k_embed


# --- Fused code that runs instead -----------------------------------------------------------------------------------------


def _fused_norm(
    module: Any, norm: Norm, stock: Callable[[Tensor], Tensor], wants: Callable[..., bool]
) -> Callable[[Tensor], Tensor] | None:
    if not isinstance(norm.eps, float):
        return None

    def forward(x: Tensor) -> Tensor:
        weight = module.weight
        return rms_norm(x, weight, norm) if weight.shape == x.shape[-1:] and wants(x, weight) else stock(x)

    return forward


def _fused_mlp(
    module: Any, activation: str, stock: Callable[[Tensor], Tensor], wants: Callable[..., bool]
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not wants(x):
            return stock(x)
        consumed = nobody_watches(module.gate_proj) and nobody_watches(module.up_proj)
        return module.down_proj(gated(module.gate_proj(x), module.up_proj(x), activation, consumed=consumed))

    return forward


def _fused_joint_mlp(
    module: Any, activation: str, stock: Callable[[Tensor], Tensor], wants: Callable[..., bool]
) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        if not wants(x):
            return stock(x)
        gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
        return module.down_proj(gated(gate, up, activation, consumed=nobody_watches(module.gate_up_proj)))

    return forward


def _activation_of(module: nn.Module) -> str | None:
    """Return an MLP's activation by its name in `streamgrad.ops.fused.ACTIVATIONS`; None for others, and for one with hooks."""
    activation: Any = getattr(module, "act_fn", None)
    if activation is None:  # a compiled one has no truth value
        activation = getattr(module, "activation_fn", None)
    kind = type(activation)
    if kind not in _ACTIVATION_NAMES or kind.__dict__["forward"] is not _ACTIVATION_FORWARDS[kind]:
        return None
    if "forward" in activation.__dict__:
        return None
    hooks = (activation._forward_hooks, activation._forward_pre_hooks, activation._backward_hooks, activation._backward_pre_hooks)
    if any(hooks) or _module._has_any_global_hook():
        return None
    if kind is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    return _ACTIVATION_NAMES[kind]


_ACTIVATION_NAMES: dict[type, str] = {
    nn.SiLU: "silu",
    nn.GELU: "gelu",  # or gelu_tanh
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.GELUTanh: "gelu_tanh",
    activations.NewGELUActivation: "gelu_tanh",
}
# The forwards at import time, to compare with: a program may replace them later.
_ACTIVATION_FORWARDS = {kind: kind.__dict__["forward"] for kind in _ACTIVATION_NAMES}
