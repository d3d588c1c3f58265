"""The streamed decoder layer: StreamBP for one layer (paper, section "StreamBP for Transformer Layers").

    out[:, a:b] = layer(h[:, a:b], keys and values of [0, b))          for each chunk [a, b) of the sequence

Forward runs the chunks in order without a graph. Backward runs them in REVERSE order: each is re-run with a graph and
differentiated at once. A chunk's queries owe gradient to earlier keys, which is summed in the stream; when the chunk that
made those keys is reached, every later chunk has already deposited its share, so the share is added to the keys' own
gradient and flows on into the projections in that one pass. No full-length graph ever exists.

Known limits: a layer may mix tokens only through keys and values (anything else raises `SeamError` or is refused when the
model is enabled), and only its hidden states and its own parameters receive gradients.

Shapes: B batch, T sequence, L chunk, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from streamgrad.core.checks import Expectation, buffer_versions
from streamgrad.core.chunk import Attended, Chunk, KeyValueStream, SeamError, StopAtKeys, spans
from streamgrad.core.replay import Autocast, RandomTape
from streamgrad.core.shadows import Shadows, trainable_parameters
from streamgrad.core.storage import HostStore


@dataclass
class StreamedCall:
    """One call of one layer.

    `run(h_BLE, chunk)` must equal the layer on that chunk: its own forward with every per-token argument sliced to
    `[chunk.start, chunk.stop)` and `chunk` in place of cache and mask.
    """

    layer: nn.Module
    run: Callable[[Tensor, Chunk], Tensor]
    mask: object
    backends: list
    chunk_size: int
    keep_attention: bool
    host_store: HostStore | None = None

    def __call__(self, h_BTE: Tensor) -> Tensor:
        parameters = trainable_parameters(self.layer)
        if not torch.is_grad_enabled() or not (h_BTE.requires_grad or parameters):
            with torch.no_grad():
                return _forward(self, h_BTE, self.random_tape(h_BTE), None, keep_attention=False)[0]
        return _StreamedLayer.apply(self, h_BTE, *parameters)

    def random_tape(self, h_BTE: Tensor) -> RandomTape:
        """Of the input's device and the layer's: a model spread over devices moves the input inside the layer's forward."""
        return RandomTape([h_BTE.device, *(parameter.device for parameter in self.layer.parameters())])

    def spans(self, h_BTE: Tensor) -> list[tuple[int, int]]:
        return spans(h_BTE.shape[1], self.chunk_size)

    def chunk(self, span: tuple[int, int], stream: KeyValueStream, **options: Any) -> Chunk:
        return Chunk(*span, stream=stream, mask=self.mask, backends=self.backends, **options)


