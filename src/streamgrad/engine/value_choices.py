"""Notes whether something is chosen by values, as a router chooses experts.

    with ValueChoices() as choices:
        layer(h)
    choices.made

Where two values are nearly equal, rounding decides. A product of several chunks rounds in another way than that of one, so a
layer that chooses has to run forward as it is run again in backward, chunk by chunk: else a token's gradient could be of another
expert than its loss. Rounding to a grid is no choice, as it changes a value by no more than the grid is fine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_COMPARING = {aten.gt, aten.ge, aten.lt, aten.le, aten.sign, aten.heaviside}  # floating-point values
_INDEXING = {aten.index, aten.index_put, aten.index_put_}  # by conditions
# By the order of values, or by one that the program reads. Products in 8 bits scale all tokens by the largest value.
_CHOOSING = {
    aten.topk, aten.sort, aten.argsort, aten.kthvalue, aten.median, aten.nanmedian, aten.mode, aten.argmax, aten.argmin, aten.max,
    aten.min, aten.amax, aten.amin, aten.aminmax, aten.cummax, aten.cummin, aten.nonzero, aten.masked_select, aten.searchsorted,
    aten.bucketize, aten.histc, aten._unique2, aten._local_scalar_dense, aten._int_mm, aten._scaled_mm,
}  # fmt: skip


class ValueChoices(TorchDispatchMode):
    """Sets `made` if an operation within the block chooses by values."""

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, operator = function(*args, **(kwargs or {})), function.overloadpacket
        if operator in _COMPARING:
            self.made |= args[0].is_floating_point()
        elif operator in _INDEXING:
            self.made |= any(index is not None and index.dtype == torch.bool for index in args[1])
        elif operator is aten._to_copy:
            self.made |= args[0].is_floating_point() and not _is_floating(result)
        else:
            self.made |= operator in _CHOOSING or "int8" in function.name()
        return result


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
