"""The device on which a command runs its models, from `--device`."""

from __future__ import annotations

import torch


def chosen_device(name: str | None, *, one_thread: bool = True) -> torch.device:
    """Return the device that `--device` names: cuda, cpu, or by default cuda if there is one.

    With `one_thread`, torch gets one CPU thread: threads that wait for a busy core make small models several times slower.
    """
    has_cuda = torch.cuda.is_available()
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {name!r}.")
    if name == "cuda" and not has_cuda:
        raise ValueError("--device cuda cannot be used: torch sees no GPU. Pass --device cpu.")
    device = torch.device(name or ("cuda" if has_cuda else "cpu"))
    if device.type == "cpu" and one_thread:
        torch.set_num_threads(1)
    return device
