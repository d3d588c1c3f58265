"""Decoder layers compiled by torch.compile, for steps that run them whole.

One graph serves all layers of a class and sequences of any length: weights are its inputs, and the number of tokens is a symbol.
Only a layer's forward is compiled, so hooks on the layer, engines that gather its weights and checkpointing run around it.
"""

from __future__ import annotations

import functools
import logging
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import TorchDynamoException
from torch._functorch import config as functorch_config

from streamgrad.engine.temporary import temporary_attributes

logger = logging.getLogger("streamgrad")

_BACKEND = "inductor"


class LayerCompiler:
    """Compiles the layers of one model, if it is asked to, for as long as that works."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.seconds: float | None = None  # that the first step took in forward, once it has been run

    def compiles(self, layer: nn.Module) -> bool:
        """Return whether the layer's forward may be replaced by a compiled one; one that others have replaced runs as it is."""
        return layer._compiled_call_impl is None and "forward" not in layer.__dict__

    @contextmanager
    def installed(self, layers: list[nn.Module]) -> Iterator[None]:
        """Run `layers` compiled within the block, where a graph is compiled with its backward, so that either fails here."""
        begun = time.perf_counter()
        with ExitStack() as restore:
            if self.seconds is None:
                logger.info("streamgrad: compiling %s, which this step waits for", type(layers[0]).__name__)
            restore.enter_context(functorch_config.patch(force_non_lazy_backward_lowering=True))
            # A hook on a part of a layer makes another graph; by default, one that comes after the first graph is passed over.
            restore.enter_context(dynamo_config.patch(skip_nnmodule_hook_guards=False))
            forwards = ((layer, "forward", types.MethodType(_compiled(type(layer).forward), layer)) for layer in layers)
            restore.enter_context(temporary_attributes(forwards))
            yield
        self.seconds = time.perf_counter() - begun if self.seconds is None else self.seconds

    def run(
        self, around: Callable[[], AbstractContextManager[None]], stock: Callable[..., Any], arguments: dict[str, Any]
    ) -> Any:
        """Return `stock(**arguments)`, run within `around()`; if torch.compile fails there, run once more without it."""
        try:
            with around():
                return stock(**arguments)
        except TorchDynamoException as error:
            if not self.wanted:
                raise
            self.wanted, reason = False, f"{type(error).__name__}: {error}".replace("\n", " ")
        # Forward has left nothing behind.
        text = "streamgrad: torch.compile failed, and layers are not compiled from now on, in spite of compile_layers"
        warnings.warn(f"{text} ({reason:.300})", RuntimeWarning, stacklevel=2)
        with around():
            return stock(**arguments)


@functools.cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, backend=_BACKEND, dynamic=True)
