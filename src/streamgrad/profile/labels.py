"""What an allocation is, by the Python frames that led to it; by its size where autograd's own nodes made it, which have none.

Files of `core`, `attention` and `head` are named here, so a test holds each rule to a tensor that is known to fall under it.

Known limits: sizes can coincide. A gradient of queries as large as the keys of the whole sequence (as many chunks as query heads
to a key head, with a kernel that takes all keys at once) counts as keys and values. Without streaming, layers' keys and values
are activations, as they are for autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamgrad.ops.accumulate import accumulator_dtype

# (file, function), the innermost first.
Frames = Sequence[tuple[str, str]]

_ENGINE = ("engine/", "ops/", "attention/", "head/")
# These make tensors on behalf of whoever called them.
_HELPERS = ("ops/accumulate.py", "engine/replay.py")
_LOGIT_FILES = ("head/softmax.py", "head/softmax_kernels.py", "head/module_head.py")


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors that are recognised by their size, in the model's precision and in that of sums."""

    logits: frozenset[int]
    head_gradient: frozenset[int]
    keys: frozenset[int]

    @classmethod
    def of(cls, dtype: torch.dtype, *, tokens: int, vocabulary: int, width: int, key_width: int) -> Sizes:
        """`tokens` of the whole batch; `key_width` is key heads times their size."""
        items = {dtype.itemsize, accumulator_dtype(dtype).itemsize}
        numbers = (tokens * vocabulary, vocabulary * width, tokens * key_width)
        return cls(*(frozenset(number * item for item in items) for number in numbers))

    @classmethod
    def of_model(cls, model: Any, tokens: int) -> Sizes:
        """By the configuration of a Hugging Face model."""
        text = model.config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
        key_width = head_size * (getattr(text, "num_key_value_heads", None) or heads)
        return cls.of(model.dtype, tokens=tokens, vocabulary=text.vocab_size, width=text.hidden_size, key_width=key_width)


def category_of(frames: Frames, size: int, sizes: Sizes) -> str:
    """One of `timeline.CATEGORIES`; parameters, gradients and kept inputs are recognised by identity as well, elsewhere."""
    own = [(name, function) for file, function in frames if (name := _own_name(file)) and name.startswith(_ENGINE)]
    if not own:
        return _outside(frames, size, sizes)
    name, function = next((frame for frame in own if frame[0] not in _HELPERS), own[0])
    if name == "engine/kv_chunk.py":
        return "keys and values"
    sums = ("take_gradient", "take_sums", "take_gradients", "_converted")
    if name == "engine/grad_accumulator.py" and (own[0][1] == "zeros_for_sum" or function in sums):
        return "gradients"
    if name in ("engine/host_offload.py", "engine/saved.py"):
        return "kept inputs"  # on their way back from the host
    if name.startswith("head/"):
        return _in_head(name, function, size, sizes)
    if name.startswith("attention/") and size in sizes.keys and "backward" in [function for _, function in own]:
        return "keys and values"  # the first gradient of all keys becomes their sum
    # The layer's own code makes tensors of the whole sequence; whatever it calls works on a chunk.
    return "other" if _own_name(frames[0][0]) == "engine/layer.py" else "activations"


def _in_head(name: str, function: str, size: int, sizes: Sizes) -> str:
    if name in _LOGIT_FILES or (name == "head/linear_head.py" and function == "product"):
        return "logits"
    return "gradients" if size in sizes.head_gradient else "other"


def _outside(frames: Frames, size: int, sizes: Sizes) -> str:
    """Made by transformers' code or by autograd, in whose threads there may be no Python frame at all."""
    if size in sizes.logits:
        return "logits"
    if any("/transformers/" in file for file, _ in _slashes(frames)):
        return "activations"
    if frames and not any(function == "_engine_run_backward" for _, function in frames):
        return "other"
    return "gradients" if size in sizes.head_gradient else "activations"


def _own_name(file: str) -> str:
    """`engine/layer.py` for a file of this library; empty for any other."""
    return file.replace("\\", "/").rpartition("/streamgrad/")[2] if "streamgrad" in file else ""


def _slashes(frames: Frames) -> Iterable[tuple[str, str]]:
    return ((file.replace("\\", "/"), function) for file, function in frames)
