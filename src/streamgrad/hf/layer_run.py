"""A decoder layer's own forward, run on one chunk after the other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from streamgrad.engine.checks.contents import switches_in
from streamgrad.hf.discover import attention_configs
from streamgrad.hf.fusion import Fusion
from streamgrad.hf.layer_args import LayerArguments
from streamgrad.hf.libraries.quantized import never_packed
from streamgrad.hf.patching import not_checkpointed
from streamgrad.hf.recorded import Recorder
from streamgrad.hf.seams import streamed_attention_in


class LayerRun:
    """Runs one layer, of these modules, on chunks within `surroundings()`, or on one chunk by `alone`."""

    def __init__(self, modules: list[nn.Module], arguments: LayerArguments, recorder: Recorder, *, fused_kernels: str) -> None:
        self._modules, self._arguments, self._recorder = modules, arguments, recorder
        self._configs, self._fusion = attention_configs(modules), Fusion(modules, mode=fused_kernels)

    def switches(self) -> Iterator[Hashable]:
        """Yield what the layer's code may ask beside its modules and hidden states: plain arguments, and its configurations."""
        yield from (switches_in(values) for values in (self._arguments.others, *map(vars, self._configs)))
        yield tuple(self._arguments.token_inputs.names)

    @contextmanager
    def surroundings(self) -> Iterator[None]:
        """Let the layer attend by chunks within the block, with its fused parts; enter it once for many chunks."""
        modules = self._modules
        with (
            streamed_attention_in(self._configs), self._fusion.installed(), never_packed(modules), not_checkpointed(modules)
        ):  # fmt: skip
            yield

    def __call__(self, h_BLE: Tensor, chunk: Any) -> Tensor:
        """Return the layer's output for a chunk, which is given what is recorded meanwhile."""
        if self._recorder.is_asked:
            with self._recorder.collecting(h_BLE, chunk):
                out_BLE = self._arguments.run(h_BLE, chunk)
        else:
            out_BLE = self._arguments.run(h_BLE, chunk)
        self._arguments.token_inputs.note(chunk, h_BLE.shape[1])
        return out_BLE

    def alone(self, h_BLE: Tensor, chunk: Any) -> Tensor:
        with self.surroundings():
            return self(h_BLE, chunk)
