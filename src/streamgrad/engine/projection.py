"""Keeps, with the attention of a layer on the host, the product that reads it, so that a re-run need not multiply again.

    out = hidden + o_proj(attention(hidden)) + ...

Whatever its name, it is the linear map that is given what attention has returned, unchanged; of several (an adapter reads it too)
the one with the most outputs. The product waits on the host, to which the link is idle for most of a long step. In the re-run,
the map's forward returns it with the graph of the product. Its input is then the attention that was kept, so it is the product
of forward, bit for bit.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from streamgrad.engine.kv_chunk import Attended, Chunk
from streamgrad.engine.linear_maps import Noting, multiplies, product_of
from streamgrad.engine.temporary import temporary_attributes
from streamgrad.engine.unread import is_left_out
from streamgrad.ops.autograd import in_transform

# The map of each layer that has run, or none. A map may hold on to its layer, by a hook that somebody has given it.
_READERS: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def noting_projection(run: Callable[[Tensor], Tensor], modules: Sequence[nn.Module], chunk: Chunk) -> Callable[[Tensor], Tensor]:
    """Return `run`, which runs a chunk forward, such that the attention that `chunk` keeps then has the product that reads it.

    The first chunk of a layer, which is the first of `modules`, shows which map makes it.
    """
    layer = modules[0]
    known = _READERS.get(layer)
    tried = modules[1:] if known is None else [module for module in (each() for each in known) if module is not None]
    maps = [module for module in tried if multiplies(module) and not is_left_out(layer, module)]
    products: list[tuple[nn.Module, Tensor, int]] = []

    def noted(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = type(module).forward(module, *args, **kwargs)
        if not torch.compiler.is_compiling() and _reads(args, chunk.kept):
            products.append((module, out.detach(), out._version))
        return out

    def noting(h_BLE: Tensor) -> Tensor:
        with temporary_attributes((module, "forward", Noting(noted, module)) for module in maps):
            out_BLE = run(h_BLE)
        module, product, version = max(products, key=lambda found: found[1].shape[-1], default=(None, None, 0))
        if known is None:
            _READERS[layer] = [] if module is None else [weakref.ref(module)]
        if chunk.kept is not None and product is not None and product._version == version:  # else code has written over it
            chunk.kept.projection_BLE = product
        return out_BLE

    return noting


def given_projection(run: Callable[..., Tensor], layer: nn.Module, attended: Attended) -> Callable[..., Tensor]:
    """Return `run`, in which the map of the layer that reads this attention returns the product that was kept with it, once."""
    maps = [module for module in (each() for each in _READERS.get(layer, ())) if module is not None and multiplies(module)]
    product = attended.projection_BLE
    given = [] if product is None else [product]

    def forward(module: Any, *args: Any, **kwargs: Any) -> Tensor:
        out = None
        if given and not torch.compiler.is_compiling() and _reads(args, attended):
            out = product_of(module, args[0], given=given.pop())
        return type(module).forward(module, *args, **kwargs) if out is None else out

    def with_product(*args: Any) -> Tensor:
        with temporary_attributes((module, "forward", functools.partial(forward, module)) for module in maps):
            return run(*args)

    return with_product


def _reads(args: tuple[Any, ...], attended: Attended | None) -> bool:
    """Return whether a map is called with nothing but what attention has returned."""
    # A fake tensor in dry runs, which count what is kept.
    if attended is None or len(args) != 1 or type(args[0]) not in (Tensor, FakeTensor) or in_transform():
        return False
    ours, theirs = args[0], attended.out_BHLD
    return ours.numel() == theirs.numel() and ours.untyped_storage()._cdata == theirs.untyped_storage()._cdata
