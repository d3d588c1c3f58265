"""Parameter gradients that are summed over chunks and leave once.

A *shadow* is a leaf tensor that shares a parameter's storage. While chunks run backward, the module holds shadows in place of
its trainable parameters, so autograd sums the chunks' gradients in the shadows (in fp32 for 16-bit parameters) and nothing
that watches the real parameters, a user's hook, DDP, FSDP or DeepSpeed, sees more than the one gradient that is returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from streamgrad.core.chunk import accumulator_dtype


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Read afresh at every call: adapters are attached, switched and frozen between steps."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


class Shadows:
    """Shadows of `parameters`, in their order."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.tensors = [_shadow(parameter) for parameter in self.parameters]

    @contextmanager
    def installed_in(self, module: nn.Module) -> Iterator[None]:
        """Within the block, `module` and its submodules read the shadows wherever they hold one of the parameters.

        Entries of `_parameters` are swapped, which no hook or engine observes, and put back whatever happens.
        """
        shadow_of = {id(parameter): shadow for parameter, shadow in zip(self.parameters, self.tensors, strict=True)}
        swapped: list[tuple[dict, str, nn.Parameter]] = []
        try:
            for submodule in module.modules():
                for name, parameter in submodule._parameters.items():
                    if parameter is not None and id(parameter) in shadow_of:
                        swapped.append((submodule._parameters, name, parameter))
                        submodule._parameters[name] = shadow_of[id(parameter)]  # type: ignore[assignment]
            yield
        finally:
            for entries, name, parameter in swapped:
                entries[name] = parameter

    def gradients(self) -> list[Tensor | None]:
        """The summed gradients in the parameters' own dtype; None where no chunk reached the parameter.

        None and not zeros, so that optimizers and engines treat an unused parameter as they would without streaming.
        """
        return [
            None if shadow.grad is None else shadow.grad.to(parameter.dtype)
            for parameter, shadow in zip(self.parameters, self.tensors, strict=True)
        ]


def _shadow(parameter: Tensor) -> Tensor:
    shadow = parameter.detach().requires_grad_()
    sum_dtype = accumulator_dtype(parameter.dtype)
    if sum_dtype is not parameter.dtype:
        shadow.grad_dtype = sum_dtype
    return shadow
