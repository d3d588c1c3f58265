"""One step on a GPU, recorded by torch's allocator: its history of allocations with their Python stacks, as a timeline.

`SnapshotRecorder` is used as `record.Recorder` is. Bytes are those that were asked for; the allocator rounds each up to 512.
Known limit: `torch.cuda.memory._record_memory_history` is torch's own tool for this, but not a public name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from streamgrad.profile.labels import Sizes, category_of
from streamgrad.profile.record import Recorder, standing_tensors
from streamgrad.profile.timeline import Ledger, Timeline


def recorder_for(model: Any, tokens: int) -> Recorder | SnapshotRecorder:
    """The recorder of a step of a Hugging Face model on a batch of `tokens` in all, for the device that the model is on."""
    sizes = Sizes.of_model(model, tokens)
    return SnapshotRecorder(model, sizes, model.device) if model.device.type == "cuda" else Recorder(model, sizes)


class SnapshotRecorder:
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
        return self

    def backward_begins(self) -> None:
        """Leaves its mark in the trace: an allocation that was made by a function of this name."""
        torch.empty(1, dtype=torch.uint8, device=self._device)

    def __exit__(self, *exception: object) -> None:
        torch.cuda.synchronize(self._device)
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        try:
            self._trace = torch.cuda.memory._snapshot(self._device)["device_traces"][index]
        finally:
            torch.cuda.memory._record_memory_history(None)

    def timeline(self) -> Timeline:
        gradients = [p.grad.untyped_storage().data_ptr() for p in self._model.parameters() if p.grad is not None]
        return timeline_of_trace(self._trace, standing=self._standing, gradients=gradients, sizes=self._sizes)


def timeline_of_trace(
    trace: Sequence[Mapping[str, Any]], *, standing: Mapping[str, int], gradients: Iterable[int], sizes: Sizes
) -> Timeline:
    """A device's entry of `device_traces`, in milliseconds since its first event.

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
            frames = [(frame["filename"], frame["name"]) for frame in event.get("frames", ())]
            if any(function == "backward_begins" and file.endswith("snapshot.py") for file, function in frames):
                ledger.backward_begins(time)
            numbers[event["addr"]] = ledger.born(time, event["size"], category_of(frames, event["size"], sizes))
        elif event["action"] == "free_completed":
            if event["addr"] in numbers:
                ledger.died(time, numbers.pop(event["addr"]))
            else:
                ledger.born(time, -event["size"], "other")  # it was there before
    for address in gradients:
        if address in numbers:
            ledger.recognise(numbers[address], "gradients")
    return ledger.timeline("ms")