class _StreamedLayer(torch.autograd.Function):
    """`layer(h)`, with the layer's trainable parameters as inputs so that each receives one gradient, once."""

    @staticmethod
    def forward(ctx: Any, call: StreamedCall, h_BTE: Tensor, *parameters: Tensor) -> Tensor:
        ctx.call, ctx.parameters = call, parameters
        ctx.autocast, ctx.tape = Autocast(h_BTE.device.type), call.random_tape(h_BTE)
        ctx.expectation = Expectation(call.layer, parameters)
        out_BTE, stream, kept = _forward(call, h_BTE, ctx.tape, ctx.expectation, keep_attention=call.keep_attention)
        ctx.autocast.forget_casts()

        tensors = [h_BTE]
        # Every chunk or none: attention that drew dropout cannot be kept, and then keys are recomputed as well.
        ctx.attention_is_kept = all(entry is not None for entry in kept)
        if ctx.attention_is_kept:
            tensors += stream.tensors
            tensors += [tensor for entry in kept if entry for tensor in (entry.out_BHLD, entry.lse_BHL)]
        if call.host_store is not None and h_BTE.device.type == "cuda":
            ctx.stored = call.host_store.put([tensor.detach() for tensor in tensors])
        else:
            ctx.stored = None
            ctx.save_for_backward(*tensors)
        return out_BTE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_BTE: Tensor) -> tuple[Tensor | None, ...]:
        call: StreamedCall = ctx.call
        h_BTE, *saved = (tensor.detach() for tensor in (ctx.stored.get() if ctx.stored else ctx.saved_tensors))
        expectation: Expectation = ctx.expectation
        expectation.check_parameters()
        shadows = Shadows(ctx.parameters)
        with shadows.installed_in(call.layer), ctx.autocast.restored():
            stream, kept = _restore_stream(ctx, h_BTE, saved)
            dh_BTE = torch.empty_like(h_BTE) if ctx.needs_input_grad[1] else None
            for index, (start, stop) in reversed(list(enumerate(call.spans(h_BTE)))):
                h_BLE = h_BTE[:, start:stop].requires_grad_(dh_BTE is not None)
                chunk = call.chunk((start, stop), stream, write_keys=False, kept=kept[index])
                with torch.enable_grad(), ctx.tape.replaying(index):
                    out_BLE = call.run(h_BLE, chunk)
                chunk.release()
                expectation.compare(index, out_BLE)
                if stop == h_BTE.shape[1]:
                    expectation.check_leaves(out_BLE, [h_BLE, *shadows.tensors])
                if out_BLE.requires_grad:  # not where a layer's only trainable parameter is one it does not use
                    torch.autograd.backward(out_BLE, dout_BTE[:, start:stop])
                if dh_BTE is not None:
                    assert h_BLE.grad is not None
                    dh_BTE[:, start:stop] = h_BLE.grad
        expectation.check_outcome(in_16_bits=ctx.autocast.enabled or h_BTE.dtype.itemsize == 2)
        return None, dh_BTE, *shadows.gradients()


def _forward(
    call: StreamedCall, h_BTE: Tensor, tape: RandomTape, expectation: Expectation | None, *, keep_attention: bool
) -> tuple[Tensor, KeyValueStream, list[Attended | None]]:
    """All chunks in order, without a graph."""
    h_BTE = h_BTE.detach()  # or chunks would claim to need a gradient, and hooks on submodules would believe them
    stream = KeyValueStream(h_BTE.shape[1])
    kept: list[Attended | None] = []
    out_BTE: Tensor | None = None
    buffers = buffer_versions(call.layer)
    for index, (start, stop) in enumerate(call.spans(h_BTE)):
        chunk = call.chunk((start, stop), stream, keep_attention=keep_attention)
        with tape.recording(index):
            out_BLE = call.run(h_BTE[:, start:stop], chunk)
        chunk.check_finished()
        if buffer_versions(call.layer) != buffers:
            raise SeamError("its layers change a buffer in forward, which would happen once a chunk and again in backward")
        if expectation is not None:
            expectation.note(out_BLE)
        kept.append(chunk.kept)
        if out_BTE is None:
            # Not empty_like(h): under autocast a layer's output may have another dtype than its input.
            out_BTE = out_BLE.new_empty(*h_BTE.shape[:2], *out_BLE.shape[2:])
        out_BTE[:, start:stop] = out_BLE
    assert out_BTE is not None
    return out_BTE, stream, kept


def _restore_stream(ctx: Any, h_BTE: Tensor, saved: list[Tensor]) -> tuple[KeyValueStream, Sequence[Attended | None]]:
    """Keys and values of the whole sequence, as kept or by running every chunk up to its keys."""
    call: StreamedCall = ctx.call
    if ctx.attention_is_kept:
        key, value, *pairs = saved
        stream = KeyValueStream(h_BTE.shape[1], (key, value))
        return stream, [Attended(out, lse) for out, lse in zip(pairs[::2], pairs[1::2], strict=True)]

    stream = KeyValueStream(h_BTE.shape[1])
    for index, (start, stop) in enumerate(call.spans(h_BTE)):
        with torch.no_grad(), ctx.tape.replaying(index), contextlib.suppress(StopAtKeys):
            call.run(h_BTE[:, start:stop], call.chunk((start, stop), stream, stop_at_keys=True))
    return stream, [None] * len(call.spans(h_BTE))
