"""Weights that wait on the host, brought to the GPU one layer ahead.

FSDP2 with one rank copies a layer's weights when the layer is called, on the stream that computes, which waits for them: 0.3 s
for those of Qwen3-8B, in forward and again in backward. Here the next layer's are copied on a stream of their own while a layer
runs, and FSDP2 finds them there when it asks its parameters for their values. With several ranks it fetches ahead itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from streamgrad.hf.libraries.sharded import fsdp_groups_of, gathers_first
from streamgrad.ops.autograd import after_backward, backward_pass

_Surroundings = Callable[[], AbstractContextManager[Any]]


class WeightsAhead:
    """The weights of a decoder's layers, where they wait in pinned memory until their layer is called."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Made for each call of the decoder; what an earlier one has left, whose backward pass failed, is dropped."""
        self._waiting = [_waiting(layer) for layer in layers]
        device = next((parameter.device for parameter in chain(*self._waiting)), None)
        self._copies = None if device is None else _Copies(device)
        self._handed_over = [
            each for each in (p._sharded_param_data for p in chain(*self._waiting)) if isinstance(each, _Arrived)
        ]
        self._backward_pass = -1
        self.drop()

    def beside(self, index: int, surroundings: _Surroundings) -> _Surroundings:
        """Return what layer `index` runs within: `surroundings`, and the next layer's weights are copied meanwhile."""
        return surroundings if self._copies is None else partial(self._fetching, index, surroundings, self._copies)

    def drop(self) -> None:
        """Forget what was fetched: weights may change once the decoder's call or a backward pass has ended."""
        for arrived in self._handed_over:
            arrived.leave()
        self._handed_over = []
        if self._copies is not None:
            self._copies.free()

    @contextmanager
    def _fetching(self, index: int, surroundings: _Surroundings, copies: _Copies) -> Iterator[None]:
        task = backward_pass()
        if task not in (-1, self._backward_pass):
            after_backward(self.drop)  # a layer below may need no gradient, and is not called
            self._backward_pass = task
        following = index + (1 if task == -1 else -1)
        waiting = self._waiting[following] if 0 <= following < len(self._waiting) else []
        waiting = [parameter for parameter in waiting if parameter.sharded_state.name == "SHARDED"]
        noted = [_state(parameter) for parameter in waiting]
        self.drop()  # those of layer `index`, which FSDP2 has read before it called the layer
        arriving = copies.begin([parameter._sharded_param_data for parameter in waiting])
        with surroundings():
            yield
        copies.wait()
        handed_over = zip(waiting, arriving, noted, strict=False)
        self._handed_over = [_Arrived.hand_over(parameter, copy, state) for parameter, copy, state in handed_over]


class _Copies:
    """Copies on a stream of their own, whose memory the next ones use again.

    The host runs ahead of the GPU by many layers. Copies begin when the GPU has computed what was called before the last were
    freed, so the weights of one layer are ahead. `record_stream` would hold the memory of all until the host looks.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, _stream(device)
        self._held: list[Tensor] = []

    def begin(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of the values that are on their way; none where memory is short, so that FSDP2 copies in its turn."""
        with torch.cuda.stream(self._stream):
            try:
                self._held = [value.to(self._device, non_blocking=True) for value in values]
            except torch.OutOfMemoryError:
                self._held = []
        return self._held.copy()

    def wait(self) -> None:
        """Let what is computed from now on find the copies there."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def free(self) -> None:
        """Give the memory of the copies back to their stream, which uses it when all that was called so far is computed."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._held = []


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies to a device; memory that a stream has used stays with that stream."""
    return torch.cuda.Stream(device)


class _Arrived(Tensor):
    """A parameter's values on the host, in the place where FSDP2 looks for them; the first `to` returns what is on the GPU.

    It gives the place back to the values themselves then. They are copied anew if their version is another, or if a backward pass
    has begun or ended since. Versions alone would not do: optimizers that update many parameters at once leave them as they are.
    """

    _owner: Any
    _on_host: Tensor
    _on_gpu: Tensor
    _noted: tuple[int, ...]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def hand_over(cls, owner: Any, copy: Tensor, state: tuple[int, ...]) -> _Arrived:
        """Let FSDP2 find `copy`, which was made of the owner's values in this state."""
        values = owner._sharded_param_data
        arrived = values.as_subclass(cls)
        arrived._owner, arrived._on_host, arrived._on_gpu, arrived._noted = owner, values, copy, state
        owner._sharded_param_data = arrived
        return arrived

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        self.leave()
        fresh = self._noted == _state(self._owner)
        return self._on_gpu if fresh else self._on_host.to(*args, **kwargs)

    def leave(self) -> None:
        """Give the place back, if it is still this one's."""
        if self._owner._sharded_param_data is self:
            self._owner._sharded_param_data = self._on_host


def _state(parameter: Any) -> tuple[int, ...]:
    """Return the versions of a parameter and of its values, which operations on the one or the other change, and the pass."""
    return parameter.sharded_param._version, parameter._sharded_local_tensor._version, backward_pass()


def _waiting(layer: nn.Module) -> list[Any]:
    """Return FSDP2's parameters of a layer that are fetched ahead, if this process is the only rank.

    A hook that others have put before FSDP2's own may change weights when the layer is called, and unseen; then it is none.
    """
    alone = [group for group in fsdp_groups_of(layer) if getattr(group.mesh_info, "shard_mesh_size", 1) == 1]
    if not alone or not gathers_first(layer) or _module._global_forward_pre_hooks:
        return []
    return [each for group in alone for each in group.fsdp_params if _is_fetched(each)]


def _is_fetched(parameter: Any) -> bool:
    """Return whether a parameter waits in pinned memory of a CUDA device.

    Tensors that say themselves what is gathered of them, as 8-bit ones do, are left to FSDP2.
    """
    waits = parameter.offload_to_cpu and parameter.pin_memory and parameter.device.type == "cuda"
    return waits and not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")
