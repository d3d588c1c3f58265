"""Where a command's small models run."""

from __future__ import annotations

import torch


def chosen_device(name: str | None, *, one_thread: bool = True) -> torch.device:
    """For `--device`: cuda, cpu, or by default cuda if there is one.

    On a CPU torch is told to use `one_thread`: threads that wait for a busy core make small models several times slower.
    """
    has_cuda = torch.cuda.is_available()
    if name not in (None, "cpu", "cuda") or (name == "cuda" and not has_cuda):
        raise ValueError(f"--device {name} will not do: pass cpu" + (" or cuda." if has_cuda else "; torch sees no GPU."))
    device = torch.device(name or ("cuda" if has_cuda else "cpu"))
    if device.type == "cpu" and one_thread:
        torch.set_num_threads(1)
    return device
