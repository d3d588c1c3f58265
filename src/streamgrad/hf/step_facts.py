"""Returns the facts that a step is planned by: the bytes held before it, and the bytes that backward will leave.

facts = step_facts(call, costs, resident, budget, hooks_free=False)     of the layers of one decoder call
with head_known_to_decoder(model, head, tokens=n, config=config):       those of the head, within the block
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from streamgrad.config import StreamConfig
from streamgrad.engine.host_offload import HostStore
from streamgrad.engine.module_walk import modules_of, parameters_of
from streamgrad.engine.temporary import temporary_attribute
from streamgrad.engine.ulysses import SequenceSharing
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.libraries.deepspeed import is_partitioned
from streamgrad.hf.libraries.quantized import bytes_of
from streamgrad.hf.libraries.sharded import bytes_on_their_way, own_bytes, waits_on_host, whole_gradient_bytes
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.tied_embeddings import HeadWeight
from streamgrad.hf.updates.in_backward import updates_of
from streamgrad.memory.costs import KEYS_AT_ONCE, LayerCosts, tied_block_rows
from streamgrad.memory.head_chunk import SHORTEST_CHUNK
from streamgrad.memory.planner import Budget, HeadFacts, StepFacts
from streamgrad.ops.freed_gradient import held_gradient


@dataclass(frozen=True)
class PlannedCall:
    """A decoder call whose first layer is about to run on `h_BTE`."""

    decoder: nn.Module
    layer_parameters: list[list[nn.Parameter]]  # of each layer
    kinds: list[Hashable]  # of each layer
    h_BTE: Tensor
    head: HeadFacts | None  # None where the head is not streamed too
    host_store: HostStore
    sharing: SequenceSharing
    may_recompute: bool  # whether layers may be run outside of their turn

    @property
    def on_cuda(self) -> bool:
        return self.h_BTE.device.type == "cuda"


def kind_of_layer(layer: nn.Module) -> Hashable:
    """Return what layers that cost the same have in common: class and sizes."""
    return type(layer), *(parameter.shape for parameter in parameters_of(layer))


def step_facts(
    call: PlannedCall, costs: Mapping[Hashable, LayerCosts], resident: float, budget: Budget, *, hooks_free: bool
) -> StepFacts:
    """Return what the step is planned by, of layers that cost this by their kind. Of one that is not known it is the most."""
    h_BTE, layers = call.h_BTE, decoder_layers(call.decoder)
    largest, names = LayerCosts.largest(costs.values()), [*costs]
    alike = len(names) == 1
    kind_of = [] if alike else [names.index(kind) if kind in costs else len(names) for kind in call.kinds]
    on_their_way, whole = bytes_on_their_way(layers), [each for each in map(whole_gradient_bytes, layers) if each is not None]
    return StepFacts(
        costs=largest,
        layers=len(call.layer_parameters),
        rows=h_BTE.shape[0],
        position_bytes=h_BTE.nbytes / h_BTE.shape[1],
        # Off CUDA nothing counts what is on the device, so the head's weights are added here.
        resident_bytes=resident + on_their_way + (0.0 if call.on_cuda or call.head is None else call.head.weight_bytes),
        gradient_bytes=sum(whole or (left_bytes(p, hooks_free=hooks_free) for own in call.layer_parameters for p in own)),
        input_is_leaf=h_BTE.is_leaf and h_BTE.requires_grad,
        head=call.head,
        budget_bytes=budget.device_bytes,
        keys_at_once=KEYS_AT_ONCE * call.sharing.ring_ranks / call.sharing.ranks,
        ring=call.sharing.ring_ranks,
        kinds=() if alike else (*costs.values(), largest),
        kind_of=tuple(kind_of),
    )


def left_bytes(parameter: Tensor, *, hooks_free: bool) -> float:
    """Return the bytes that backward leaves on the device for a parameter.

    These are its gradient's or, if an optimizer takes that at once, those of a state that the first update makes.
    """
    if not parameter.requires_grad or parameter.grad is not None or waits_on_host(parameter):
        return 0.0
    optimizer = updates_of(parameter)
    if optimizer is not None:
        return optimizer.state_bytes_to_come(parameter)
    return 0.0 if hooks_free and has_foreign_hook(parameter) else own_bytes(parameter)


def has_foreign_hook(parameter: Tensor) -> bool:
    """Return whether a hook of another library's may take the gradient. An engine's moves it to a buffer on the device."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values() if updates_of(parameter) is None else ()
    return any(not (getattr(hook, "__module__", None) or "").startswith("deepspeed") for hook in hooks)


