"""Checks that a layer's re-run in backward is the computation whose output went into the loss.

Between forward and backward a program may switch an adapter, call `eval()`, load weights or remove a hook. Gradients of the
re-run would then belong to another function. Autograd notices such changes for the tensors it saved; a streamed layer saves its
input only, so what it reads through the module is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

_REMEDY = "Call backward before changing the model, or call streamgrad.disable(model) for such a step."


class Expectation:
    """What was true of a layer's parameters, and what each of its chunks gave, when it ran forward."""

    def __init__(self, layer: nn.Module, parameters: Sequence[Tensor]) -> None:
        self.layer, self.parameters = layer, parameters
        self._versions = [parameter._version for parameter in layer.parameters()]
        self._last_rows: list[Tensor] = []
        self._rows_again: dict[int, Tensor] = {}

    def note(self, out_BLE: Tensor) -> None:
        """Remember the last token of a chunk's output: nearly everything a layer reads has a part in it."""
        self._last_rows.append(out_BLE[:, -1].detach().clone())

    def check_parameters(self) -> None:
        versions = [parameter._version for parameter in self.layer.parameters()]
        if versions != self._versions:
            raise RuntimeError(
                f"a parameter of {type(self.layer).__name__} was modified in place between forward and backward, so gradients "
                f"would be wrong. {_REMEDY}"
            )
        known = {id(parameter) for parameter in self.parameters}
        if any(parameter.requires_grad and id(parameter) not in known for parameter in self.layer.parameters()):
            raise RuntimeError(
                f"a parameter of {type(self.layer).__name__} that was frozen in forward is trainable in backward (an adapter was "
                f"switched, or a layer unfrozen), so gradients would be wrong. {_REMEDY}"
            )

    def check_leaves(self, out_BLE: Tensor, leaves: Sequence[Tensor]) -> None:
        """A trainable tensor that is not the layer's own, say from a hook, would get its gradient around autograd."""
        allowed = {id(leaf) for leaf in leaves}
        nodes, seen = [out_BLE.grad_fn], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, Tensor) and id(variable) not in allowed:
                raise RuntimeError(
                    f"{type(self.layer).__name__} reads a trainable tensor of shape {tuple(variable.shape)} that is not among "
                    "its parameters (from a hook, or shared from outside the layer), and a streamed layer cannot return its "
                    "gradient. Register it as a parameter of the layer, or call streamgrad.disable(model)."
                )
            nodes += [following for following, _ in node.next_functions]

    def note_again(self, index: int, out_BLE: Tensor) -> None:
        """The same of the re-run of chunk `index`."""
        self._rows_again[index] = out_BLE[:, -1].detach().clone()

    def check_outcome_later(self, *, in_16_bits: bool) -> None:
        """When the backward pass that is under way ends, so that no layer waits for the device."""
        deviation = self._largest_deviation()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self._check_outcome(deviation.item(), in_16_bits))

    def _largest_deviation(self) -> Tensor:
        """How far the re-run of any chunk is from what was noted."""
        again_CN = torch.stack([self._rows_again[index] for index in range(len(self._last_rows))]).flatten(1).float()
        noted_CN = torch.stack(self._last_rows).flatten(1).float()
        deviation_C = (again_CN - noted_CN).norm(dim=1) / noted_CN.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self._rows_again.clear()
        # Not finite again is as it was; not finite where it was finite is a difference.
        return torch.where(noted_CN.isfinite().all(dim=1), deviation_C.nan_to_num(nan=torch.inf), 0.0).max()

    def _check_outcome(self, deviation: float, in_16_bits: bool) -> None:
        # Far above what another kernel or another order of sums gives, far below what another mask or adapter gives.
        allowed = 0.05 if in_16_bits else 1e-3
        if deviation > allowed:
            raise RuntimeError(
                f"{type(self.layer).__name__} computed something else when it was run again for backward (relative difference "
                f"{deviation:.1e}): an adapter, a hook, train/eval mode, weights or a random state of its own changed since "
                f"forward, so gradients would be wrong. {_REMEDY}"
            )
