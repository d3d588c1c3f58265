"""Attention kernels, one file each; `choose` returns the first that can compute a block."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from streamgrad.attention.backends.block import Backend, Block
from streamgrad.attention.backends.cudnn import CudnnBackend
from streamgrad.attention.backends.cudnn_plans import PRICES, SHAPES
from streamgrad.attention.backends.eager import EagerBackend
from streamgrad.attention.backends.flash import FlashBackend, activate_fa4, flash_implementation
from streamgrad.attention.backends.sdpa import SdpaBackend
from streamgrad.engine.kv_chunk import Attended, KeyGradient

__all__ = [
    "Backend",
    "Block",
    "Kernels",
    "backends_named",
    "choose",
    "differentiate_or_replace",
    "flash_implementation",
    "preferred",
    "run_or_replace",
]

logger = logging.getLogger("streamgrad")

_Ranked = tuple[list[Backend], dict[str, str | None]]

# In order of measured preference.
_ALL: tuple[Backend, ...] = (CudnnBackend(), FlashBackend(), SdpaBackend(), EagerBackend())


class Kernels(list[Backend]):
    """The kernels that a model may use; `used` names those that have computed a part of a step."""

    def __init__(self, backends: Iterable[Backend]) -> None:
        super().__init__(backends)
        self.used: set[str] = set()


def backends_named(name: str) -> Kernels:
    """Return the kernels that `StreamConfig.attention=name` allows, in a new list: a model removes those that fail."""
    if name == "fa4":
        activate_fa4()
    return Kernels(backend for backend in _ALL if name in ("auto", "fa4", backend.name))


def preferred(backends: Sequence[Backend]) -> list[Backend]:
    """Return the kernels in order of preference: as given, but flash first if FlashAttention-3 or 4 is active."""
    return sorted(backends, key=lambda backend: flash_implementation() is not None and backend.name != "flash")


def choose(
    backends: Sequence[Backend],
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    block: Block,
    *,
    backward: bool = False,
) -> Backend:
    """Return the first kernel that can compute the block; flash before cuDNN while cuDNN's plan is not worth its cost."""
    shapes = query_BHLD.shape, key_BGSD.shape, value_BGSD.shape, query_BHLD.dtype, query_BHLD.device
    asked = tuple(backends), flash_implementation(), shapes, block.traits
    found = _FOUND.get(asked)
    if found is None:
        found = _ranked(backends, query_BHLD, key_BGSD, value_BGSD, block)
        if len(_FOUND) >= SHAPES:
            _FOUND.clear()
        _FOUND[asked] = found
    chosen, refusals = found
    if len(chosen) == 2 and not PRICES.is_worth_a_plan(query_BHLD, key_BGSD, block.causal, backward=backward):
        chosen, refusals = chosen[1:], refusals | {"cudnn": "its plan for this new shape is not worth its cost yet"}
    if logger.isEnabledFor(logging.DEBUG):
        passed_over = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items() if refusal is not None)
        _log_choice(chosen[0].name, block.kind, query_BHLD.dtype, query_BHLD.device.type, passed_over)
    return chosen[0]


# What `_ranked` returned for shapes so far: the answer for one chunk is the answer for that chunk of every layer and step.
_FOUND: dict[tuple[Any, ...], _Ranked] = {}


def _ranked(backends: Sequence[Backend], query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Block) -> _Ranked:
    """Return the kernel for the block, or cuDNN and flash, between which prices decide, and why others were passed over."""
    refusals = {backend.name: backend.refusal(query_BHLD, key_BGSD, value_BGSD, block) for backend in preferred(backends)}
    able = [backend for backend in preferred(backends) if refusals[backend.name] is None]
    if not able:
        reasons = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items())
        raise ValueError(
            f"no attention kernel can compute this block ({reasons}). "
            'Pass attention="auto" to streamgrad.enable to allow every kernel.'
        )
    both = [backend.name for backend in able[:2]] == ["cudnn", "flash"]
    return able[: 2 if both else 1], refusals


@functools.cache
def _log_choice(name: str, kind: str, dtype: torch.dtype, device: str, refusals: str) -> None:
    """Log the choice once for each kind of block: the cache remembers which were logged."""
    logger.debug("attention kernel %s for %s blocks of %s on %s (%s)", name, kind, dtype, device, refusals or "the first choice")


def run_or_replace(
    backends: list[Backend],
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    block: Block,
    ran_by: dict[Hashable, Any],
    place: Hashable,
) -> Attended:
    """Run `forward` of the first kernel that can; one that raises is removed from `backends`, with a warning.

    What runs again at the same `place` in `ran_by` runs on the same kernel. Another one rounds otherwise, and after that a router
    may choose other experts than it did in forward.
    """
    while True:
        if place not in ran_by:
            ran_by[place] = choose(backends, query_BHLD, key_BGSD, value_BGSD, block)
        backend = ran_by[place]
        try:
            if not torch.is_autocast_enabled(query_BHLD.device.type):
                done = backend.forward(query_BHLD, key_BGSD, value_BGSD, block)
            else:  # Operands are in autocast's dtype already; a kernel that sums in fp32 must not be cast back.
                with torch.autocast(query_BHLD.device.type, enabled=False):
                    done = backend.forward(query_BHLD, key_BGSD, value_BGSD, block)
            if isinstance(backends, Kernels):
                backends.used.add(backend.name)
            return done
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            del ran_by[place]
            _remove(backends, backend, error)


def differentiate_or_replace(
    backends: list[Backend],
    dout_BHLD: Tensor,
    query_BHLD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    done: Attended,
    block: Block,
) -> tuple[Tensor, list[KeyGradient]]:
    """Run `backward` of the first kernel that can; one that raises is removed as in forward, where it may not have run."""
    while True:
        backend = choose(backends, query_BHLD, key_BGSD, value_BGSD, block, backward=True)
        try:
            return backend.backward(dout_BHLD, query_BHLD, key_BGSD, value_BGSD, done, block)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            _remove(backends, backend, error)


def _remove(backends: list[Backend], failed: Backend, error: RuntimeError) -> None:
    """Remove a kernel, with a warning; raise its error if there is no other."""
    others = [backend for backend in backends if backend is not failed]
    if not others:
        raise error
    backends[:] = others
    warnings.warn(
        f"streamgrad: attention kernel {failed.name!r} failed and is replaced by "
        f"{' or '.join(other.name for other in others)}: {error}",
        RuntimeWarning,
        stacklevel=3,
    )
