"""Records one step on a CPU: `with Recorder(model, sizes) as recorder: ...`, then `recorder.timeline()`.

    loss = model(**batch).loss
    recorder.backward_begins()
    loss.backward()

Each torch operation is a moment. What kernels make and drop inside an operation is not seen. What stood before the step is
counted only where it belongs to the model. `snapshot.SnapshotRecorder` does the same by torch's allocator on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import Tensor, nn

from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops.freed_gradient import held_gradient
from streamgrad.ops.memory_label import Listener, current_label, listen, stop_listening
from streamgrad.profile.labels import CATEGORY_OF_LABEL, Sizes, category_of
from streamgrad.profile.timeline import Ledger, Timeline

# Frames of torch that lie between an operation and the mode that watches it.
_BETWEEN = ("/torch/_dynamo/", "/torch/_compile.py")


class Recorder(LiveBytes, Listener):
    def __init__(self, model: nn.Module, sizes: Sizes) -> None:
        super().__init__()
        self._model, self._sizes = model, sizes
        self._ledger = Ledger()
        self._operation = 0
        self._caller: FrameType | None = None
        self._numbers: dict[int, int] = {}  # of the allocations that are alive, by storage

    def __enter__(self) -> Recorder:
        for tensor, category in standing_tensors(self._model):
            key = tensor.untyped_storage()._cdata
            if key not in self._known:
                self._known.add(key)
                self._numbers[key] = self._ledger.born(0, tensor.untyped_storage().nbytes(), category)
        self._ledger.step_begins()
        super().__enter__()
        listen(self)
        return self

    def __exit__(self, *exception: Any) -> None:
        stop_listening(self)
        super().__exit__(*exception)

    def relabelled(self, tensor: Tensor, label: str) -> None:
        number = self._numbers.get(tensor.untyped_storage()._cdata)
        if number is not None:
            self._ledger.recognise(number, CATEGORY_OF_LABEL[label])

    def backward_begins(self) -> None:
        self._ledger.backward_begins(self._operation)

    def timeline(self) -> Timeline:
        for parameter in self._model.parameters():
            gradient = held_gradient(parameter)
            if gradient is not None:
                self._ledger.recognise(self._numbers[gradient.untyped_storage()._cdata], "gradients")
        return self._ledger.timeline("operations")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._operation += 1
        self._caller = sys._getframe(1)
        try:
            return super().__torch_dispatch__(function, types, args, kwargs)
        finally:
            self._caller = None  # or its tensors would live on

    def _born(self, key: int, size: int) -> None:
        super()._born(key, size)
        if size:
            category = category_of(current_label(), _frames(self._caller), size, self._sizes)
            self._numbers[key] = self._ledger.born(self._operation, size, category)

    def _die(self, key: int, size: int) -> None:
        super()._die(key, size)
        if size:
            self._ledger.died(self._operation, self._numbers.pop(key))


def standing_tensors(model: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yield what a model holds before a step, and what it is."""
    for parameter in model.parameters():
        yield parameter, "parameters"
        gradient = held_gradient(parameter)
        if gradient is not None:
            yield gradient, "gradients"
    for buffer in model.buffers():
        yield buffer, "parameters"


def _frames(frame: FrameType | None) -> list[tuple[str, str]]:
    """Return the frames of whatever called an operation, the innermost first."""
    found: list[tuple[str, str]] = []
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if found or not any(part in file for part in _BETWEEN):
            found.append((file, frame.f_code.co_name))
        frame = frame.f_back
    return found
