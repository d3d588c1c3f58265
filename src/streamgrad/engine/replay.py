"""Re-running a chunk exactly as it ran: the same autocast and the same random numbers.

In backward autocast is off, and dropout would draw from a generator that has moved on. Both are put back, so that the re-run of
a chunk is the computation whose output went into the loss.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Autocast:
    """The autocast state of `device_type` at construction; `restored()` re-enters it."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.enabled = torch.is_autocast_enabled(device_type)
        self.dtype = torch.get_autocast_dtype(device_type)
        self.cache_enabled = torch.is_autocast_cache_enabled()

    def restored(self) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache_enabled)

    def forget_casts(self) -> None:
        """Drop cached casts of parameters that were made without a graph.

        Autocast would hand them to a later, ordinary forward in the same context, whose weights would then get no gradient.
        """
        if self.enabled:
            torch.clear_autocast_cache()


def as_autocast(tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype of matrix products under the current autocast; itself if autocast is off."""
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


# Held by a thread that draws random numbers. All threads share torch's generators, and a draw by another one in the middle of a
# chunk could not be repeated.
DRAWING = threading.RLock()


class RandomTape:
    """Generator states before the chunks that drew random numbers; nothing is stored for other chunks."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cuda_devices = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def has_draws(self) -> bool:
        return bool(self._states)

    @contextmanager
    def recording(self, chunk_index: int) -> Iterator[None]:
        with DRAWING:
            before = self._state()
            yield
            if not all(map(torch.equal, before, self._state())):
                self._states[chunk_index] = before

    @contextmanager
    def replaying(self, chunk_index: int) -> Iterator[None]:
        """Let the chunk draw the numbers that it drew while recording; afterwards the generators are as before."""
        if chunk_index not in self._states:
            yield
            return
        with DRAWING:
            resume = self._state()
            try:
                self._set_state(self._states[chunk_index])
                yield
            finally:
                self._set_state(resume)

    def forget(self, chunk_index: int) -> bool:
        """Return whether the chunk drew, and forget it. The generators stay where they are: another thread may have drawn too."""
        return self._states.pop(chunk_index, None) is not None

    def _state(self) -> tuple[Tensor, ...]:
        on_cpu = torch.default_generator.get_state()
        return (on_cpu, *map(torch.cuda.get_rng_state, self._cuda_devices)) if self._cuda_devices else (on_cpu,)

    def _set_state(self, state: tuple[Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        for device, device_state in zip(self._cuda_devices, state[1:], strict=True):
            torch.cuda.set_rng_state(device_state, device)
