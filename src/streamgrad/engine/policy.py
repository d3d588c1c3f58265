"""What one layer keeps between forward and backward, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerPolicy:
    """What a layer keeps for backward, on the device or in host memory.

    A `recomputed` layer keeps nothing from forward to backward. Backward runs the layers below it again, from the nearest one
    that is not recomputed, and keeps this then.
    """

    keep: str  # "input", "attention" or "all"
    on_host: bool = False
    recomputed: bool = False
    projection: bool = False  # with attention on the host, also the product that reads it

    def __str__(self) -> str:
        return f"{'recomputed ' if self.recomputed else ''}{self.keep}{' on host' if self.on_host else ''}"

    @property
    def holds_attention(self) -> bool:
        """Return whether keys, values and attention's output stay on the device, neither recomputed nor copied back."""
        return self.keep == "attention" and not self.on_host
