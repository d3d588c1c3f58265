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
from streamgrad.engine.temporary import temporary_attributes

# Runs the layer on some tokens, (B, N, E), and returns its output.
Run = Callable[[Tensor], Tensor]


@contextlib.contextmanager
def without_draws(
    modules: Sequence[nn.Module], name: str, run: Run, draw: Callable[[], Tensor], devices: Sequence[torch.device]
) -> Iterator[None]:
    """Let the layer with these modules draw nothing at random within the block, after checking what it draws.

    Draws would differ from chunk to chunk. All else stays as in training: a layer may mix tokens there alone. Modules of dropout
    pass their input on, and of other draws the same is drawn for all tokens, as far as that is possible. `draw` returns tokens to
    run on.
    """
    with contextlib.ExitStack() as silent:
        if _has_draws(name, run, draw(), devices):
            _check(modules, name, run, draw())
            silent.enter_context(_in_eval_mode(_dropouts(modules)))
            if _has_draws(name, run, draw(), devices):
                drawn = _check(modules, name, run, draw())
                are_known = drawn and drawn <= _CONSTANT.keys()
                silent.enter_context(_Constant() if are_known else _in_eval_mode(modules))
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


def _check(modules: Sequence[nn.Module], name: str, run: Run, h_BNE: Tensor) -> set[Any]:
    """Raise where as many numbers are drawn for fewer tokens, and the output depends on them; return the operators that draw."""
    tokens, found = h_BNE.shape[1], []
    for length in (tokens, tokens // 2, tokens // 2 - 1 or 1):
        with torch.no_grad(), _Draws() as draws:
            run(h_BNE[:, :length])
        found.append(draws.sizes)
    if any(whole == half == less for whole, half, less in zip(*found, strict=False)) and _draws_show(modules, run, h_BNE):
        raise SeamError(
            f"{name} draws random numbers for the whole call and not for each token (as an adapter that is dropped as a "
            "whole does), which would be drawn once a chunk; set that dropout to 0"
        )
    return draws.operators


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


_ATEN = torch.ops.aten
_UNIFORM = _ATEN.rand, _ATEN.rand_like, _ATEN.uniform_
# What is drawn of each kind in place of random numbers: a mean, a factor that drops nothing, noise that shows.
_CONSTANT: dict[Any, float] = dict.fromkeys(_UNIFORM, 0.5) | {
    _ATEN.bernoulli: 1.0,
    _ATEN.bernoulli_: 1.0,
    _ATEN.native_dropout: 1.0,
    _ATEN.randn: 0.5,
    _ATEN.randn_like: 0.5,
    _ATEN.normal_: 0.5,
    _ATEN.exponential_: 0.5,
}


class _Draws(TorchDispatchMode):
    """Notes how many numbers each random operation draws; with a `value`, uniform ones are all that value."""

    def __init__(self, value: float | None = None) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.operators: set[Any] = set()
        self.are_uniform, self._value = True, value

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            first = out[0] if isinstance(out, tuple | list) else out
            self.sizes.append(first.numel())
            self.operators.add(function.overloadpacket)
            self.are_uniform &= function.overloadpacket in _UNIFORM
            if self._value is not None and self.are_uniform:
                first.fill_(self._value)
        return out


class _Constant(TorchDispatchMode):
    """Draws the same number for all elements, where only operators draw that are in `_CONSTANT`."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return out
        operator = function.overloadpacket
        if operator is _ATEN.native_dropout:
            dropped, kept = out
            if args[1] < 1:
                dropped.copy_(args[0] / (1 - args[1]))
                kept.fill_(True)
        elif operator is _ATEN.uniform_:
            low, high = args[1] if len(args) > 1 else 0.0, args[2] if len(args) > 2 else 1.0
            out.fill_(low + _CONSTANT[operator] * (high - low))
        else:
            out.fill_(_CONSTANT[operator])
        return out


def _dropouts(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if isinstance(module, _DropoutNd)]


def _in_eval_mode(modules: Sequence[nn.Module]) -> contextlib.AbstractContextManager[None]:
    return temporary_attributes((module, "training", False) for module in modules)
