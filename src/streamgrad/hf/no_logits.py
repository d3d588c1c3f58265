"""What stands in `outputs.logits` while a head is streamed: no tensor, and an error that says so at the first use of it.

None would do for the engines that walk over outputs, but whoever computes with it reads an error about NoneType. Engines ask for
attributes by `hasattr`, copy and pickle; all of that works here.
"""

from __future__ import annotations

from typing import Any, NoReturn

_REASON = (
    "streamgrad makes no logits in model(..., labels=...) while gradients are computed: all of them never exist at a time. Call "
    "the model under torch.no_grad() or without labels to get them, or streamgrad.token_logprobs for log-probabilities and "
    "entropies without them."
)
_OPERATORS = (
    "getitem setitem delitem len iter contains bool float int index complex array call round abs neg pos invert "
    "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor"
)


class NoLogits:
    """Takes the place of logits that were never made; any use raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{_REASON} ({name!r} was read.)")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{_REASON} ({getattr(function, '__name__', function)} was called.)")

    def __repr__(self) -> str:
        return "<no logits while streaming>"

    __hash__ = object.__hash__


def _refuse(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"{_REASON} ({name} was called.)")

    return refuse


for _name in _OPERATORS.split():
    setattr(NoLogits, f"__{_name}__", _refuse(f"__{_name}__"))