def held_bytes(module: nn.Module) -> float:
    """Return the bytes of a module's weights, gradients and states of updates in backward, where no allocator counts them."""
    tensors = [*module.parameters(), *module.buffers()]
    states = [updates.state_tensors(tensor) for tensor in tensors if (updates := updates_of(tensor)) is not None]
    gradients = [gradient for gradient in map(held_gradient, tensors) if gradient is not None]
    return bytes_of([*tensors, *gradients, *chain(*states)])


@contextmanager
def head_known_to_decoder(model: Any, head: nn.Module, *, tokens: int, config: StreamConfig) -> Iterator[HeadWeight]:
    """Tell the plan of the model's decoder, within the block, what `head` will hold, streamed over at most `tokens` tokens.

    Yield the weight that the head is to multiply with. Embeddings are looked up before the first layer is planned, and only then
    is it known whether they share their gradient with the head.
    """
    installed, embeddings = InstalledForward.on(model.get_decoder()), model.get_input_embeddings()
    if installed is None:
        yield HeadWeight(head, None)
        return
    stream = installed.stream

    def in_blocks() -> None:
        stream.head = replace(stream.head, embedding_gradient_bytes=_block_bytes(next(embeddings.parameters())))

    frees = bool(stream.planner.hooks_free)
    facts = head_facts(model, head, tokens=tokens, chunk_size=config.head_chunk_size, hooks_free=frees)
    with temporary_attribute(stream, "head", facts), HeadWeight(head, embeddings, in_blocks).shared() as weight:
        yield weight


def head_facts(model: Any, head: nn.Module, *, tokens: int, chunk_size: int | str, hooks_free: bool) -> HeadFacts:
    """Return the sizes of a streamed head over `tokens` targets, and the gradients that all parts outside the layers leave."""
    # Not `.weight`: ZeRO-3 gathers what is read outside of its module's call, for the whole step.
    embeddings, weight = model.get_input_embeddings(), next(head.parameters())
    # A later stage of a pipeline has no embeddings.
    embedding = next(iter([] if embeddings is None else embeddings.parameters()), weight.new_empty(0))
    tied = any(parameter is embedding for parameter in head.parameters())
    outside = {
        parameter: left_bytes(parameter, hooks_free=hooks_free)
        for module in modules_of(model, but_for=decoder_layers(model.get_decoder()))
        for parameter in module._parameters.values()
        if parameter is not None and (parameter is not embedding or updates_of(parameter) is not None)
    }
    dense = embedding.nbytes if embedding.requires_grad else 0
    return HeadFacts(
        targets=tokens,
        chunk_size=chunk_size if isinstance(chunk_size, int) else SHORTEST_CHUNK,
        # By its attributes where it has them: an engine may have taken the weight away and left an empty tensor.
        width=getattr(head, "in_features", weight.shape[-1]),
        vocabulary=vocabulary_of(head, weight.shape[0]),
        itemsize=weight.element_size() if weight.is_floating_point() else embedding.element_size(),  # its logits'
        trainable=sum(parameter.numel() for parameter in head.parameters() if parameter.requires_grad),
        # Where the head is tied to the embeddings, autograd holds its gradient until theirs is computed, `.grad` or not.
        gradient_bytes=sum(outside.values()) + (dense if tied else 0),
        embedding_itemsize=embedding.element_size(),
        embedding_gradient_bytes=dense,
        weight_bytes=0.0 if tied else held_bytes(head),
    )


def vocabulary_of(head: Any, otherwise: int) -> int:
    """Return how many tokens a head scores: its `out_features`, or `otherwise` if it does not say.

    PEFT makes heads for `ensure_weight_tying` that take the rows of their weight for `in_features`. A weight that ZeRO-3 would
    gather for the rest of the step, or that is computed when it is read, is not looked at.
    """
    told = getattr(head, "out_features", None)
    if told is None:
        return otherwise
    if is_parametrized(head) or any(map(is_partitioned, head.parameters())):
        return int(told)
    shape: Sequence[int] = getattr(getattr(head, "weight", None), "shape", ())
    is_turned = shape == (getattr(head, "in_features", None), told)
    return int(shape[0] if is_turned else told)


def _block_bytes(embedding: Tensor) -> int:
    """Return the bytes of the gradient that tied embeddings add to the head's at a time."""
    vocabulary, width = embedding.shape
    return embedding.element_size() * width * tied_block_rows(vocabulary, width, embedding.element_size())
