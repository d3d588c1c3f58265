"""Records one step on a GPU: the history of torch's allocator, with labels and Python stacks, as a timeline.

`SnapshotRecorder` is used like `record.Recorder`. Bytes are those that were asked for; the allocator rounds each up to 512.

A label goes into the history as torch's user metadata, which each thread has its own of. What is said without allocating, that
backward begins or that a tensor has become something else, is the label of a byte that is dropped at once.

Known limit: `torch.cuda.memory._record_memory_history` and `_set_memory_metadata` are torch's own tools, but not public names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.ops.freed_gradient import held_gradient
from streamgrad.ops.memory_label import Listener, listen, memory_label, stop_listening
from streamgrad.profile.labels import CATEGORY_OF_LABEL, Sizes, category_of
from streamgrad.profile.record import Recorder, standing_tensors
from streamgrad.profile.timeline import Ledger, Timeline

BACKWARD_BEGINS = "backward begins"
_IS_AT = " is at "


def relabelling(label: str, address: int) -> str:
    """Return the mark in a trace that the allocation at `address` is `label`."""
    return f"{label}{_IS_AT}{address}"


def recorder_for(model: Any, tokens: int) -> Recorder | SnapshotRecorder:
    """Return a recorder for a step of a Hugging Face model on a batch of `tokens` in all, on the device of the model."""
    sizes = Sizes.of_model(model, tokens)
    return SnapshotRecorder(model, sizes, model.device) if model.device.type == "cuda" else Recorder(model, sizes)


class SnapshotRecorder(Listener):
    def __init__(self, model: nn.Module, sizes: Sizes, device: torch.device) -> None:
        self._model, self._sizes, self._device = model, sizes, device
        self._trace: list[dict[str, Any]] = []
        self._standing: dict[str, int] = {}

    def __enter__(self) -> SnapshotRecorder:
        torch.cuda.synchronize(self._device)
        storages = {tensor.untyped_storage().data_ptr(): (tensor, kind) for tensor, kind in standing_tensors(self._model)}
        for tensor, kind in storages.values():
            if tensor.is_cuda:
                self._standing[kind] = self._standing.get(kind, 0) + tensor.untyped_storage().nbytes()
        rest = torch.cuda.memory_allocated(self._device) - sum(self._standing.values())
        self._standing["other"] = rest
        torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)
        listen(self)
        return self

    def backward_begins(self) -> None:
        self._mark(BACKWARD_BEGINS)

    def label_changed(self, label: str | None) -> None:
        torch.cuda.memory._set_memory_metadata(label or "")

    def relabelled(self, tensor: Tensor, label: str) -> None:
        if tensor.device == self._device:
            self._mark(relabelling(label, tensor.untyped_storage().data_ptr()))

    def _mark(self, label: str) -> None:
        with memory_label(label):
            torch.empty(1, dtype=torch.uint8, device=self._device)

    def __exit__(self, *exception: object) -> None:
        stop_listening(self)
        torch.cuda.synchronize(self._device)
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        try:
            self._trace = torch.cuda.memory._snapshot(self._device)["device_traces"][index]
        finally:
            torch.cuda.memory._record_memory_history(None)

    def timeline(self) -> Timeline:
        held = [gradient for gradient in map(held_gradient, self._model.parameters()) if gradient is not None]
        gradients = [gradient.untyped_storage().data_ptr() for gradient in held]
        return timeline_of_trace(self._trace, standing=self._standing, gradients=gradients, sizes=self._sizes)


def timeline_of_trace(
    trace: Sequence[Mapping[str, Any]], *, standing: Mapping[str, int], gradients: Iterable[int], sizes: Sizes
) -> Timeline:
    """Return the timeline of a device's entry of `device_traces`, in milliseconds since its first event.

    `standing` is what was allocated before; `gradients` are the addresses of parameters' gradients when the step has ended.
    """
    ledger = Ledger()
    for category, size in standing.items():
        ledger.born(0.0, size, category)
    ledger.step_begins()
    numbers: dict[int, int] = {}  # of the allocations that are alive, by address
    start = trace[0]["time_us"] if trace else 0
    for event in trace:
        time = (event["time_us"] - start) / 1e3
        if event["action"] == "alloc":
            label, is_relabelling, address = event.get("user_metadata", "").partition(_IS_AT)
            if label == BACKWARD_BEGINS:
                ledger.backward_begins(time)
            elif is_relabelling and int(address) in numbers:
                ledger.recognise(numbers[int(address)], CATEGORY_OF_LABEL[label])
            is_mark = is_relabelling or label == BACKWARD_BEGINS
            numbers[event["addr"]] = ledger.born(time, event["size"], "other" if is_mark else _category(event, sizes))
        elif event["action"] == "free_completed":
            if event["addr"] in numbers:
                ledger.died(time, numbers.pop(event["addr"]))
            else:
                ledger.born(time, -event["size"], "other")  # it was there before
    for address in gradients:
        if address in numbers:
            ledger.recognise(numbers[address], "gradients")
    return ledger.timeline("ms")


def _category(event: Mapping[str, Any], sizes: Sizes) -> str:
    frames = [(frame["filename"], frame["name"]) for frame in event.get("frames", ())]
    return category_of(event.get("user_metadata"), frames, event["size"], sizes)
