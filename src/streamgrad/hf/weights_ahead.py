"""Weights that wait on the host, brought to the GPU one layer ahead.

FSDP2 with one rank copies a layer's weights when the layer is called, on the stream that computes, which waits for them: 0.3 s
for those of Qwen3-8B, in forward and again in backward. Here the next layer's are copied on a stream of their own while a layer
runs, and FSDP2 finds them there when it asks its parameters for their values. With several ranks it fetches ahead itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.hf.sharded import groups_of
from streamgrad.ops.autograd import backward_pass


class WeightsAhead:
    """The weights of a decoder's layers, where they wait in pinned memory until their layer is called."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Made for each call of the decoder."""
        self._waiting = [_waiting(layer) for layer in layers]
        self._device = next((parameter.device for parameter in chain(*self._waiting)), None)
        self._copies: _Copies | None = None
        self._handed_over: list[_Arrived] = []

    def beside(self, index: int) -> Callable[[], AbstractContextManager[None]]:
        """Return what layer `index` runs within: the weights of the layer that is called next are copied meanwhile."""
        return nullcontext if self._device is None else partial(self._fetching, index, self._device)

    def drop(self) -> None:
        """Forget what was fetched and is not read yet. Weights may change once the decoder's call has ended, or failed."""
        for arrived in self._handed_over:
            arrived.leave()
        self._handed_over.clear()

    @contextmanager
    def _fetching(self, index: int, device: torch.device) -> Iterator[None]:
        following = index + (1 if backward_pass() == -1 else -1)
        waiting = self._waiting[following] if 0 <= following < len(self._waiting) else []
        waiting = [parameter for parameter in waiting if parameter.sharded_state.name == "SHARDED"]
        noted = [_state(parameter) for parameter in waiting]
        self.drop()  # those of layer `index`, which FSDP2 has read before it called the layer
        self._copies = _Copies([parameter._sharded_param_data for parameter in waiting], device, after=self._copies)
        yield
        handed_over = zip(waiting, self._copies.arrived(), noted, strict=True)
        self._handed_over = [_Arrived.hand_over(parameter, copy, state) for parameter, copy, state in handed_over]


class _Copies:
    """Copies of values to `device`, on a stream of their own, in the memory of the copies `after` which they come.

    The host runs ahead of the GPU by many layers. Copies begin when the GPU has computed all that was called before them, so the
    weights of one layer are ahead. `record_stream` would hold the memory of all of them until the host looks.
    """

    def __init__(self, values: Sequence[Tensor], device: torch.device, *, after: _Copies | None) -> None:
        self._device, self._stream = device, _stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            after._copies.clear()
        with torch.cuda.stream(self._stream):
            self._copies: list[Tensor] = [value.to(device, non_blocking=True) for value in values]

    def arrived(self) -> list[Tensor]:
        """Return the copies; what is computed from now on waits for them."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return self._copies.copy()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all copies to a device; memory that a stream has used stays with that stream."""
    return torch.cuda.Stream(device)


class _Arrived(Tensor):
    """A parameter's values on the host, in the place where FSDP2 looks for them; the first `to` returns what is on the GPU.

    It gives the place back to the values themselves then. They are copied anew if they have changed since, or if a backward pass
    has begun or ended.
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
    """Return FSDP2's parameters of a layer, if they wait in pinned memory and this process is the only rank.

    Tensors that say themselves what is gathered of them, as 8-bit ones do, are left to FSDP2.
    """
    alone = [group for group in groups_of(layer) if getattr(group.mesh_info, "shard_mesh_size", 1) == 1]
    found = [each for group in alone for each in group.fsdp_params]
    own = [each for each in found if not hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather")]
    return [each for each in own if each.offload_to_cpu and each.pin_memory]
