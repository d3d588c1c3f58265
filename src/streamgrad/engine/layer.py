"""The streamed decoder layer: StreamBP for one layer (paper, section "StreamBP for Transformer Layers").

    out[:, a:b] = layer(h[:, a:b], keys and values of [0, b))          for each chunk [a, b) of the sequence

Forward runs the chunks in order without a graph (`engine.forward`). Backward runs them in REVERSE order: each is re-run with a
graph and differentiated at once. A chunk's queries owe gradient to earlier keys, which is summed in the stream; when the chunk
that made those keys is reached, every later chunk has already deposited its share, so the share is added to the keys' own
gradient and flows on into the projections in that one pass. No full-length graph ever exists.

Known limits: a layer may mix tokens only through keys and values (anything else raises `SeamError` or is refused when the
model is enabled), and only its hidden states, its `token_inputs` and its own parameters receive gradients.

Shapes: B batch, T sequence, L chunk, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.engine.forward import restored_stream, run_forward
from streamgrad.engine.grad_accumulator import GradAccumulators
from streamgrad.engine.guards import (
    NO_ADAPTERS,
    AdapterFacts,
    RerunGuard,
    check_reads,
    check_versions,
    gradient_of_input,
)
from streamgrad.engine.host_offload import HostStore
from streamgrad.engine.in_use import InUse
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, spans
from streamgrad.engine.module_walk import modules_of, parameters_in
from streamgrad.engine.policy import LayerPolicy
from streamgrad.engine.replay import Autocast, RandomTape
from streamgrad.engine.saved import Saved, SavedOnDevice, SavedOnHost
from streamgrad.engine.segment import Recomputed
from streamgrad.engine.shortage import naming_shortage
from streamgrad.engine.trial import Span, Trial
from streamgrad.engine.ulysses import ALONE, SequenceSharing
from streamgrad.engine.unread import UnreadProducts
from streamgrad.ops.autograd import first_order_only
from streamgrad.ops.deferred import forget
from streamgrad.ops.memory_label import labelled, memory_label


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
    may_join: Callable[[int, int], bool] = lambda start, stop: True  # whether such tokens can attend without a mask of all scores
    sharing: SequenceSharing = ALONE
    adapters: AdapterFacts = NO_ADAPTERS
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    forward: Hashable = None  # tells the layer's own forward from another one
    index: int | None = None  # among the layers of its decoder, where it is in one
    in_use: InUse = field(default_factory=InUse)  # its decoder's
    on_shortage: Callable[[], str] = str  # called where memory runs out in backward; returns what then happens
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
            f"{policy.keep!r}{' on the host' if policy.on_host else ''}. Less is taken by {', '.join(ways)}, or a shorter "
            f"sequence. {then}"
        ).rstrip()

    def __call__(self, h_BTE: Tensor) -> tuple[Tensor, ...]:
        """Return the layer's hidden states, and after them what its chunks record."""
        with naming_shortage(lambda: self.shortage(h_BTE.shape, "ran forward")):
            return self._run_forward(h_BTE)

    def _run_forward(self, h_BTE: Tensor) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and self.policy.keep == "all" and self.may_keep_graph:
            return self._with_ordinary_graph(h_BTE)
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad] if torch.is_grad_enabled() else []
        if not torch.is_grad_enabled() or not (parameters or any(tensor.requires_grad for tensor in (h_BTE, *self.token_inputs))):
            # Without no_grad: a layer that reads a foreign parameter makes a graph here, and `check_leaves` then refuses it.
            tape = self.random_tape(h_BTE)
            return tuple(run_forward(self, h_BTE, tape, tape.recording, None, None)[0])
        return _StreamedLayer.apply(self, h_BTE, *self.token_inputs, *parameters)

    def _with_ordinary_graph(self, h_BTE: Tensor) -> tuple[Tensor, ...]:
        """Run the sequence as one chunk whose graph autograd keeps, so that nothing is run again."""
        chunk = self.chunk((0, h_BTE.shape[1]), self.new_stream(h_BTE.shape[1]))
        chunk.token_inputs = list(self.token_inputs)
        with self.surroundings():
            out_BTE = self.run(h_BTE, chunk)
        chunk.check_finished()
        chunk.release()
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

    def kept(self, h_BTE: Tensor) -> Saved:
        """Return what keeps the layer's input until backward, or leads to the layer that makes it again."""
        return self.stored(h_BTE) if self.below is None else Recomputed(self, _run_again)

    def stored(self, h_BTE: Tensor) -> Saved:
        may_move = self.policy.on_host and h_BTE.device.type == "cuda"
        if may_move and all(parameter.device == h_BTE.device for parameter in self.parameters):
            return SavedOnHost(h_BTE, self.spans(h_BTE.shape[1]), self.restored(h_BTE.shape[1]), self.host_store)
        return SavedOnDevice(h_BTE, self.spans(h_BTE.shape[1]))

    def chunk(self, span: tuple[int, int], stream: KeyValueStream, **options: Any) -> Chunk:
        return Chunk(*span, stream=stream, mask=self.mask, backends=self.backends, sharing=self.sharing, **options)

    def new_stream(self, length: int, tensors: tuple[Tensor, ...] | None = None) -> KeyValueStream:
        """Return a stream for the whole sequence, of which this process has `length` tokens."""
        return KeyValueStream(self.sharing.ranks * length, tensors)

    def trial(self, length: int) -> Trial:
        """Return what shows, before the first step in chunks, whether chunks give what the whole sequence would."""
        return Trial(self.modules, self.name, partial(self._run_alone, length), self.adapters, self.forward)

    def _run_alone(self, length: int, h_BNE: Tensor, parts: Sequence[Span]) -> Tensor:
        """Run the layer on parts of few tokens, each of which sees itself only, in the last places of the sequence."""
        first, outputs = length - h_BNE.shape[1], []
        for start, stop in parts:
            chunk = Chunk(first + start, first + stop, KeyValueStream(0), None, [], alone=True)
            outputs.append(self.run(h_BNE[:, start:stop], chunk))
            chunk.check_finished()
        return torch.cat(outputs, dim=1)


