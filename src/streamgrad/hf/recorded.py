"""What transformers records inside of decoder layers while they run: the logits of routers, for a load-balancing loss.

transformers hooks the modules that make them, and a collector that is active during the decoder's forward takes what they return.
In a streamed layer each chunk has a collector of its own. Its tensors become outputs of the layer beside the hidden states, so
that gradients flow back through them, and the whole sequence's are handed to the collector that was active around the layer.
Where ranks share a sequence, each is given those of all ranks, since a balance loss is no sum of losses of slices.

Private details of transformers that this relies on, pinned by tests/project/test_foreign_names.py: `output_capturing` holds the
active collector, a dict of lists, in `_active_collector`.

Shapes: B batch, L tokens of a chunk, T sequence, X experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.utils import output_capturing

from streamgrad.engine.kv_chunk import SeamError

# Recorded from a whole layer's output, outside of any chunk.
_OF_LAYERS = {"hidden_states", "_hidden_states_layers"}


class Recorder:
    """Collects what one layer's modules record, chunk by chunk."""

    def __init__(self) -> None:
        active = output_capturing._active_collector.get() or {}
        self.is_asked = bool(active)
        self.keys = [key for key in active if key not in _OF_LAYERS]
        self._collected = [key for key in active if key != "_hidden_states_layers"]
        self._found: list[tuple[str, int]] = []  # the key of each tensor, and how many dimensions it had

    @contextmanager
    def collecting(self, h_BLE: Tensor, chunk: Any) -> Iterator[None]:
        """Give the chunk what is recorded within the block, (B, L, X) each."""
        collected: dict[str, list[Tensor]] = {key: [] for key in self._collected}
        token = output_capturing._active_collector.set(collected)
        try:
            yield
        finally:
            output_capturing._active_collector.reset(token)
        if collected.get("hidden_states"):
            raise SeamError(
                "its layers record hidden_states of a module inside of them (Zamba 2), which a chunk has of its own tokens only; "
                "pass output_hidden_states=False"
            )
        tensors = [(key, tensor) for key in self.keys for tensor in collected[key]]
        self._found = [(key, tensor.ndim) for key, tensor in tensors]
        chunk.recorded = [_by_token(key, tensor, h_BLE) for key, tensor in tensors]

    def hand_over(self, recorded_BTX: Iterable[Tensor]) -> None:
        """Append the whole sequence's tensors to the collector around the layer, in the shape in which they were recorded."""
        active = output_capturing._active_collector.get()
        for (key, ndim), tensor_BTX in zip(self._found, recorded_BTX, strict=True):
            active[key].append(tensor_BTX.flatten(0, 1) if ndim == 2 else tensor_BTX)


def _by_token(key: str, tensor: Tensor, h_BLE: Tensor) -> Tensor:
    batch, length = h_BLE.shape[:2]
    if tensor.ndim == 2 and len(tensor) == batch * length:
        return tensor.view(batch, length, -1)
    if tensor.ndim < 3 or tensor.shape[:2] != (batch, length):
        raise SeamError(f"its layers record {key} of shape {tuple(tensor.shape)}, and how to cut it into chunks is not known")
    return tensor
