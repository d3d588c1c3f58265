"""Decoder layers compiled by torch.compile, for steps that run them whole.

Neighbours that are alike form a *group*, which is compiled as one: calling a graph takes Python as long as a short layer takes
the device. The first layer of a group runs all of it, and the others hand out what it found,

    h_1 = first(h_0),  h_2 = second(h_1)        is        h_1, h_2 = graph(h_0)

so whatever stands between layers sees each one's own output. If a layer is then called with anything else, the step is run once
more with layers one by one. One graph serves all groups and sequences of any length: weights are its inputs, and the number of
tokens is a symbol. Only forward is compiled, so hooks on a layer, engines that gather its weights and checkpointing run around
it. A layer with hooks is alone in its group.
"""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config

from streamgrad.engine.temporary import temporary_attributes

logger = logging.getLogger("streamgrad")

_BACKEND = "inductor"
# Layers of a group: the first of these that leaves no smaller group, which would be one more graph to compile.
_GROUP_SIZES = (4, 5, 3, 2)


class LayerCompiler:
    """Compiles the layers of one model, if it is asked to, for as long as that works."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.seconds: float | None = None  # that the first step took in forward, once it has been run
        self._may_group = True
        self._grouped: tuple[list[nn.Module], list[list[nn.Module]]] = [], []  # layers, and their groups

    def compiles(self, layer: nn.Module) -> bool:
        """Return whether the layer's forward may be replaced by a compiled one; one that others have replaced runs as it is."""
        return layer._compiled_call_impl is None and "forward" not in layer.__dict__

    @contextmanager
    def installed(self, layers: list[nn.Module]) -> Iterator[None]:
        """Run `layers` compiled within the block, where a graph is compiled with its backward, so that either fails here."""
        begun = time.perf_counter()
        groups = [_Group(each) for each in self._groups_of(layers)]
        with ExitStack() as restore:
            if self.seconds is None:
                logger.info("streamgrad: compiling %s, which this step waits for", type(layers[0]).__name__)
            restore.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
            forwards = [(layer, "forward", forward) for group in groups for layer, forward in group.forwards()]
            restore.enter_context(temporary_attributes(forwards))
            yield
        for group in groups:
            group.check_finished()
        self.seconds = time.perf_counter() - begun if self.seconds is None else self.seconds

    def _groups_of(self, layers: list[nn.Module]) -> Iterator[Sequence[nn.Module]]:
        """Yield the groups of the layers, which are found once."""
        if self._may_group and self._grouped[0] != layers:
            self._grouped = layers, _groups(layers)
        for group in self._grouped[1] if self._may_group else [layers]:
            yield from [group] if self._may_group and not any(map(_has_hooks, group)) else ([layer] for layer in group)

    def run(
        self, around: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Return `stock(**arguments)`, run within `around()`; if it fails for its compiled layers, run once more without them.

        Forward leaves nothing behind when it fails. It draws random numbers again.
        """
        while True:
            try:
                with around():
                    return stock(**arguments)
            except _CalledOtherwise as error:
                self._may_group = False
                logger.info("streamgrad: layers are compiled one by one from now on: %s", error)
            except TorchDynamoException as error:
                if not self.wanted:
                    raise
                self.wanted, reason = False, f"{type(error).__name__}: {error}".replace("\n", " ")
                text = "streamgrad: torch.compile failed, and layers are not compiled from now on, in spite of compile_layers"
                warnings.warn(f"{text} ({reason:.300})", RuntimeWarning, stacklevel=2)


class _CalledOtherwise(RuntimeError):
    """A layer of a group was not called as its group expects: right after the one before it, with the same arguments."""


class _Group:
    """Layers that the first of them runs; a tensor that it hands to the next must come there as it is."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = tuple(layers)
        self._outputs: list[Tensor] = []  # of layers that have been called, and of those that will be
        self._versions: list[int] = []
        self._given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._called = 0

    def forwards(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Yield each layer with what its forward is."""
        yield self._layers[0], self._run_all
        for index, layer in enumerate(self._layers[1:], 1):
            yield layer, functools.partial(self._hand_out, index)

    def _run_all(self, *args: Any, **kwargs: Any) -> Any:
        self.check_finished()
        outputs = _compiled(type(self._layers[0]).forward, len(self._layers))(self._layers, *args, **kwargs)
        if len(self._layers) == 1:
            return outputs[0]
        if outputs is None:
            raise _CalledOtherwise(f"{self._name} takes or returns something else than one tensor")
        self._outputs, self._given, self._called = outputs, (args[1:], kwargs), 1
        self._versions = [output._version for output in outputs]
        return outputs[0]

    def _hand_out(self, index: int, *args: Any, **kwargs: Any) -> Tensor:
        before = index - 1
        if self._called != index or not args or args[0] is not self._outputs[before]:
            raise _CalledOtherwise(f"the input of a {self._name} is not the output of the one before it")
        if args[0]._version != self._versions[before]:
            raise _CalledOtherwise(f"the output of a {self._name} is changed in place")
        if not _are_same((args[1:], kwargs), self._given):
            raise _CalledOtherwise(f"two of {self._name} get different arguments")
        self._called += 1
        output = self._outputs[index]
        if self._called == len(self._layers):
            self._outputs, self._given = [], ((), {})
        return output

    def check_finished(self) -> None:
        """Raise if a layer was left out, which would have a gradient of zeros instead of none."""
        if 0 < self._called < len(self._layers):
            raise _CalledOtherwise(f"a {self._name} is left out")
        self._called = 0

    @property
    def _name(self) -> str:
        return type(self._layers[0]).__name__


def _are_same(some: tuple[tuple[Any, ...], dict[str, Any]], others: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Return whether two calls have the same objects as arguments."""
    (args, kwargs), (other_args, other_kwargs) = some, others
    return (
        kwargs.keys() == other_kwargs.keys()
        and len(args) == len(other_args)
        and all(value is other for value, other in zip(args, other_args, strict=True))
        and all(value is other_kwargs[name] for name, value in kwargs.items())
    )


def _groups(layers: list[nn.Module]) -> list[list[nn.Module]]:
    """Return the layers in groups of neighbours that are alike."""
    runs: list[list[nn.Module]] = []
    for index, layer in enumerate(layers):
        if index and _are_alike(layers[index - 1], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    found = []
    for alike in runs:
        size = next((each for each in _GROUP_SIZES if len(alike) % each == 0), _GROUP_SIZES[0])
        found += [alike[start : start + size] for start in range(0, len(alike), size)]
    return found


def _are_alike(before: nn.Module, layer: nn.Module) -> bool:
    """Return whether two neighbours seem to run the same code: the same parts, with the same numbers and words in them.

    A number that goes up by one from layer to layer is their index. Where this is wrong, there is one more graph.
    """
    parts, others = list(before.named_modules()), list(layer.named_modules())
    if [(name, type(part)) for name, part in parts] != [(name, type(other)) for name, other in others]:
        return False
    values = (
        (vars(part).get(name), value)
        for (_, part), (_, other) in zip(parts, others, strict=True)
        for name, value in vars(other).items()
        if isinstance(value, str | int | float | None)
    )
    return all(type(one) is type(value) and (one == value or (type(value) is int and one == value - 1)) for one, value in values)


def _has_hooks(layer: nn.Module) -> bool:
    """Return whether something expects to run right before or after the layer's own code."""
    return bool(layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks)


@functools.cache
def _compiled(forward: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a function of `count` layers and the first one's arguments that returns the output of each."""

    def run(layers: tuple[nn.Module, ...], *args: Any, **kwargs: Any) -> list[Any] | None:
        if count > 1 and not args:
            return None
        outputs = [forward(layers[0], *args, **kwargs)]
        for layer in layers[1:]:
            if not isinstance(outputs[-1], Tensor):
                return None
            outputs.append(forward(layer, outputs[-1], *args[1:], **kwargs))
        return outputs

    # torch counts the graphs of a piece of code, and gives up after a few; this one would be all models'.
    run.__code__ = run.__code__.replace(co_name=f"{forward.__qualname__} x {count}")
    return torch.compile(run, backend=_BACKEND, dynamic=True)