def _named_in_errors(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let errors in a layer's backward say which layer it was; a traceback shows code that all layers share."""

    def named(ctx: Any, *gradients: Tensor | None) -> Any:
        call, doing = ctx.call, "was run again for backward"
        try:
            with naming_shortage(lambda: call.shortage(ctx.h_shape, doing, call.on_shortage())):
                return backward(ctx, *gradients)
        except Exception as error:
            if call is not None:
                error.add_note(f"streamgrad: {call.name} {doing}.")
            raise

    return named


class _StreamedLayer(torch.autograd.Function):
    """Computes `layer(h)` and what its chunks record; trainable parameters are inputs, so that each gets one gradient, once."""

    @staticmethod
    def forward(ctx: Any, call: StreamedCall, h_BTE: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        parameters = tensors[len(call.token_inputs) :]
        ctx.call, ctx.parameters = call, parameters
        ctx.versions = [tensor._version for tensor in call.token_inputs]
        ctx.set_materialize_grads(False)
        ctx.autocast, ctx.tape = Autocast(h_BTE.device.type), call.random_tape(h_BTE)
        ctx.guard, ctx.kept = RerunGuard(call.modules, parameters, call.name, call.adapters), call.kept(h_BTE)
        ctx.h_shape, ctx.h_dtype = h_BTE.shape, h_BTE.dtype
        outputs, stream = run_forward(call, h_BTE, ctx.tape, ctx.tape.recording, ctx.guard, ctx.kept)
        ctx.autocast.forget_casts()
        is_kept = call.policy.keep == "attention"
        ctx.kept.finish(ctx, call.sharing.kept_keys(h_BTE.shape[1], stream.tensors) if is_kept else ())
        return tuple(outputs)

    @staticmethod
    @first_order_only
    @_named_in_errors
    @labelled("activations")
    def backward(ctx: Any, *gradients_BT: Tensor | None) -> tuple[Tensor | None, ...]:
        reader = ctx.kept.reader(ctx)  # raises if backward has run before
        call: StreamedCall = ctx.call
        guard: RerunGuard = ctx.guard
        modules = modules_of(call.layer)
        guard.check_unchanged(modules)
        check_versions(call.token_inputs, ctx.versions, call.name)
        chunks = list(enumerate(call.spans(ctx.h_shape[1])))
        accumulators = GradAccumulators(ctx.parameters, summed=len(chunks) > 1)
        dh_BTE: Tensor | None = None
        token_inputs = TokenInputGradients(call.token_inputs, ctx.needs_input_grad[2:])
        unread = UnreadProducts(call.layer, call.tokens_at_once(ctx.h_shape), ctx.autocast.device_type)
        deferred = unread.deferred(modules)
        with call.in_use.claimed(call.name), accumulators.installed_in(modules), call.surroundings(), deferred:
            with ctx.autocast.restored():
                stream = restored_stream(call, ctx.tape, reader, ctx.h_shape[1])
            for index, (start, stop) in reversed(chunks):
                h_BLE, attended = reader.chunk(index)
                h_BLE.requires_grad_(ctx.needs_input_grad[1])
                chunk = call.chunk((start, stop), stream, in_backward=True, kept=attended)
                leaves = chunk.token_inputs = token_inputs.leaves(start, stop)
                with torch.enable_grad(), ctx.autocast.restored(), ctx.tape.replaying(index):
                    out_BLE = call.run(h_BLE, chunk)
                chunk.release()
                if index == len(chunks) - 1:
                    unread.learn(out_BLE)
                guard.note_again(index, out_BLE, *chunk.attended_with)
                forget(out_BLE)
                if index == len(chunks) - 1:
                    check_reads(out_BLE, modules, h_BLE, [*accumulators.tensors, *chunk.inputs, *leaves], call.name)
                # No output is left if the layer does not use its only trainable parameter.
                made = zip([out_BLE, *chunk.recorded], gradients_BT, strict=True)
                outputs = [(output, whole[:, start:stop]) for output, whole in made if whole is not None]
                outputs += chunk.outputs()
                outputs = [(output, gradient) for output, gradient in outputs if output.requires_grad]
                if outputs:
                    torch.autograd.backward([output for output, _ in outputs], [gradient for _, gradient in outputs])
                chunk.settle()
                token_inputs.note(start, stop)
                if ctx.needs_input_grad[1] and (h_BLE.grad is not None or gradients_BT[0] is not None):
                    if len(chunks) == 1:
                        dh_BTE = gradient_of_input(h_BLE, call.layer)
                    else:
                        with memory_label("hidden states"):
                            new = h_BLE.new_zeros if gradients_BT[0] is None else h_BLE.new_empty
                            dh_BTE = new(ctx.h_shape) if dh_BTE is None else dh_BTE
                        dh_BTE[:, start:stop] = gradient_of_input(h_BLE, call.layer)
                # Free them and their gradients before the next chunk runs.
                del h_BLE, attended, chunk, leaves, out_BLE, made, outputs
        guard.check_outcome_later(in_16_bits=ctx.autocast.enabled or ctx.h_dtype.itemsize == 2)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # A program may hold on to its last loss, and through it to this node.
            ctx.kept.release()
            ctx.call = ctx.guard = None
        return None, dh_BTE, *token_inputs.gradients, *accumulators.take_gradients()


class TokenInputGradients:
    """The gradients of a layer's inputs by token, collected chunk by chunk; None for one that no chunk uses."""

    def __init__(self, inputs: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._inputs = [tensor.detach() for tensor in inputs]
        self._needed = needed[: len(inputs)]
        self._leaves: list[Tensor] = []
        self.gradients: list[Tensor | None] = [None] * len(inputs)

    def leaves(self, start: int, stop: int) -> list[Tensor]:
        """Return the inputs of a chunk, as leaves of the chunk's graph."""
        parts = zip(self._inputs, self._needed, strict=True)
        self._leaves = [tensor[:, start:stop].detach().requires_grad_(needed) for tensor, needed in parts]
        return self._leaves

    @labelled("hidden states")
    def note(self, start: int, stop: int) -> None:
        """Take the gradients of the leaves, once backward has gone through the chunk."""
        for index, leaf in enumerate(self._leaves):
            if leaf.grad is not None:
                whole = self.gradients[index]
                whole = torch.zeros_like(self._inputs[index]) if whole is None else whole
                whole[:, start:stop] = leaf.grad
                self.gradients[index] = whole
        self._leaves = []


def _run_again(node: Any, h_BTE: Tensor, kept: Saved | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the hidden states, and keys and values, that a node's layer gave in forward; `kept` is told of each chunk."""
    call: StreamedCall = node.call
    with call.in_use.claimed(call.name), node.autocast.restored():
        node.guard.check_unchanged(modules_of(call.layer))
        check_versions(call.token_inputs, node.versions, call.name)
        outputs, stream = run_forward(call, h_BTE, node.tape, node.tape.replaying, None, kept)
    return outputs[0], stream.tensors
