"""Inputs of a decoder layer beside hidden states that hold something for each token and may need a gradient.

These are vectors of tokens, as Zamba 2's embeddings and a vector per token and layer (Gemma 4), and keys and values that an
earlier layer has left in the dict `shared_kv_states` for this one to attend to (Gemma 4). A streamed layer takes them as inputs
and returns those that it leaves as outputs.

Shapes: B batch, G key/value heads, T sequence, D head size.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Container, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.kv_chunk import Chunk, SeamError

_SHARED = "shared_kv_states"


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

    def __init__(self, arguments: dict[str, Any], h_shape: Sequence[int], *, but_for: Container[str]) -> None:
        """Take the inputs out of a layer's `arguments`, but for some names, given the shape of its hidden states."""
        self._shared: MutableMapping[str, tuple[Tensor, Tensor]] | None = arguments.pop(_SHARED, None)
        self._given = list(self._shared or ())
        self._written: list[str] = []
        self._vectors = [name for name, value in arguments.items() if name not in but_for and _are_vectors(value, h_shape)]
        self.tensors: list[Tensor] = [arguments.pop(name) for name in self._vectors]
        for name in self._given:
            assert self._shared is not None
            pair = _turned(self._shared[name])
            if any(states.shape[:2] != h_shape[:2] for states in pair):
                raise SeamError(
                    f"its layers share keys and values of shape {tuple(pair[0].shape)} beside hidden states of shape "
                    f"{tuple(h_shape)}, which do not have the same tokens"
                )
            self.tensors += pair

    @property
    def names(self) -> list[str]:
        """Return the names of the arguments that hold vectors, and of shared keys and values."""
        return [*self._vectors, *self._given]

    def arguments(self, chunk: Chunk) -> dict[str, Any]:
        """Return the layer's arguments for one chunk, made of the chunk's own tensors where it has them, as in backward."""
        if not self._vectors and self._shared is None:
            return {}
        tensors = chunk.token_inputs
        if tensors is None:
            tensors = [tensor[:, chunk.start : chunk.stop].detach() for tensor in self.tensors]
            if chunk.alone:
                tensors = [_varied(tensor, chunk.start) for tensor in tensors]
        count = len(self._vectors)
        found: dict[str, Any] = dict(zip(self._vectors, tensors[:count], strict=True))
        if self._shared is not None:
            keys = tensors[count:]
            pairs = zip(self._given, zip(keys[::2], keys[1::2], strict=True), strict=True)
            chunk.shared_keys = found[_SHARED] = _SharedKeys({name: _turned(pair) for name, pair in pairs})
        return found

    def note(self, chunk: Chunk, length: int) -> None:
        """Record what the layer has left for others in a chunk of so many tokens, which `hand_over` gives them."""
        if self._shared is None:
            return
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


def _are_vectors(value: Any, h_shape: Sequence[int]) -> bool:
    """Return whether an argument has a vector for each token, as hidden states, (B, T, E), have."""
    return isinstance(value, Tensor) and value.ndim == len(h_shape) == 3 and value.shape[:2] == h_shape[:2]


def _varied(tensor_BLE: Tensor, start: int) -> Tensor:
    """Return it with something added that every token has its own of: in a trial, zeros would hide what is done with them."""
    if not tensor_BLE.is_floating_point():
        return tensor_BLE
    places = torch.arange(start + 1, start + 1 + tensor_BLE.shape[1], dtype=torch.float64, device=tensor_BLE.device)
    return tensor_BLE + 0.1 * places.cos().to(tensor_BLE.dtype).view(1, -1, *[1] * (tensor_BLE.ndim - 2))


def _turned(pair: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return keys and values (B, G, T, D) as (B, T, G, D), and the other way round."""
    key, value = pair
    return key.transpose(1, 2), value.transpose(1, 2)
