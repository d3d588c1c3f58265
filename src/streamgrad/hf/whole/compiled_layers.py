"""Decoder layers compiled by torch.compile, for steps that run them whole.

One graph serves all layers of a class and sequences of any length: weights are its inputs, and the number of tokens is a symbol.
Short steps take as long as Python does to call graphs, and have one for several layers (`layer_groups`). Only forwards are
compiled, so hooks on a layer, engines that gather its weights and checkpointing run around it.
"""

from __future__ import annotations

import functools
import logging
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config

from streamgrad.engine.temporary import temporary_attributes
from streamgrad.hf.whole.layer_groups import CalledOtherwise, LayerGroups

logger = logging.getLogger("streamgrad")

_BACKEND = "inductor"


class LayerCompiler:
    """Compiles the layers of one model, if it is asked to, for as long as that works."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = self.may_group = wanted
        self._has_groups = False  # the step that is under way
        self.seconds: float | None = None  # that the first step took in forward, once it has been run

    def compiles(self, layer: nn.Module) -> bool:
        """Return whether the layer's forward may be replaced by a compiled one; one that others have replaced runs as it is."""
        return layer._compiled_call_impl is None and "forward" not in layer.__dict__

    @contextmanager
    def installed(self, groups: Sequence[Sequence[nn.Module]]) -> Iterator[None]:
        """Run layers compiled within the block, in these groups; a graph is made with its backward, so that either fails here."""
        begun = time.perf_counter()
        together = LayerGroups(groups, _compiled_alone, _compiled_together) if any(len(group) > 1 for group in groups) else None
        self._has_groups = together is not None
        alone = ((layer, _compiled_alone(layer)) for group in groups for layer in group)
        with ExitStack() as restore:
            if self.seconds is None:
                logger.info("streamgrad: compiling %s, which this step waits for", type(groups[0][0]).__name__)
            restore.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
            # A hook on a part of a layer makes another graph; by default, one that comes after the first graph is passed over.
            restore.enter_context(dynamo_config.patch(skip_nnmodule_hook_guards=False))
            forwards = alone if together is None else together.forwards()
            restore.enter_context(temporary_attributes((layer, "forward", forward) for layer, forward in forwards))
            yield
        if together is not None:
            together.check_that_all_ran()
        self.seconds = time.perf_counter() - begun if self.seconds is None else self.seconds

    def run(
        self, around: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Return `stock(**arguments)`, run within `around()`; if groups fail there, run once more without, and so for graphs.

        Forward has left nothing behind by then. It draws random numbers again.
        """
        while True:
            try:
                with around():
                    return stock(**arguments)
            except (CalledOtherwise, TorchDynamoException) as error:
                if not self.wanted:
                    raise
                reason = f"{type(error).__name__}: {error}".replace("\n", " ")
            if self.may_group and self._has_groups:
                self.may_group = False
                logger.info("streamgrad: layers are compiled one by one from now on (%.300s)", reason)
            else:
                self.wanted = False
                text = "streamgrad: torch.compile failed, and layers are not compiled from now on, in spite of compile_layers"
                warnings.warn(f"{text} ({reason:.300})", RuntimeWarning, stacklevel=2)


def _compiled_alone(layer: nn.Module) -> Callable[..., Any]:
    return types.MethodType(_compiled(type(layer).forward), layer)


def _compiled_together(layers: Sequence[nn.Module]) -> Callable[..., Any]:
    return types.MethodType(_compiled_in_turn(type(layers[0]).forward, len(layers)), tuple(layers))


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, backend=_BACKEND, dynamic=True)


@functools.cache
def _compiled_in_turn(forward: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Return a compiled function of `count` layers and the first one's arguments that returns the output of the last."""

    def run(layers: tuple[nn.Module, ...], h: Any, /, *args: Any, **kwargs: Any) -> Any:
        for layer in layers:
            h = forward(layer, h, *args, **kwargs)
        return h

    # torch counts the graphs of a piece of code, and gives up after a few; this one would be all models'.
    run.__code__ = run.__code__.replace(co_name=f"{forward.__qualname__} x {count}")
    return torch.compile(run, backend=_BACKEND, dynamic=True)
