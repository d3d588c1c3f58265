"""One call of one decoder layer: what is run, on which chunks, and what of it is kept. `engine.layer` runs it.

Shapes: B batch, T sequence, L chunk, N tokens of a trial, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.checks.guards import NO_ADAPTERS, AdapterFacts
from streamgrad.engine.checks.in_use import InUse
from streamgrad.engine.checks.trial import Trial
from streamgrad.engine.host_offload import HostStore
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, Span, spans
from streamgrad.engine.module_walk import parameters_in
from streamgrad.engine.policy import LayerPolicy
from streamgrad.engine.replay import RandomTape
from streamgrad.engine.saved import Saved, SavedOnDevice, SavedOnHost
from streamgrad.engine.ulysses import ALONE, SequenceSharing


@dataclass
class StreamedCall:
    """One call of one layer.

    `run(h_BLE, chunk)` must equal the layer on that chunk: its own forward with every per-token argument sliced to
    `[chunk.start, chunk.stop)` and `chunk` in place of cache and mask. It is called within `surroundings()`, which is entered
    once for all chunks of a pass, forward or backward.
    """

    modules: Sequence[nn.Module]  # of the layer, which is the first
    run: Callable[[Tensor, Any], Tensor]
    mask: object
    backends: list[Any]
    chunk_size: int
    policy: LayerPolicy
    host_store: HostStore
    uncut: Sequence[tuple[int, int]] = ()  # inside of which tokens see later ones
    token_inputs: Sequence[Tensor] = ()  # beside hidden states, (B, T, ...) each; `run` cuts them, or takes `chunk.token_inputs`
    chunks_at_once: int = 1  # that may run forward together
    ran_by: dict[Hashable, Any] = field(default_factory=dict)  # which kernels have run the attention of chunks
    stretch_sizes: Sequence[int] = ()  # how many chunks did so, one after the other, once the layer has run forward
    may_join: Callable[[int, int], bool] = lambda start, stop: True  # whether such tokens can attend without a mask of all scores
    sharing: SequenceSharing = ALONE
    adapters: AdapterFacts = NO_ADAPTERS
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    called_as: Hashable = None  # tells the layer's own forward, and switches it is called with, from others
    index: int | None = None  # among the layers of its decoder, where it is in one
    in_use: InUse = field(default_factory=InUse)  # its decoder's
    on_shortage: Callable[[], str] = str  # called where memory runs out in backward; returns what then happens
    on_full_stretch: Callable[[], None] = lambda: None  # called where memory runs out for several chunks in forward
    below: Any = None  # the autograd node of the layer that will make this layer's input again, where it is not kept

    def shortage(self, h_shape: torch.Size, doing: str, then: str = "") -> str:
        """Return where memory ran out, `doing` what, and what would take less."""
        policy, ways = self.policy, []
        if policy.keep != "input":
            ways.append('keep="input"')
        if not policy.on_host:
            ways.append('offload="host" (on CUDA)')
        if self.chunk_size > 1:
            ways.append(f"chunk_size={min(self.chunk_size, h_shape[1]) // 2 or 1}")
        return (
            f"while {self.name} {doing}, with {h_shape[0]} x {h_shape[1]} tokens in chunks of {self.chunk_size} and keep="
            f"{policy.keep!r}{' on the host' if policy.on_host else ''}. To use less, pass {', '.join(ways)}, or a "
            f"shorter sequence. {then}"
        ).rstrip()

    def with_ordinary_graph(self, h_BTE: Tensor) -> tuple[Tensor, ...]:
        """Run the sequence as one chunk whose graph autograd keeps, so that nothing is run again."""
        chunk = self.chunk((0, h_BTE.shape[1]), self.new_stream(h_BTE.shape[1]))
        chunk.token_inputs = list(self.token_inputs)
        with self.surroundings():
            out_BTE = self.run(h_BTE, chunk)
        chunk.check_finished()
        chunk.release()
        if out_BTE.grad_fn is not None:
            self.host_store.bring_back_before(out_BTE.grad_fn)
        return out_BTE, *chunk.recorded

    @property
    def may_keep_graph(self) -> bool:
        """Return whether autograd may keep the graph of the whole sequence."""
        return True

    @property
    def layer(self) -> nn.Module:
        return self.modules[0]

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """Return the layer's parameters, as they are when it is called."""
        return parameters_in(self.modules)

    @property
    def name(self) -> str:
        """Return the layer's class, and which of its decoder's layers it is."""
        kind = type(self.layer).__name__
        return kind if self.index is None else f"{kind} {self.index}"

    def random_tape(self, h_BTE: Tensor) -> RandomTape:
        """Return a tape for the devices of the input and of the layer, which may move its input to another one."""
        return RandomTape([h_BTE.device, *(parameter.device for parameter in self.parameters)])

    def spans(self, length: int) -> list[tuple[int, int]]:
        return spans(length, self.chunk_size, self.uncut)

    def tokens_at_once(self, h_shape: torch.Size) -> int:
        return h_shape[0] * min(h_shape[1], self.chunk_size)

    def restored(self, length: int) -> list[int]:
        """Return which chunks are run up to their keys or states before backward, where these were not kept.

        The last chunk is the first to run backward and makes its own keys then. A layer without attention has none.
        """
        return [] if self.mask is None else list(range(len(self.spans(length)) - 1))

    def stored(self, h_BTE: Tensor) -> Saved:
        """Return what keeps the layer's input until backward, on the host where its policy says so."""
        may_move = self.policy.on_host and h_BTE.device.type == "cuda"
        if may_move and all(parameter.device == h_BTE.device for parameter in self.parameters):
            return SavedOnHost(h_BTE, self.spans(h_BTE.shape[1]), self.restored(h_BTE.shape[1]), self.host_store)
        return SavedOnDevice(h_BTE, self.spans(h_BTE.shape[1]))

    def chunk(self, span: tuple[int, int], stream: KeyValueStream, **options: Any) -> Chunk:
        return Chunk(*span, stream, self.mask, self.backends, sharing=self.sharing, ran_by=self.ran_by, **options)

    def new_stream(self, length: int, tensors: tuple[Tensor, ...] | None = None) -> KeyValueStream:
        """Return a stream for the whole sequence, of which this process has `length` tokens."""
        return KeyValueStream(self.sharing.ranks * length, tensors)

    def trial(self, length: int) -> Trial:
        """Return what shows, before the first step in chunks, whether chunks give what the whole sequence would."""
        has_single = 1 in [stop - start for start, stop in self.spans(length)]
        run = partial(self._run_alone, length)
        return Trial(self.modules, self.name, run, self.adapters, self.called_as, has_single=has_single)

    def _run_alone(self, length: int, h_BNE: Tensor, parts: Sequence[Span]) -> Tensor:
        """Run the layer on parts of few tokens, each of which sees itself only, in the last places of the sequence."""
        first, outputs = length - h_BNE.shape[1], []
        for start, stop in parts:
            chunk = Chunk(first + start, first + stop, KeyValueStream(0), None, [], alone=True)
            outputs.append(self.run(h_BNE[:, start:stop], chunk))
            chunk.check_finished()
        return torch.cat(outputs, dim=1)
