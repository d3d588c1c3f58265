"""Runs segments of layers again in backward: only the first layer of a segment keeps its input.

This is for steps whose layers' inputs fit neither the device nor the host.

    h_1 = layer_0(h_0), h_2 = layer_1(h_1), ...          h_0 alone is kept from forward to backward

Backward of the last layer runs the layers before it forward once more, with their random numbers and autocast, and keeps what
each of them would have kept. Then all go backward one by one, as ever. Each layer stays an autograd node of its own, so engines,
hooks and outputs between layers see no difference.

A layer belongs to the segment of the one below only if its input is that layer's output, unchanged. If anything changes the
hidden states between two layers (image features that are added, a hook, another device), the upper layer keeps its own input.

Shapes: B batch, T sequence, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.call import StreamedCall
from streamgrad.engine.kv_chunk import Attended
from streamgrad.engine.saved import Reader, Saved, already_freed


class Joint:
    """Tells whether a layer's input is the output of the layer below it."""

    def __init__(self) -> None:
        self._out_BTE: Tensor | None = None
        self._sum: Tensor | None = None
        self._version = 0

    def note(self, out_BTE: Tensor) -> None:
        """Hold the output of a layer, until the next layer is called: no other tensor can have its memory meanwhile."""
        self._out_BTE, self._version, self._sum = out_BTE, out_BTE._version, _sum_of_bits(out_BTE)

    def node_below(self, h_BTE: Tensor) -> Any:
        """Return the autograd node of the streamed layer whose output `h_BTE` is, bit for bit; None if there is none."""
        out_BTE, self._out_BTE = self._out_BTE, None
        if out_BTE is None or _place(h_BTE) != _place(out_BTE) or h_BTE._version != self._version:
            return None
        node = out_BTE.grad_fn
        if not hasattr(node, "kept") or not _reaches(h_BTE.grad_fn, node):
            return None
        assert self._sum is not None, "it is summed where the output is held"
        return node if torch.equal(_sum_of_bits(h_BTE), self._sum) else None


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors have in common that are the same numbers in the same memory."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return what nearly every change of the numbers changes: what a hook writes into `.data` raises no version.

    Eight bytes count as one number, as torch copies smaller integers to sum them. NaN, which equals nothing, where that is not
    possible.
    """
    size = tensor.dtype.itemsize
    if not tensor.is_contiguous() or tensor.shape[-1] * size % 8 or tensor.storage_offset() * size % 8:
        return torch.tensor(torch.nan, device="cpu")
    return tensor.detach().view(torch.int64).sum()


def _reaches(function: Any, node: Any) -> bool:
    """Return whether backward goes to `node` from `function`, through engines' and hooks' functions that pass on their input.

    Not so for a detached copy of the same memory: the node could be freed before this layer's backward.
    """
    functions = [function]
    for _ in range(4):
        if node in functions:
            return True
        functions = [following for each in functions if each is not None for following, _ in each.next_functions]
    return False


class _Held:
    """Stands in for a node's context, which takes no tensors once its forward has ended."""

    def __init__(self) -> None:
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors


# Given an autograd node, its layer's input and what is told of each chunk, returns the layer's output, keys and values.
RunAgain = Callable[[Any, Tensor, Saved | None], tuple[Tensor, tuple[Tensor, ...]]]


class Recomputed:
    """Keeps nothing; in backward, the layers below make the input again. As `saved.Saved`."""

    def __init__(self, call: StreamedCall, run_again: RunAgain) -> None:
        self._call: StreamedCall | None = call
        self._run_again = run_again
        self._again: tuple[Saved, _Held] | None = None
        call.below.kept.will_be_read_whole()

    def note(self, index: int, attended: Attended | None) -> None:
        """Keep nothing of a chunk in forward."""

    def finish(self, ctx: Any, keys_and_values: tuple[Tensor, ...]) -> None:
        """Leave nothing with `ctx`."""

    def will_be_read_whole(self) -> None:
        """Do nothing: the layer above reads what the layers below this one make."""

    def reader(self, ctx: Any) -> Reader:
        """Return a reader of what this layer keeps now; it is gone afterwards, and is made again in another pass."""
        if self._again is None:
            self._run_segment()
        assert self._again is not None
        (saved, held), self._again = self._again, None
        return saved.reader(held)

    def release(self) -> None:
        self._call = self._again = None

    def _run_segment(self) -> None:
        """Run the layers below forward again, from the one that has its input; each of them then keeps what its policy says."""
        links = [self]  # downwards
        while isinstance(kept := links[-1]._node_below().kept, Recomputed):
            links.append(kept)
        node = links[-1]._node_below()
        h_BTE, _ = self._run_again(node, node.kept.read_whole(node), None)
        while links:
            link = links.pop()
            h_BTE = link._keep(h_BTE, links[-1]._node_below() if links else None)

    def _node_below(self) -> Any:
        """Return the node whose output is this layer's input; raise if either has run backward for good."""
        node = None if self._call is None else self._call.below
        if node is None or node.call is None:
            raise already_freed()
        return node

    def _keep(self, h_BTE: Tensor, node: Any) -> Tensor:
        """Keep the layer's input until its backward, and what running it leaves; return its output, or its input without `node`.

        The last layer of a segment has no `node`: it is not run here, but in its own backward, which is next.
        """
        assert self._call is not None
        saved, held, out_BTE = self._call.stored(h_BTE), _Held(), h_BTE
        keys_and_values: tuple[Tensor, ...] = ()
        if node is None:
            for index in range(len(self._call.spans(h_BTE.shape[1]))):
                saved.note(index, None)
        else:
            out_BTE, keys_and_values = self._run_again(node, h_BTE, saved)
        saved.finish(held, keys_and_values)
        self._again = saved, held
        return out_BTE
