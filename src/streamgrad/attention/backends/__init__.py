"""Attention kernels, one file each; `choose` picks the first that can compute a block."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

from torch import Tensor

from streamgrad.attention.backends.base import Backend, Block
from streamgrad.attention.backends.cudnn import CudnnBackend
from streamgrad.attention.backends.eager import EagerBackend
from streamgrad.attention.backends.flash import FlashBackend
from streamgrad.attention.backends.sdpa import SdpaBackend

__all__ = ["Backend", "Block", "backends_named", "choose", "retire"]

logger = logging.getLogger("streamgrad")

# In order of measured preference.
_ALL: tuple[Backend, ...] = (CudnnBackend(), FlashBackend(), SdpaBackend(), EagerBackend())


def backends_named(name: str) -> list[Backend]:
    """The candidates for `StreamConfig.attention`; a fresh list, so that a failing one can be retired for one model."""
    return [backend for backend in _ALL if name in ("auto", backend.name)]


def choose(backends: Sequence[Backend], query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> Backend:
    refusals = []
    for backend in backends:
        refusal = backend.refusal(query_BHLD, key_BGSD, value_BGSD, block)
        if refusal is None:
            return backend
        refusals.append(f"{backend.name}: {refusal}")
    raise ValueError(
        f"no attention kernel can compute this block ({'; '.join(refusals)}). "
        'Pass attention="auto" to streamgrad.enable to let one that can take it.'
    )


def retire(backends: list[Backend], failed: Backend, error: RuntimeError) -> None:
    """Take a kernel that raised out of `backends`; re-raises when nothing is left to take its place."""
    if len(backends) == 1:
        raise error
    backends.remove(failed)
    warnings.warn(
        f"streamgrad: attention kernel {failed.name!r} failed and is replaced by "
        f"{', '.join(backend.name for backend in backends)}: {error}",
        RuntimeWarning,
        stacklevel=2,
    )
