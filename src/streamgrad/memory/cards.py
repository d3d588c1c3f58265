"""GPUs by name: the memory that a process gets, and how fast they compute and talk to each other.

    memory     GiB that torch finds, less half a GiB for the context of a process
    peak       published TFLOP/s of dense matrix products in bfloat16 with fp32 sums (float16 on a T4, which has no bfloat16)
    link       published GB/s of one GPU to the others of its machine, each way: NVLink, Infinity Fabric or PCIe

Only an H200 was measured: its rates are those of `memory.seconds.Rates`. Another card's are the same share of its peak.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamgrad.memory.seconds import Links, Rates


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU."""

    label: str
    gib: float
    peak_tflops: float
    link_gbs: float
    unknown: bool = False  # then rates are those of another card

    @property
    def memory_bytes(self) -> int:
        return int(self.gib * 2**30)

    @property
    def rates(self) -> Rates:
        share, own = self.peak_tflops / _MEASURED.peak_tflops, Rates()
        return Rates(share * own.gemm, share * own.attention_forward, share * own.attention_backward)

    @property
    def links(self) -> Links:
        return Links(inside=1e9 * self.link_gbs)

    @property
    def rates_told(self) -> str:
        """Return in words where its rates come from."""
        if self.unknown:
            return f"those of a card with {self.peak_tflops:g} TFLOP/s at its peak, as {self.label} is not known; pass your own"
        if self.peak_tflops == _MEASURED.peak_tflops:
            own = "as measured on an H200"
            return own if self is _MEASURED else f"{own}, whose published peak is the same"
        return (
            f"its published {self.peak_tflops:g} TFLOP/s of dense 16-bit products times the share of its own that an H200 "
            "reached; not measured"
        )


GPUS = {
    "t4": Gpu("T4", 14.1, 65, 16),
    "rtx3090": Gpu("RTX 3090", 23.2, 71, 32),
    "rtx4090": Gpu("RTX 4090", 23.1, 165.2, 32),
    "rtx5090": Gpu("RTX 5090", 30.9, 209.5, 64),
    "a10g": Gpu("A10G", 21.6, 70, 32),
    "l4": Gpu("L4", 21.6, 121, 32),
    "rtxa6000": Gpu("RTX A6000", 47.0, 154.8, 32),
    "l40s": Gpu("L40S", 43.9, 362, 32),
    "a100-40gb": Gpu("A100 40GB", 38.9, 312, 300),
    "a100-80gb": Gpu("A100 80GB", 78.7, 312, 300),
    "h100": Gpu("H100 80GB", 78.7, 989.4, 450),
    "h200": Gpu("H200", 139.0, 989.4, 450),
    "b200": Gpu("B200", 177.8, 2250, 900),
    "mi300x": Gpu("MI300X", 191.0, 1307.4, 448),
}
_MEASURED = GPUS["h200"]
# Other spellings of the same card.
_ALSO = {"h100-80gb": "h100", "a100": "a100-80gb", "a6000": "rtxa6000", "4090": "rtx4090", "3090": "rtx3090", "5090": "rtx5090"}


def gpu_named(name: str) -> Gpu:
    """Return the card of `--gpu NAME`. Raises `ValueError`, with all names, for another."""
    key = "".join(name.lower().replace("_", "-").split())
    gpu = GPUS.get(_ALSO.get(key, key))
    if gpu is None:
        raise ValueError(f"gpu={name!r} is not known. Pass one of {', '.join(GPUS)}, or gpu_memory with the size of yours.")
    return gpu


def gpu_like(device_name: str, gib: float) -> Gpu | None:
    """Return the known card that a driver's name means (`NVIDIA A100-SXM4-80GB`), if there is one of about that memory."""
    words = "".join(character for character in device_name.lower() if character.isalnum())
    for gpu in GPUS.values():
        plain = "".join(character for character in gpu.label.lower().split(" 40")[0].split(" 80")[0] if character.isalnum())
        if plain in words and 0.85 < gib / gpu.gib < 1.15:
            return gpu
    return None
