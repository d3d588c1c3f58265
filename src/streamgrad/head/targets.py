"""Targets of the head, checked before any work and cut into chunks; ignored tokens cost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from streamgrad.memory.device import device_memory
from streamgrad.memory.head_chunk import FREE_SHARE, SHORTEST_CHUNK, head_chunk_within

CHUNK_WITHOUT_GPU = 2048
# The target of a token that predicts nothing, as torch and transformers have it.
IGNORED = -100


class TargetRows:
    """The rows of flat `targets_N` that carry a target, in chunks.

    Counting them waits for the device once; the same transfer brings the smallest and largest target, so a target outside
    the vocabulary is an error here and not a fault inside a kernel.

    `itemsize` is the bytes that one logit takes while its chunk is computed. For `chunk_size="auto"`, `limit_bytes` limits all
    that the process holds on the device.
    """

    def __init__(
        self,
        targets_N: Tensor,
        *,
        vocabulary: int,
        ignore_index: int,
        chunk_size: int | str,
        itemsize: int = 4,
        limit_bytes: int | None = None,
    ) -> None:
        if isinstance(chunk_size, str):
            if chunk_size != "auto":
                raise ValueError(f'chunk_size must be a number of tokens or "auto", got {chunk_size!r}.')
        elif int(chunk_size) != chunk_size:
            raise ValueError(f'chunk_size={chunk_size} is not a whole number of tokens. Pass one, or "auto".')
        elif chunk_size < 1:
            raise ValueError(f'chunk_size={chunk_size} leaves no tokens in a chunk. Pass at least 1, or "auto".')
        self.targets_N = targets_N
        has_target_N = targets_N != ignore_index
        low_N = torch.where(has_target_N, targets_N, 0)
        if len(targets_N):
            count, low, high = torch.stack([has_target_N.sum(), low_N.min(), low_N.max()]).tolist()
        else:
            count = low = high = 0
        if low < 0 or high >= vocabulary:
            raise ValueError(
                f"target {low if low < 0 else high} is outside the vocabulary of {vocabulary} tokens (0 to {vocabulary - 1}) "
                f"and is not ignore_index={ignore_index}. Check the tokenizer, or set such targets to {ignore_index}."
            )
        self.count: int = count
        self._asked, self._vocabulary, self._itemsize, self._limit = chunk_size, vocabulary, itemsize, limit_bytes
        self._rows_N = None if count == len(targets_N) else has_target_N.nonzero().squeeze(1)

    @cached_property
    def chunk_size(self) -> int:
        """Return the tokens in a chunk; "auto" is decided on the first read, by the memory that is free then."""
        if self._asked != "auto":
            return int(self._asked)
        device = self.targets_N.device
        if self._limit is None:
            return choose_head_chunk(self.count, self._vocabulary, self._itemsize, device)
        if device.type != "cuda":
            return SHORTEST_CHUNK  # memory in use is not known there; plans assume this chunk
        held, limit = device_memory(device)
        budget = int(max(0, min(self._limit, limit) - held) // FREE_SHARE)
        return head_chunk_within(budget, self.count, self._vocabulary, self._itemsize)

    def check_width(self, logits: int) -> None:
        """Raise unless the head gives the number of logits that targets were checked against."""
        if logits != self._vocabulary:
            raise ValueError(
                f"the language-modelling head gives {logits} logits a token, and its out_features, or else the configuration's "
                f"vocab_size, says {self._vocabulary}. Set it to {logits}, or resize the head by model.resize_token_embeddings."
            )

    @property
    def skips_some(self) -> bool:
        """Return whether some tokens are in no chunk."""
        return self._rows_N is not None

    def chunks(self) -> Iterator[tuple[Tensor | slice, Tensor]]:
        """Yield `(rows, targets)` of each chunk; `rows` is a slice when no token is ignored, which saves a gather."""
        for start in range(0, self.count, self.chunk_size):
            stop = min(start + self.chunk_size, self.count)
            rows = slice(start, stop) if self._rows_N is None else self._rows_N[start:stop]
            yield rows, self.targets_N[rows]


def choose_head_chunk(tokens: int, vocabulary: int, itemsize: int, device: torch.device) -> int:
    """Return `head_chunk_within` an eighth of the free memory of a GPU; without a GPU, 2048 tokens."""
    if device.type != "cuda":
        return CHUNK_WITHOUT_GPU
    held, limit = device_memory(device)
    return head_chunk_within(int(limit - held) // FREE_SHARE, tokens, vocabulary, itemsize)


def flatten(hidden: Tensor, weight_VE: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape `hidden` (..., E) and `targets` (...) to (N, E) and (N), after checking that they match."""
    if hidden.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} but hidden states {tuple(hidden.shape)}. Pass one target per token, of "
            f"shape {tuple(hidden.shape[:-1])}."
        )
    if hidden.shape[-1] != weight_VE.shape[-1]:
        raise ValueError(
            f"hidden states have width {hidden.shape[-1]} but the weight {tuple(weight_VE.shape)} expects {weight_VE.shape[-1]}. "
            "Pass the weight as (vocabulary, width)."
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets must be token ids in int64 or int32, got {targets.dtype}.")
    return hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).to(device=hidden.device, dtype=torch.int64)


def is_plain(tensor: Tensor) -> bool:
    """Return whether torch computes with it as with any tensor: its class replaces no operation, as quantised tensors do."""
    return _is_plain_class(type(tensor))


@lru_cache(maxsize=256)
def _is_plain_class(kind: type[Tensor]) -> bool:
    function = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    plain = (Tensor.__torch_function__.__func__, torch.nn.Parameter.__torch_function__)  # type: ignore[attr-defined]
    return function in plain and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def refuse_own_operations(*operands: Tensor | None) -> None:
    """Raise for an operand whose class replaces operations of torch: gradients are written down here for torch's own."""
    for operand in operands:
        if operand is not None and not is_plain(operand):
            raise TypeError(
                f"a {type(operand).__name__} replaces operations of torch by its own, and the streamed head differentiates "
                "torch's. Pass a plain tensor, or call streamgrad.disable(model) to train with it."
            )


def check_operands(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless these are a head's tensors, of one dtype where no autocast decides in which one the product is computed."""
    for name, given in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if isinstance(given, nn.Module):
            raise TypeError(
                f"{name} is a module, {type(given).__name__}, and must be a tensor. Pass lm_head.weight as the weight, and "
                "lm_head.bias as the bias where it has one."
            )
    if weight.ndim != 2:
        raise ValueError(f"the weight has shape {tuple(weight.shape)}. Pass it as (vocabulary, width).")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}, and the weight {tuple(weight.shape)} needs {tuple(weight.shape[:1])}."
        )
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        raise ValueError(
            f"hidden states are {hidden.dtype} and the weight is {weight.dtype}. Convert one to the dtype of the other, or call "
            "this under autocast."
        )
