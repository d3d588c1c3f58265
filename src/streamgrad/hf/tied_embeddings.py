"""Embeddings whose weight is the head's too: for one call, both use it through `head.tied_weight`.

The lookup is caught where the embedding module calls torch for it, so what else the module does (Gemma scales) is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from streamgrad.engine.temporary import temporary_attribute
from streamgrad.head.targets import is_plain
from streamgrad.head.tied_weight import embedded_with_tied_weight
from streamgrad.hf.deepspeed import is_partitioned
from streamgrad.hf.patching import own_forward


class HeadWeight:
    """The weight that a linear head multiplies with in one call."""

    def __init__(self, head: nn.Module, embeddings: nn.Module | None) -> None:
        self._head, self._embeddings = head, embeddings
        self._tied: Tensor | None = None  # as the last lookup has returned it

    @property
    def is_tied(self) -> bool:
        """Return whether the embeddings' gradient will be added to the head's, if they are looked up in this call."""
        weight = None if self._embeddings is None else self._embeddings._parameters.get("weight")
        is_linear = getattr(own_forward(self._head), "__func__", None) is nn.Linear.forward
        if weight is None or not is_linear or self._head._parameters.get("weight") is not weight:
            return False
        return weight.requires_grad and torch.is_grad_enabled() and is_plain(weight) and not is_partitioned(weight)

    def __call__(self) -> Tensor:
        """Return the head's weight; read once, as a parametrized one is computed by reading it."""
        weight: Tensor = self._head.weight if self._tied is None else self._tied  # type: ignore[assignment]
        return weight

    @contextmanager
    def shared(self) -> Iterator[HeadWeight]:
        """Let embeddings that are looked up within the block share their gradient with the head."""
        if not self.is_tied:
            yield self
            return
        embeddings = self._embeddings
        assert embeddings is not None
        looked_up = own_forward(embeddings)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Lookup(self._shared_lookup):
                return looked_up(*args, **kwargs)

        with temporary_attribute(embeddings, "forward", forward):
            yield self

    def _shared_lookup(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor:
        """Return what `F.embedding` does, by `tied_weight` where it would give the head's weight a dense gradient."""
        usual = max_norm is None and not scale_grad_by_freq and not sparse and torch.is_grad_enabled()
        if weight is not self._head._parameters.get("weight") or not usual:
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        embedded, self._tied = embedded_with_tied_weight(input, weight, padding_idx)
        return embedded


class _Lookup(TorchFunctionMode):
    """Calls `instead` for `F.embedding` within the block."""

    def __init__(self, instead: Callable[..., Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return (self._instead if function is F.embedding else function)(*args, **(kwargs or {}))
