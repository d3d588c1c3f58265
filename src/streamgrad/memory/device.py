"""How much memory there is: on a device, for this process, and on the host."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from streamgrad.memory.planner import HOST_SHARE, MARGIN, MARGIN_IN_FIXED_SEGMENTS


def device_memory(device: torch.device) -> tuple[int, float]:
    """Return the bytes of this process's tensors on a CUDA device, and the most that they may grow to.

    The latter is what the process has reserved and what is free, within the process's own limit if it has one.
    """
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    # `memory_allocated` and `memory_reserved` flatten hundreds of numbers each, while a device may wait for its next kernel.
    count = torch.cuda.memory_stats_as_nested_dict(device)
    held, reserved = (count[name]["all"]["current"] if count else 0 for name in ("allocated_bytes", "reserved_bytes"))
    free, total = torch.cuda.mem_get_info(device)
    fraction = torch.cuda.get_per_process_memory_fraction(device)
    return held, min(reserved + free, fraction * total)


def segments_grow() -> bool:
    """Return whether the environment tells torch's allocator to extend its segments.

    If not, blocks are cut from segments of fixed sizes, and what remains of one is often too small for the next tensor.
    """
    return "expandable_segments:true" in allocator_settings().replace(" ", "").lower()


def allocator_settings() -> str:
    """Return the environment variable that torch's allocator reads: the newer name, or the older if that is not set."""
    return os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def usable_share() -> float:
    """Return the share of a process's device memory that a plan may fill; the rest is for fragments."""
    return 1.0 - (MARGIN if segments_grow() else MARGIN_IN_FIXED_SEGMENTS)


def host_budget_bytes(*, held_bytes: int) -> float:
    """Return the host memory that this process may use, including the `held_bytes` that it has already.

    It is shared evenly between the processes that a launcher has started on this machine.
    """
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return held_bytes + HOST_SHARE * available_host_bytes() / processes


def available_host_bytes() -> float:
    """Return the kernel's estimate of what can be allocated, within the limit of the control group if there is one."""
    available = float("inf")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available = 1024.0 * float(fields["MemAvailable"].split()[0])
    for folder, limit_file, usage_file, reclaimable in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit, usage = ((Path(folder) / name).read_text().strip() for name in (limit_file, usage_file))
            counts = dict(line.split() for line in (Path(folder) / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if limit != "max":
            # Files that were read, checkpoints among them, count as used until something else needs the room.
            used = float(usage) - float(counts.get(reclaimable, 0))
            available = min(available, max(0.0, float(limit) - used))
    return available
