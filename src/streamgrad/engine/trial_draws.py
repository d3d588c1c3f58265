"""Tells whether a layer draws its random numbers for tokens: what is drawn for the whole call would be drawn once a chunk.

Dropout draws one for each element. An adapter that is dropped as a whole draws one a call, and what is drawn from Python's
`random` cannot be drawn again in backward.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.replay import RandomTape

# Runs the layer on some tokens, (B, N, E), and returns its output.
Run = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def without_draws(
    modules: Sequence[nn.Module], name: str, run: Run, draw: Callable[[], Tensor], devices: Sequence[torch.device]
) -> Iterator[None]:
    """Let the layer with these modules draw nothing within the block, after checking what it draws; raise `SeamError`.

    Draws would differ from chunk to chunk. Dropout alone is left out if that is enough, so that the rest stays in training mode.
    `draw` returns tokens to run on.
    """
    with contextlib.ExitStack() as silent:
        for some in (_dropouts(modules), modules):
            if not _has_draws(name, run, draw(), devices):
                break
            _check(modules, name, run, draw())
            silent.enter_context(_in_eval_mode(some))
        yield


def _has_draws(name: str, run: Run, h_BNE: Tensor, devices: Sequence[torch.device]) -> bool:
    """Return whether random numbers are drawn from torch; raise where they are drawn from elsewhere."""
    tape, pythons = RandomTape(devices), random.getstate()
    with torch.no_grad(), tape.recording(0):
        run(h_BNE)
    if random.getstate() != pythons:
        random.setstate(pythons)
        raise SeamError(f"{name} draws from Python's random module, and would draw again for every chunk and in backward")
    return tape.has_draws


def _check(modules: Sequence[nn.Module], name: str, run: Run, h_BNE: Tensor) -> None:
    """Raise where as many numbers are drawn for fewer tokens, and the output depends on them."""
    tokens = h_BNE.shape[1]
    found = []
    for length in (tokens, tokens // 2, tokens // 2 - 1 or 1):
        with torch.no_grad(), _Draws() as draws:
            run(h_BNE[:, :length])
        found.append(draws.sizes)
    if any(whole == half == less for whole, half, less in zip(*found, strict=False)) and _draws_show(modules, run, h_BNE):
        raise SeamError(
            f"{name} draws random numbers for the whole call and not for each token (as an adapter that is dropped as a "
            "whole does), which would be drawn once a chunk; set that dropout to 0"
        )


def _draws_show(modules: Sequence[nn.Module], run: Run, h_BNE: Tensor) -> bool:
    """Return whether the output depends on what is drawn, but for dropout: PEFT's LoHa draws for a dropout of 0.

    All that is drawn is nearly 0, and then nearly 1, as a rare drop would hardly ever be seen otherwise.
    """
    outputs = []
    with torch.no_grad(), _in_eval_mode(_dropouts(modules)):
        for value in (1e-6, 1.0 - 1e-6):
            with _Draws(value) as draws:
                outputs.append(run(h_BNE))
            if not draws.are_uniform:
                return True
    return not torch.equal(*outputs)


_UNIFORM = torch.ops.aten.rand, torch.ops.aten.rand_like, torch.ops.aten.uniform_


class _Draws(TorchDispatchMode):
    """Notes how many numbers each random operation draws; with a `value`, uniform ones are all that value."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.are_uniform, self._value = True, value

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            first = out[0] if isinstance(out, tuple | list) else out
            self.sizes.append(first.numel())
            self.are_uniform &= function.overloadpacket in _UNIFORM
            if self._value is not None and self.are_uniform:
                first.fill_(self._value)
        return out


def _dropouts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if isinstance(module, _DropoutNd)]


@contextlib.contextmanager
def _in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
