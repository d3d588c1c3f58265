"""What stands where streaming has no value: logits that were never made, a cache, arguments that cannot be cut.

None would do for the engines that walk over outputs, but whoever computes with it reads an error about NoneType, or goes on
without what it stands for. Here every use raises an error that says what to do. Engines ask for attributes by `hasattr`, copy and
pickle; all of that works.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from streamgrad.engine.kv_chunk import SeamError, UnknownSeamAttribute

_OPERATORS = (
    "getitem setitem delitem len iter contains bool float int index complex array call round abs neg pos invert "
    "eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul "
    "and rand or ror xor rxor"
)


class Unusable:
    """Takes the place of a value that there is not; any use raises."""

    reason: ClassVar[str]
    name: ClassVar[str]
    error: ClassVar[type[Exception]] = TypeError

    def __getattr__(self, name: str) -> NoReturn:
        if self.error is TypeError:
            raise AttributeError(f"{self.reason} ({name!r} was read.)")
        raise self.error(self.reason)

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        cls._refuse(getattr(function, "__name__", function))

    @classmethod
    def _refuse(cls, name: Any) -> NoReturn:
        raise cls.error(f"{cls.reason} ({name} was called.)" if cls.error is TypeError else cls.reason)

    def __repr__(self) -> str:
        return f"<no {self.name} while streaming>"

    __hash__ = object.__hash__


def _operator(name: str) -> Any:
    def refuse(self: Unusable, *_: Any, **__: Any) -> NoReturn:
        self._refuse(name)

    return refuse


for _name in _OPERATORS.split():
    setattr(Unusable, f"__{_name}__", _operator(f"__{_name}__"))


class NoLogits(Unusable):
    name = "logits"
    reason = (
        "streamgrad makes no logits in model(..., labels=...) while gradients are computed: they never all exist at once. "
        "Call the model under torch.no_grad() or without labels to get them, or streamgrad.token_logprobs for log-probabilities "
        "and entropies without them."
    )


class NoCache(Unusable):
    name = "cache"
    reason = (
        "streamgrad fills no cache while gradients are computed, so a later call would not see this one's tokens. Pass the whole "
        "sequence in one call, fill the cache under torch.no_grad(), or call streamgrad.disable(model)."
    )


class NoWeights(Unusable):
    name = "attention weights"
    reason = (
        "its layers read the weights of their attention, which eager attention returns and streamed attention never holds; if "
        "they are not needed, use model.set_attn_implementation('sdpa'), which returns none"
    )
    error = UnknownSeamAttribute


def uncut(name: str, value: Any, shapes: Sequence[Sequence[int]]) -> Any:
    """Return what stands for a layer's argument that nobody knows how to cut; most layers hand it on, and read it nowhere.

    It passes for one of the value's kind: a layer that computes with tensors, and ignores what is none, must not ignore it.
    """
    kind: Any = Tensor if isinstance(value, Tensor) else type(value)
    made = _uncut(name, tuple(shapes), kind)
    return torch.empty(value.shape, dtype=value.dtype, device="meta").as_subclass(made) if kind is Tensor else made()


@functools.lru_cache(maxsize=64)
def _uncut(name: str, shapes: tuple[Sequence[int], ...], kind: Hashable) -> type[Any]:
    listed = ", ".join(str(tuple(shape)) for shape in shapes)
    reason = f"its layers read {name} of shape {listed}, and how to cut it into chunks is not known"
    members = {"name": name, "reason": reason, "error": SeamError}
    if kind is Tensor:  # a true one: torch's own code takes everything that says it is a tensor for its own layout
        return type("UncutTensor", (Unusable, Tensor), members)
    return type("Uncut", (Unusable,), members | {"__class__": property(lambda self: kind)})
