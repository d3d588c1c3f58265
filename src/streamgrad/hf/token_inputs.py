"""Inputs of a decoder layer beside hidden states that hold something for each token and have a gradient (Gemma 4).

These are a vector per token and layer, `per_layer_input`, and keys and values that an earlier layer has left in the dict
`shared_kv_states` for this one to attend to. A streamed layer takes them as inputs and returns those that it leaves as outputs.

Shapes: B batch, G key/value heads, T sequence, D head size.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from streamgrad.engine.kv_chunk import LayerChunk, SeamError

_VECTOR, _SHARED = "per_layer_input", "shared_kv_states"


class _SharedKeys(UserDict[str, tuple[Tensor, Tensor]]):
    """The dict that a layer is given for one chunk, which notes what the layer writes."""

    def __init__(self, given: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.written: list[str] = []
        super().__init__(given)
        self.written.clear()

    def __setitem__(self, name: str, pair: tuple[Tensor, Tensor]) -> None:
        self.written.append(name)
        super().__setitem__(name, pair)


class TokenInputs:
    """The inputs of one layer call: `tensors`, with tokens along the second axis of each, and the arguments they stand for."""

    def __init__(self, arguments: dict[str, Any], h_shape: Sequence[int]) -> None:
        """Take the inputs out of a layer's `arguments`, given the shape of its hidden states."""
        self._shared: MutableMapping[str, tuple[Tensor, Tensor]] | None = arguments.pop(_SHARED, None)
        self._given = list(self._shared or ())
        self._written: list[str] = []
        self._has_vector = isinstance(arguments.get(_VECTOR), Tensor)
        self.tensors: list[Tensor] = [arguments.pop(_VECTOR)] if self._has_vector else []
        for name in self._given:
            self.tensors += _turned(self._shared[name])
        for tensor in self.tensors:
            if tensor.shape[:2] != h_shape[:2]:
                raise SeamError(
                    f"its layers take an input of shape {tuple(tensor.shape)} beside hidden states of shape {tuple(h_shape)}, "
                    "which do not have the same tokens"
                )

    def arguments(self, chunk: LayerChunk, start: int, stop: int) -> dict[str, Any]:
        """Return the layer's arguments for one chunk, made of the chunk's own tensors where it has them, as in backward."""
        tensors = chunk.token_inputs
        if tensors is None:
            tensors = [tensor[:, start:stop].detach() for tensor in self.tensors]
        found: dict[str, Any] = {_VECTOR: tensors[0]} if self._has_vector else {}
        if self._shared is not None:
            keys = tensors[self._has_vector :]
            pairs = zip(self._given, zip(keys[::2], keys[1::2], strict=True), strict=True)
            chunk.shared_keys = found[_SHARED] = _SharedKeys({name: _turned(pair) for name, pair in pairs})
        return found

    def note(self, chunk: LayerChunk, length: int) -> None:
        """Record what the layer has left for others in a chunk of so many tokens, which `hand_over` gives them."""
        if isinstance(chunk.shared_keys, _SharedKeys):
            self._written = chunk.shared_keys.written
        for name in self._written:
            pair = chunk.shared_keys[name]  # type: ignore[index]
            if any(states.ndim != 4 or states.shape[2] != length for states in pair):
                shapes = ", ".join(str(tuple(states.shape)) for states in pair)
                raise SeamError(f"its layers share keys and values of shape {shapes}, and how to cut them is not known")
            chunk.recorded += _turned(pair)

    def hand_over(self, recorded: Sequence[Tensor]) -> Sequence[Tensor]:
        """Give the whole sequence's keys and values, the last ones of `recorded`, to later layers; return the others."""
        count = len(recorded) - 2 * len(self._written)
        for index, name in enumerate(self._written):
            assert self._shared is not None
            self._shared[name] = _turned(recorded[count + 2 * index : count + 2 * index + 2])
        return recorded[:count]


def _turned(pair: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, G, T, D) as (B, T, G, D), and the other way round."""
    key, value = pair
    return key.transpose(1, 2), value.transpose(1, 2)
