"""Tries a layer on a few random tokens before its first step in chunks, and refuses one whose chunks would differ.

    out[:, t] = f(h[:, t])          for every token t, where attention lets each token see itself only

A layer may mix tokens through attention, which the stream knows, and in no other way. No list of modules can tell: a mean over
the sequence may be in a hook. So the layer is run, with attention reduced to the token itself:

- Its output at some tokens must have no derivative by other tokens. Exactly none: zeros stay zeros in every precision.
- Its output must be the same in one chunk as in several. This finds what has no derivative, as a maximum that sets a scale, and
  what counts positions inside the chunk.
- It may read no trainable tensor but its own parameters.
- What it draws at random must be drawn for tokens. One draw a call (a module that is dropped as a whole) would be one a chunk.

Parameters that are zero, as the last one of a new adapter is, would hide what is behind them. They are replaced for the trial.

Shapes: B batch, H query heads, G key/value heads, T sequence, N tokens of the trial, D head size, E model width.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamgrad.engine.grad_accumulator import swapped_parameters
from streamgrad.engine.guards import AdapterFacts, check_leaves
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, SeamError
from streamgrad.engine.module_walk import modules_of, parameters_in
from streamgrad.engine.replay import Autocast, RandomTape
from streamgrad.ops.autograd import own_graph

Span = tuple[int, int]
# Runs the layer chunk by chunk over the spans and returns its output for all tokens.
RunChunks = Callable[[Tensor, Sequence[Span]], Tensor]

_MOST_TOKENS = 32
# What each layer consisted of when its trial passed.
_PASSED: weakref.WeakKeyDictionary[nn.Module, Hashable] = weakref.WeakKeyDictionary()


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass
class LoneTokens(Chunk):
    """A chunk in which every token sees itself only, beside a key of score 0 and value 0.

    out_t = sigmoid(q_t k_t scale) v_t          which depends on the query, the key and the value of the token
    """

    stream: KeyValueStream = field(default_factory=lambda: KeyValueStream(0))
    mask: object = None
    backends: list[Any] = field(default_factory=list)

    def attend(self, query_BHND: Tensor, key_BGND: Tensor, value_BGND: Tensor, scale: float) -> Tensor:
        """Return the attention output, (B, H, N, D)."""
        self._check_tokens(key_BGND)
        self.attention_calls += 1
        groups = query_BHND.shape[1] // key_BGND.shape[1]
        key_BHND, value_BHND = (tensor.repeat_interleave(groups, dim=1) for tensor in (key_BGND, value_BGND))
        return ((query_BHND * key_BHND).sum(dim=-1, keepdim=True) * scale).sigmoid() * value_BHND


@dataclass
class Trial:
    """The trial of one layer.

    Args:
        name: of the layer, for messages.
        run: runs the layer, each time from an empty cache.
        forward: identifies the layer's own forward, which is replaced while the layer is streamed.
        least: the fewest tokens that a chunk may have.
        mixes_by_states: the layer hands states from token to token, so tokens do depend on earlier ones.
    """

    layer: nn.Module
    name: str
    run: RunChunks
    adapters: AdapterFacts
    forward: Hashable = None
    chunk_size: int = _MOST_TOKENS
    least: int = 1
    mixes_by_states: bool = False

    def __call__(self, h_BTE: Tensor) -> None:
        """Raise `SeamError` where the layer, called with `h_BTE`, would give something else in chunks; once for each layer."""
        modules = modules_of(self.layer)
        contents = self.forward, _contents(modules, self.adapters)
        tokens = min(_MOST_TOKENS, h_BTE.shape[1], max(self.chunk_size, 8))
        if h_BTE.is_meta or tokens < 2 * self.least or _PASSED.get(self.layer) == contents:
            return
        devices = [device for device in {h_BTE.device, *(p.device for p in parameters_in(modules))} if device.type == "cuda"]
        autocast, generator = Autocast(h_BTE.device.type), torch.Generator().manual_seed(0)

        def draw() -> Tensor:
            """Return random tokens, small, so that what the layer adds to them is not lost beside them."""
            return 0.1 * torch.randn(h_BTE.shape[0], tokens, *h_BTE.shape[2:], generator=generator).to(h_BTE)

        with (
            torch.random.fork_rng(devices=devices),
            own_graph(),
            swapped_parameters(self.layer, _stand_ins(modules)),
            _unchanged_buffers(self.layer),
        ):
            draws = self._check_derivatives(draw(), RandomTape(devices))
            autocast.forget_casts()
            with in_eval_mode(modules) if draws else contextlib.nullcontext(), torch.no_grad():
                compared = self._check_chunks(draw, _cut(tokens, self.least))
            autocast.forget_casts()
        if compared:
            _PASSED[self.layer] = contents

    def _check_derivatives(self, h_BNE: Tensor, tape: RandomTape) -> bool:
        """Raise where the output at some tokens has a derivative by others; return whether random numbers were drawn."""
        tokens = h_BNE.shape[1]
        h_BNE.requires_grad_()
        pythons = random.getstate()
        with torch.enable_grad(), tape.recording(0):
            out_BNE = self.run(h_BNE, [(0, tokens)])
        if random.getstate() != pythons:
            random.setstate(pythons)
            raise SeamError(
                f"{self.name} draws from Python's random module, and would draw again for every chunk and in backward"
            )
        check_leaves(out_BNE, [h_BNE, *parameters_in(modules_of(self.layer))], self.name)
        if out_BNE.requires_grad and not self.mixes_by_states:
            self._check_jacobian(out_BNE, h_BNE)
        if tape.has_draws:
            self._check_draws(h_BNE.detach())
        return tape.has_draws

    def _check_jacobian(self, out_BNE: Tensor, h_BNE: Tensor) -> None:
        generator = torch.Generator().manual_seed(1)
        chosen_N = torch.rand(h_BNE.shape[1], generator=generator) < 0.5
        chosen_N[0], chosen_N[-1] = True, False
        dout_BNE = torch.randn(out_BNE.shape, generator=generator).to(out_BNE)
        some_BNE = dout_BNE.clone()
        some_BNE[:, ~chosen_N] = 0
        of_some, of_all = (
            torch.autograd.grad(out_BNE, h_BNE, gradient, retain_graph=True, allow_unused=True)[0]
            for gradient in (some_BNE, dout_BNE)
        )
        if of_some is None or of_all is None or not of_all.isfinite().all():
            return
        if of_some[:, ~chosen_N].any():
            raise SeamError(
                f"{self.name} mixes tokens outside of attention: its outputs have derivatives by the inputs of other tokens"
            )
        error_BN = _token_difference(of_some[:, chosen_N], of_all[:, chosen_N], 0.0)
        if (error_BN > largest_rounding(of_all)).any():
            raise SeamError(f"{self.name} mixes tokens in backward: a token's gradient depends on the gradients of others")

    def _check_draws(self, h_BNE: Tensor) -> None:
        tokens = h_BNE.shape[1]
        found = []
        for length in (tokens, tokens // 2, tokens // 2 - 1 or 1):
            with torch.no_grad(), _Draws() as draws:
                self.run(h_BNE[:, :length], [(0, length)])
            found.append(draws.sizes)
        if any(whole == half == less for whole, half, less in zip(*found, strict=False)):
            raise SeamError(
                f"{self.name} draws random numbers for the whole call and not for each token (as an adapter that is dropped as a "
                "whole does), which would be drawn once a chunk; set that dropout to 0"
            )

    def _check_chunks(self, draw: Callable[[], Tensor], parts: Sequence[Span]) -> bool:
        """Raise where tokens differ between one chunk and several; return whether there was something to compare.

        Where rounding decides, a router may send a token to another expert, in 16 bits one in a few. So there must be, in every
        draw, differences at the same place or at all tokens of a chunk.
        """
        suspects_N: Tensor | None = None
        for _ in range(8):
            h_BNE = draw()
            whole_BNE = self.run(h_BNE, [(0, h_BNE.shape[1])])
            before = h_BNE if whole_BNE.shape == h_BNE.shape else 0.0  # a head makes logits of hidden states
            difference_BN = _token_difference(self.run(h_BNE, parts), whole_BNE, before)
            if not whole_BNE.isfinite().all():
                return False
            differs_N = (difference_BN > largest_rounding(whole_BNE)).all(dim=0)
            suspects_N = differs_N if suspects_N is None else suspects_N & differs_N
            if not suspects_N.any() and not any(differs_N[slice(*span)].all() for span in parts):
                return True
        raise SeamError(
            f"{self.name} gives other outputs for tokens in chunks than for all at once, so something beside attention depends "
            "on the other tokens of a chunk or on the place in it"
        )


def _token_difference(actual_BNE: Tensor, expected_BNE: Tensor, h_BNE: Tensor | float) -> Tensor:
    """Return how far tokens differ, relative to what the layer has added to its input, (B, N).

    That difference of output and input carries the output's rounding, so a part of the output is added to the scale.
    """
    error, change, whole = (
        tensor.flatten(2).float().norm(dim=2) for tensor in (actual_BNE - expected_BNE, expected_BNE - h_BNE, expected_BNE)
    )
    return error / (change + 0.4 * whole).clamp(min=1e-30)


def largest_rounding(tensor: Tensor) -> float:
    """Return the largest relative difference that counts as rounding: bf16 has 8 bits, and fp32 products may have 10."""
    in_16_bits = tensor.dtype.itemsize == 2 or torch.is_autocast_enabled(tensor.device.type)
    return 0.02 if in_16_bits else 0.002


def _cut(tokens: int, least: int) -> list[Span]:
    """Return two or three spans whose lengths have no common divisor, as far as so few tokens allow it."""
    first = max(least, tokens // 6)
    second = max(first + least, 5 * tokens // 9)
    borders = [0, first, *([second] if tokens - second >= least else []), tokens]
    return list(itertools.pairwise(borders))


def _contents(modules: Sequence[nn.Module], adapters: AdapterFacts) -> Hashable:
    """Return what tells whether a layer is still the one that was tried: its modules, their switches, hooks, forwards inside."""
    return tuple(
        (
            id(module),
            type(module),
            *((name, value) for name, value in module.__dict__.items() if type(value) is bool),
            *(tuple(module.__dict__[kind]) for kind in _HOOKS),
            None if module is modules[0] else id(module.__dict__.get("forward")),
            *map(str, adapters.state(module)),
        )
        for module in modules
    )


def _stand_ins(modules: Sequence[nn.Module]) -> dict[int, Tensor]:
    """Return random values for the parameters that are zero, by their id."""
    parameters = [parameter for parameter in parameters_in(modules) if type(parameter) is nn.Parameter]
    parameters = [parameter for parameter in parameters if parameter.is_floating_point() and parameter.numel()]
    generator, found = torch.Generator().manual_seed(2), {}
    for parameter in parameters:
        if not parameter.any():
            values = 0.1 * torch.randn(parameter.shape, generator=generator)
            found[id(parameter)] = values.to(parameter).requires_grad_(parameter.requires_grad)
    return found


@contextlib.contextmanager
def _unchanged_buffers(layer: nn.Module) -> Iterator[None]:
    """Restore the layer's buffers after the block: a layer that changes them is refused elsewhere."""
    held = [(buffer, buffer._version, buffer.clone()) for buffer in layer.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, version, values in held:
                if buffer._version != version:
                    buffer.copy_(values)


class _Draws(TorchDispatchMode):
    """Notes how many numbers each random operation draws."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in function.tags:
            first = out[0] if isinstance(out, tuple | list) else out
            self.sizes.append(first.numel())
        return out


@contextlib.contextmanager
def in_eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
