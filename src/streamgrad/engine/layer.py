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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamgrad.engine.call import StreamedCall
from streamgrad.engine.checks.guards import RerunGuard, check_leaves, check_versions, gradient_of_input
from streamgrad.engine.checks.kept_graphs import Graphs, is_to_be_watched, keeping, keeps_on_a_module, note_watched
from streamgrad.engine.forward import restored_stream, run_forward
from streamgrad.engine.grad_accumulator import GradAccumulators
from streamgrad.engine.module_walk import modules_of
from streamgrad.engine.projection import given_projection
from streamgrad.engine.replay import Autocast
from streamgrad.engine.saved import Saved
from streamgrad.engine.segment import Recomputed
from streamgrad.engine.shortage import naming_shortage
from streamgrad.engine.switches import Switches
from streamgrad.engine.unread import UnreadProducts
from streamgrad.ops.autograd import first_order_only
from streamgrad.ops.deferred import forget
from streamgrad.ops.memory_label import labelled, memory_label


def run_layer(call: StreamedCall, h_BTE: Tensor) -> tuple[Tensor, ...]:
    """Return the layer's hidden states, and after them what its chunks record."""
    with naming_shortage(lambda: call.shortage(h_BTE.shape, "ran forward")):
        with_grad = torch.is_grad_enabled()
        if with_grad and h_BTE.is_inference():
            h_BTE = h_BTE.clone()  # of embeddings that were looked up in inference mode, and cannot be saved for backward
        if with_grad and call.policy.keep == "all" and call.may_keep_graph:
            return call.with_ordinary_graph(h_BTE)
        parameters = [parameter for parameter in call.parameters if parameter.requires_grad] if with_grad else []
        if not with_grad or not (parameters or any(tensor.requires_grad for tensor in (h_BTE, *call.token_inputs))):
            # Without no_grad: a layer that reads a foreign parameter makes a graph here, and `check_leaves` then refuses it.
            tape = call.random_tape(h_BTE)
            return tuple(run_forward(call, h_BTE, tape, tape.recording, None, None)[0])
        return _StreamedLayer.apply(call, h_BTE, *call.token_inputs, *parameters)


def _kept(call: StreamedCall, h_BTE: Tensor) -> Saved:
    """Return what keeps the layer's input until backward, or leads to the layer that makes it again."""
    return call.stored(h_BTE) if call.below is None else Recomputed(call, _run_again)


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
        ctx.materialize_grads = False
        ctx.autocast, ctx.tape = Autocast(h_BTE.device.type), call.random_tape(h_BTE)
        ctx.guard, ctx.kept = RerunGuard(call.modules, parameters, call.name, call.adapters), _kept(call, h_BTE)
        ctx.h_shape, ctx.h_dtype = h_BTE.shape, h_BTE.dtype
        outputs, stream = run_forward(call, h_BTE, ctx.tape, ctx.tape.recording, ctx.guard, ctx.kept)
        ctx.switches = Switches(call.modules)
        ctx.autocast.forget_casts()
        is_kept = call.policy.keep == "attention"
        ctx.kept.finish(ctx, call.sharing.kept_keys(h_BTE.shape[1], stream.tensors) if is_kept else ())
        return tuple(outputs)

    @staticmethod
    @partial(first_order_only, even_undefined=True)
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
        installed = accumulators.installed_in(modules)
        with call.in_use.claimed(call.name), ctx.switches.restored(), installed, call.surroundings(), deferred:
            with ctx.autocast.restored():
                stream = restored_stream(call, ctx.tape, reader, ctx.h_shape[1])
            # Where there are several chunks, what starts at parameters is watched before the first step.
            watched = accumulators.tensors if len(chunks) == 1 and is_to_be_watched(modules) else []
            for index, (start, stop) in reversed(chunks):
                h_BLE, attended = reader.chunk(index)
                h_BLE.requires_grad_(ctx.needs_input_grad[1])
                chunk = call.chunk((start, stop), stream, in_backward=True, kept=attended)
                leaves = chunk.token_inputs = token_inputs.leaves(start, stop)
                graphs = Graphs([h_BLE, *watched]) if index == len(chunks) - 1 else None
                is_given = attended is not None and attended.projection_BLE is not None
                run = given_projection(call.run, call.layer, attended) if is_given else call.run
                with torch.enable_grad(), ctx.autocast.restored(), ctx.tape.replaying(index):
                    # No leaf where it is watched, so that it shows if somebody keeps the input itself.
                    out_BLE = run(h_BLE if graphs is None else h_BLE.view_as(h_BLE), chunk)
                handed_on = chunk.outputs()
                chunk.release()
                if index == len(chunks) - 1:
                    unread.learn(out_BLE)
                guard.note_again(index, out_BLE, *chunk.attended_with)
                forget(out_BLE)
                if index == len(chunks) - 1:
                    read = [h_BLE, *accumulators.tensors, *chunk.inputs, *leaves]
                    check_leaves(out_BLE, read, call.name)
                    if keeps_on_a_module(out_BLE, modules, read):
                        raise RuntimeError(f"{keeping(call.name)}, or call streamgrad.disable(model).")
                    del read
                # No output is left if the layer does not use its only trainable parameter.
                made = zip([out_BLE, *chunk.recorded], gradients_BT, strict=True)
                outputs = [(output, whole[:, start:stop]) for output, whole in made if whole is not None]
                outputs += handed_on
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
                del h_BLE, attended, run, chunk, leaves, out_BLE, made, outputs, handed_on
                if graphs is not None and graphs.are_held(modules):
                    raise RuntimeError(f"{keeping(call.name)}, or call streamgrad.disable(model).")
                graphs = None  # which holds the chunk's input
            if watched:
                note_watched(modules)
        guard.check_outcome_later(in_16_bits=ctx.autocast.enabled or ctx.h_dtype.itemsize == 2)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # A program may hold on to its last loss, and through it to this node.
            ctx.kept.release()
            ctx.call = ctx.guard = ctx.switches = None
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
    with call.in_use.claimed(call.name), node.switches.restored(), node.autocast.restored():
        node.guard.check_unchanged(modules_of(call.layer))
        check_versions(call.token_inputs, node.versions, call.name)
        outputs, stream = run_forward(call, h_BTE, node.tape, node.tape.replaying, None, kept)
    return outputs[0], stream.tensors
