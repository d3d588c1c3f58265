"""The arguments of a decoder layer, cut to one chunk of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.engine.kv_chunk import Chunk, SeamError
from streamgrad.engine.recurrent_chunk import RecurrentChunk
from streamgrad.hf.patching import named_arguments, signature_of
from streamgrad.hf.token_inputs import TokenInputs
from streamgrad.hf.unusable import NoWeights, uncut

CACHE_NAMES = ("past_key_values", "layer_past", "past_key_value", "cache_params")

# Arguments that say where packed documents begin.
DOCUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
# Of recurrent layers, (B, T): they set padded tokens to zero.
_PADDING_MASKS = {"attention_mask", "mamba_attention_mask"}
# The axis of each per-token argument that runs over the sequence.
_TOKEN_AXIS = {"position_ids": -1, "position_embeddings": -2, "cache_position": 0, "seq_idx": -1} | dict.fromkeys(
    _PADDING_MASKS, -1
)
# Arguments about the whole batch, which are passed uncut.
_WHOLE = {*DOCUMENTS, "num_items_in_batch", "ignore_index", "labels", "shift_labels"} - {"seq_idx"}


@dataclass
class LayerArguments:
    """The arguments of one call `layer(hidden_states, **others)`, with which `run` calls the layer on a chunk.

    Hidden states are not among them: backward holds this object, and by then they may have been moved off the device.
    """

    forward: Callable[..., Any]
    attention_mask: Any
    others: dict[str, Any]
    cache_name: str
    mask_name: str
    token_inputs: TokenInputs
    cut: Sequence[str] = ()  # names of what is cut to a chunk
    beside: tuple[NoWeights | None, ...] | None = None  # what the layer returns beside hidden states, where it returns a tuple

    @classmethod
    def bind(cls, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LayerArguments]:
        """Return the hidden states of the call, and all its other arguments."""
        names = signature_of(forward).parameters
        values = named_arguments(forward, args, kwargs)
        if len(values) < len(args) + len(kwargs):
            raise SeamError("its layers take unnamed positional arguments")
        cache_name = cache_argument(forward)
        if cache_name is None:
            raise SeamError(f"its layers take no key/value cache (none of {', '.join(CACHE_NAMES)})")
        hidden_states = values.pop(next(iter(names)))
        masks = [name for name, value in values.items() if name.endswith("mask") and is_causal_mask(value)]
        mask_name = "attention_mask" if "attention_mask" in masks or not masks else masks[0]
        attention_mask = values.pop(mask_name, None)
        values.pop(cache_name, None)
        values.pop("use_cache", None)
        token_inputs = TokenInputs(values, hidden_states.shape, but_for=_TOKEN_AXIS.keys() | _WHOLE)
        values = {name: _passed_on(name, value) for name, value in values.items()}
        cut = [name for name, value in values.items() if name in _TOKEN_AXIS and value is not None]
        return hidden_states, cls(forward, attention_mask, values, cache_name, mask_name, token_inputs, cut)

    def run(self, h_BLE: Tensor, chunk: Chunk) -> Tensor:
        """Return the layer's hidden states for one chunk, taken out of the tuple that some layers return."""
        others = self.others | self.token_inputs.arguments(chunk)
        for name in self.cut:
            others[name] = _cut(name, others[name], chunk)
        others[self.cache_name] = others[self.mask_name] = chunk
        if isinstance(chunk, RecurrentChunk):
            others = {name: value for name, value in others.items() if name not in DOCUMENTS}  # chunks keep them apart
            if not is_causal_mask(self.attention_mask):
                others[self.mask_name] = _cut(self.mask_name, self.attention_mask, chunk)
        out = self.forward(h_BLE, **others)
        if isinstance(out, tuple):
            if any(value is not None and type(value) is not NoWeights for value in out[1:]):
                raise SeamError(f"its layers return {len(out)} values, and only hidden states can be streamed")
            out, self.beside = out[0], out[1:]
        if not isinstance(out, Tensor) or out.shape[:2] != h_BLE.shape[:2]:
            raise SeamError("its layers do not return one hidden state per token")
        return out


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """Return the name of a layer's key/value cache argument, or None if it takes none.

    A layer around another hands on what it has no name for; if the cache gets lost on the way, the layer is refused when it runs.
    """
    names = signature_of(forward).parameters
    named = next((name for name in CACHE_NAMES if name in names), None)
    hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
    return named or (CACHE_NAMES[0] if hands_on else None)


def _passed_on(name: str, value: Any) -> Any:
    """Return an argument, or what raises as soon as it is read if it has tensors that nobody knows how to cut.

    Raise for one that needs a gradient.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    leaves = value if type(value) is tuple else [value]
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        leaves = torch.utils._pytree.tree_leaves(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(tensor.requires_grad for tensor in tensors):
        raise SeamError(f"its layers take {name}, which needs a gradient that a streamed layer would not give it")
    if tensors and name not in _TOKEN_AXIS and name not in _WHOLE:
        return uncut(name, value, [tensor.shape for tensor in tensors])
    return value


def is_causal_mask(value: Any) -> bool:
    """Return whether an argument says what attention sees, (T x T) if written out; a padding mask, (B, T), does not."""
    return isinstance(value, CausalMask | DenseMask) or (isinstance(value, Tensor) and value.ndim == 4)


def _cut(name: str, value: Any, chunk: Chunk) -> Any:
    if value is None or (name in _PADDING_MASKS and chunk.alone):
        return None  # else random tokens would be set to zero, as padding is
    axis, start, stop = _TOKEN_AXIS[name], chunk.start, chunk.stop
    if isinstance(value, Tensor):
        is_whole = start == 0 and stop == value.shape[axis]
        return value if is_whole else value.narrow(axis, start, stop - start)
    if isinstance(value, dict):
        return {key: _cut(name, item, chunk) for key, item in value.items()}
    return type(value)([_cut(name, item, chunk) for item in value])
