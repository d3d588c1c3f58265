"""Embeddings whose weight is the head's too: for one call, both use it through `head.tied_weight`.

The lookup is caught where the embedding module calls torch for it, so what else the module does (Gemma scales) is left as it is.
"""

from __future__ import annotations

import threading
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
from streamgrad.hf.libraries.deepspeed import is_partitioned
from streamgrad.hf.patching import own_forward


class HeadWeight:
    """The weight that a linear head multiplies with in one call.

    `on_sharing` is called when embeddings have been looked up whose gradient will be added to the head's.
    """

    def __init__(self, head: nn.Module, embeddings: nn.Module | None, on_sharing: Callable[[], None] = lambda: None) -> None:
        self._head, self._embeddings, self._on_sharing = head, embeddings, on_sharing
        self._thread = threading.get_ident()
        self._looked_up: Tensor | None = None  # the parameter
        self._tied: Tensor | None = None  # as the lookup has returned it

    def __call__(self) -> Tensor:
        """Return the head's weight, as the lookup has returned it if it is that very tensor still."""
        weight, tied = self._head._parameters.get("weight"), self._tied
        # A hook may have given one of the two modules other values for the time of its call.
        if weight is not None and weight is self._looked_up and tied is not None and weight.data_ptr() == tied.data_ptr():
            return tied
        read: Tensor = self._head.weight  # type: ignore[assignment]  # once: a parametrized one is computed by reading it
        return read

    @contextmanager
    def shared(self) -> Iterator[HeadWeight]:
        """Let embeddings that are looked up within the block share their gradient with the head."""
        embeddings = self._embeddings
        if embeddings is None or not self._may_be_shared(embeddings):
            yield self
            return
        looked_up = own_forward(embeddings)

        def forward(*args: Any, **kwargs: Any) -> Any:
            with _Lookup(self._shared_lookup):
                return looked_up(*args, **kwargs)

        with temporary_attribute(embeddings, "forward", forward):
            yield self

    def _may_be_shared(self, embeddings: nn.Module) -> bool:
        weight = embeddings._parameters.get("weight")
        is_linear = getattr(own_forward(self._head), "__func__", None) is nn.Linear.forward
        if weight is None or not is_linear or self._head._parameters.get("weight") is not weight:
            return False
        # Not where somebody has replaced or compiled the lookup: another model in another thread, or the program.
        is_stock = "forward" not in embeddings.__dict__ and embeddings._compiled_call_impl is None
        is_trained = weight.requires_grad and torch.is_grad_enabled()
        return is_stock and is_trained and is_plain(weight) and not is_partitioned(weight)

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
        """Return what `F.embedding` does, by `tied_weight` where it would give the head's weight a dense gradient.

        The last lookup counts, as a forward pass that runs out of memory is begun anew.
        """
        usual = max_norm is None and not scale_grad_by_freq and not sparse and torch.is_grad_enabled()
        is_own = weight is self._head._parameters.get("weight") and threading.get_ident() == self._thread
        if not usual or not is_own:
            return F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
        embedded, self._tied = embedded_with_tied_weight(input, weight, padding_idx)
        self._looked_up = weight
        self._on_sharing()
        return embedded


class _Lookup(TorchFunctionMode):
    """Calls `instead` for `F.embedding` within the block."""

    def __init__(self, instead: Callable[..., Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return (self._instead if function is F.embedding else function)(*args, **(kwargs or {}))
