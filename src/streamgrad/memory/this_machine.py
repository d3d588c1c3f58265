"""The machine that a plan is made for: this one unless a card, a size or a rate is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from streamgrad.memory.cards import GPUS, Gpu, gpu_like, gpu_named
from streamgrad.memory.seconds import Links, Rates

# Where there is no GPU, or another machine's is named.
DEFAULT_GPU, DEFAULT_HOST_BYTES = "h100", 256 * 2**30


@dataclass(frozen=True)
class Machine:
    """A GPU, the memory of the host that it is in, and in words where each number comes from."""

    gpu: str
    gpu_bytes: int
    host_bytes: int
    rates: Rates
    links: Links
    told: tuple[str, ...]


def machine(
    *,
    gpu: str | None = None,
    gpu_bytes: int | None = None,
    host_bytes: int | None = None,
    rates: Rates | None = None,
    links: Links | None = None,
) -> Machine:
    """Return this machine with everything that is given in place of its own."""
    found = None if gpu is not None else this_gpu()
    card = gpu_named(gpu) if gpu is not None else found or GPUS[DEFAULT_GPU]
    if gpu is not None:
        told = f"the GPU is {card.label}"
    elif found is not None:
        told = f"the GPU is this machine's {card.label}"
    elif gpu_bytes is not None:
        told = f"torch finds no GPU here: one with the rates of {card.label}; name yours with --gpu"
    else:
        told = f"torch finds no GPU here: planned for {card.label}; name yours with --gpu"
    size = f"{gpu_bytes / 2**30:.1f} GiB of it, as given" if gpu_bytes else f"{card.gib:.1f} GiB for a process"
    lines = [f"{told}; {size}"]
    if host_bytes is None:
        here = found is not None
        host_bytes = host_total_bytes() if here else DEFAULT_HOST_BYTES
        whose = "this machine's" if here else "taken for granted; say yours with --host-memory"
        lines.append(f"{host_bytes / 2**30:.0f} GiB of host memory, {whose}")
    lines.append("rates of products and attention: " + ("as given" if rates else card.rates_told))
    label = card.label if gpu is not None or found is not None or gpu_bytes is None else "GPU"
    own_links = links or card.links
    return Machine(label, gpu_bytes or card.memory_bytes, host_bytes, rates or card.rates, own_links, tuple(lines))


def this_gpu() -> Gpu | None:
    """Return the first GPU of this machine, with the rates of the known card that it is, or of an H100 where it is none."""
    if not any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")):
        return None  # and torch, whose import takes seconds, is not needed to know
    import torch

    if not torch.cuda.is_available():
        return None
    name, total = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
    gib = total / 2**30 - 0.5
    known = gpu_like(name, gib)
    like = known or GPUS[DEFAULT_GPU]
    return Gpu(name, gib, like.peak_tflops, like.link_gbs, unknown=known is None)


def host_total_bytes() -> int:
    """Return the memory of this machine, or of the control group that it is limited to."""
    meminfo = Path("/proc/meminfo")
    totals = [1024 * int(line.split()[1]) for line in _lines(meminfo) if line.startswith("MemTotal:")]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        totals += [int(line) for line in _lines(Path(limit)) if line.isdecimal()]
    return min(totals, default=DEFAULT_HOST_BYTES)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
