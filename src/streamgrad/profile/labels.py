"""Says what an allocation is: by its label where it has one, else by the Python frames that led to it and by its size.

The engine labels its memory (`ops.memory_label`). Stock code has no labels. Autograd's own nodes have no Python frames either, so
there all logits and the gradient of the head are known by their sizes.

Known limits: sizes can coincide. Without streaming, layers' keys and values are activations, which they are for autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.profile.timeline import CATEGORIES

# (file, function), the innermost first.
Frames = Sequence[tuple[str, str]]

CATEGORY_OF_LABEL = {name: name for name in CATEGORIES} | {"hidden states": "other", "token scores": "other"}


@dataclass(frozen=True)
class Sizes:
    """Bytes of tensors that are recognised by their size, in the model's precision and in that of sums."""

    logits: frozenset[int]
    head_gradient: frozenset[int]

    @classmethod
    def of(cls, dtype: torch.dtype, *, tokens: int, vocabulary: int, width: int) -> Sizes:
        """Return the sizes for a batch of `tokens` in all."""
        items = {dtype.itemsize, accumulator_dtype(dtype).itemsize}
        return cls(*(frozenset(number * item for item in items) for number in (tokens * vocabulary, vocabulary * width)))

    @classmethod
    def of_model(cls, model: Any, tokens: int) -> Sizes:
        """Return the sizes by the configuration of a Hugging Face model."""
        text = model.config.get_text_config(decoder=True)
        return cls.of(model.dtype, tokens=tokens, vocabulary=text.vocab_size, width=text.hidden_size)


def category_of(label: str | None, frames: Frames, size: int, sizes: Sizes) -> str:
    """Return one of `timeline.CATEGORIES`. Recorders recognise parameters, gradients and kept inputs by identity as well."""
    return CATEGORY_OF_LABEL.get(label or "") or _without_label(frames, size, sizes)


def _without_label(frames: Frames, size: int, sizes: Sizes) -> str:
    """Return the category of what transformers' code, autograd or the caller's own code has made."""
    if size in sizes.logits:
        return "logits"
    frames = [(file.replace("\\", "/"), function) for file, function in frames]
    if any("/transformers/" in file for file, _ in frames):
        return "activations"
    if not _in_backward(frames):
        return "other"
    return "gradients" if size in sizes.head_gradient else "activations"


def _in_backward(frames: Frames) -> bool:
    """Return whether a node of autograd made it.

    On a CPU nodes run below `_engine_run_backward`. On a GPU they run in a thread of autograd, whose frames begin there. A node
    in C++ adds no frame, and one in Python begins with its `apply`. Anything else is a hook or a callback.
    """
    calls = [index for index, (_, function) in enumerate(frames) if function == "_engine_run_backward"]
    frames = frames[: calls[-1]] if calls else frames
    return not frames or frames[-1][0].endswith("/torch/autograd/function.py")
