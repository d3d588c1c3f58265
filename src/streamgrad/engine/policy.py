"""What one layer keeps between forward and backward, and where."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerPolicy:
    """What a layer keeps for backward, on the device or in host memory."""

    keep: str  # "input", "attention" or "all"
    on_host: bool = False

    def __str__(self) -> str:
        return f"{self.keep} on host" if self.on_host else self.keep

    @property
    def holds_attention(self) -> bool:
        """Return whether keys, values and attention's output stay on the device, neither recomputed nor copied back."""
        return self.keep == "attention" and not self.on_host
