"""Checks that a layer's re-run in backward is the computation whose output went into the loss.

Between forward and backward a program may switch an adapter, call `eval()`, load weights or remove a hook. Gradients of the
re-run would then belong to another function. Autograd notices such changes for the tensors it saved; a streamed layer saves its
input only, so what it reads through the module is checked here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from streamgrad.engine.module_walk import modules_of, parameters_of

_REMEDY = "Call backward before changing the model, or call streamgrad.disable(model) for such a step."

# What decides which parameters an adapter of PEFT's uses, and how. A new adapter changes no value, so that only these tell.
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


class RerunGuard:
    """What was true of a layer, and what each of its chunks gave, when it ran forward."""

    def __init__(self, layer: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.layer, self.parameters = layer, parameters
        self._versions = _versions_of(layer)
        self._state = _state_of(layer)
        self._last_rows: list[Tensor] = []
        self._rows_again: dict[int, Tensor] = {}

    def note(self, out_BLE: Tensor) -> None:
        """Remember the last token of a chunk's output: nearly everything a layer reads has a part in it."""
        self._last_rows.append(out_BLE[:, -1].detach().clone())

    def check_unchanged(self) -> None:
        now = _versions_of(self.layer)
        if now.keys() != self._versions.keys():
            raise RuntimeError(
                f"parameters of {type(self.layer).__name__} were replaced between forward and backward (by "
                "load_state_dict(assign=True), functional_call or assignment), so gradients would be wrong. " + _REMEDY
            )
        if now != self._versions:
            raise RuntimeError(
                f"a parameter of {type(self.layer).__name__} was modified in place between forward and backward, so gradients "
                f"would be wrong. {_REMEDY}"
            )
        known = {id(parameter) for parameter in self.parameters}
        if any(parameter.requires_grad and id(parameter) not in known for parameter in parameters_of(self.layer)):
            raise RuntimeError(
                f"a parameter of {type(self.layer).__name__} that was frozen in forward is trainable in backward (an adapter was "
                f"switched, or a layer unfrozen), so gradients would be wrong. {_REMEDY}"
            )
        if _state_of(self.layer) != self._state:
            raise RuntimeError(
                f"{type(self.layer).__name__} was changed between forward and backward (an adapter was switched or scaled, "
                f"train/eval mode of a dropout, or a hook on an adapter), so gradients would be wrong. {_REMEDY}"
            )

    def note_again(self, index: int, out_BLE: Tensor) -> None:
        """The same of the re-run of chunk `index`."""
        self._rows_again[index] = out_BLE[:, -1].detach().clone()

    def check_outcome_later(self, *, in_16_bits: bool) -> None:
        """When the backward pass that is under way ends, so that no layer waits for the device."""
        # Not a method: until then, what was noted of every layer would be held.
        check = functools.partial(_check_outcome, type(self.layer).__name__, self._largest_deviation(), in_16_bits)
        torch.autograd.Variable._execution_engine.queue_callback(check)

    def _largest_deviation(self) -> Tensor:
        """How far the re-run of any chunk is from what was noted."""
        again_CN = torch.stack([self._rows_again[index] for index in range(len(self._last_rows))]).flatten(1).float()
        noted_CN = torch.stack(self._last_rows).flatten(1).float()
        deviation_C = (again_CN - noted_CN).norm(dim=1) / noted_CN.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self._rows_again.clear()
        # Not finite again is as it was; not finite where it was finite is a difference.
        return torch.where(noted_CN.isfinite().all(dim=1), deviation_C.nan_to_num(nan=torch.inf), 0.0).max()


def _check_outcome(layer: str, deviation: Tensor, in_16_bits: bool) -> None:
    # Far above what another kernel or another order of sums gives, far below what another mask or adapter gives.
    allowed = 0.05 if in_16_bits else 1e-3
    if deviation.item() > allowed:
        raise RuntimeError(
            f"{layer} computed something else when it was run again for backward (relative difference {deviation.item():.1e}): "
            "an adapter, a hook, train/eval mode, weights or a random state of its own changed since forward, so gradients would "
            f"be wrong. {_REMEDY}"
        )


def _versions_of(layer: nn.Module) -> dict[int, int | None]:
    """By parameter; None for those whose version tells nothing, as PEFT's adapters of experts set and restore them in forward."""
    modules: list[Any] = modules_of(layer)
    restored = {id(module.get_param()) for module in modules if _is_param_wrapper(type(module))}  # type: ignore[arg-type]
    return {id(each): None if id(each) in restored else each._version for each in parameters_of(layer)}


@functools.lru_cache(maxsize=1024)
def _is_param_wrapper(kind: type) -> bool:
    """By its name in PEFT."""
    return any(base.__name__ == "ParamWrapper" for base in kind.__mro__)


def _state_of(layer: nn.Module) -> list[Any]:
    """Of each module, what a program may switch without a parameter or, at first, a value changing."""
    state: list[Any] = []
    for module in modules_of(layer):
        own = module.__dict__
        # By such hooks PEFT chooses adapters by row. Those of other modules may come and go if they only look on.
        if "_active_adapter" in own:
            state.append((tuple(own["_forward_pre_hooks"]), tuple(own["_forward_hooks"])))
        if isinstance(module, _DropoutNd) and module.p > 0.0:
            state.append(module.training)
        state += [(name, _copied(own[name])) for name in _SWITCHES if name in own]
    return state


def _copied(value: Any) -> Any:
    """Of a switch: it may be changed in place. One name is as good as a list of one: PEFT makes the one of the other."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if isinstance(each, int | float)}
    if isinstance(value, list | str):
        return (value,) if isinstance(value, str) else tuple(value)
    return value if isinstance(value, int | float) else None


def check_leaves(out: Tensor, leaves: Sequence[Tensor], module: nn.Module) -> None:
    """A trainable tensor that is not the module's own, say from a hook, would get its gradient around autograd."""
    allowed = {id(leaf) for leaf in leaves}
    nodes, seen = [out.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor) and id(variable) not in allowed:
            raise RuntimeError(
                f"{type(module).__name__} reads a trainable tensor of shape {tuple(variable.shape)} that is not among "
                "its parameters (from a hook, or shared from outside of it), and a streamed module cannot return its "
                "gradient. Register it as a parameter of the module, or call streamgrad.disable(model)."
            )
        nodes += [following for following, _ in node.next_functions]


def gradient_of_input(leaf: Tensor, module: nn.Module) -> Tensor:
    """What a chunk's backward has left; where there is none, other layers would get gradients of zero in place of none."""
    if leaf.grad is None:
        raise RuntimeError(
            f"{type(module).__name__} gives its input no gradient (it detaches it, or runs under no_grad), and a streamed module "
            "cannot pass that on. Freeze what comes before it, or call streamgrad.disable(model)."
        )
    return leaf.grad
