"""torchao's optimizer on the host, on a machine without a GPU: what it copies goes from the CPU to the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


class _Stream:
    """Stands in for a stream of a GPU: everything is done at once."""

    def wait_stream(self, other: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


def offload_without_gpu(monkeypatch: Any) -> None:
    """Let `torchao.optim.CPUOffloadOptimizer` find a GPU, its streams and pinned memory."""
    monkeypatch.setattr("torchao.optim.cpu_offload.get_available_devices", lambda: ["cpu", "cuda"])
    stock = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **options: stock(*args, **options))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, stand_in in {"Stream": _Stream, "current_stream": _Stream, "stream": contextlib.nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
