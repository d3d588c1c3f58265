"""The decoder's forward while streaming: its own code, with every layer call replaced by a streamed one.

Layers are replaced for the duration of one call only. So whatever else patches, wraps or checkpoints them between calls is seen
as it stands, and a model between calls is the stock model but for the attributes that api.py names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.dropout import _DropoutNd

from streamgrad.attention.backends import Kernels, backends_named
from streamgrad.attention.masks import CausalMask, DenseMask, attends_in_blocks
from streamgrad.attention.trees import Tree, TreeMask
from streamgrad.config import StreamConfig
from streamgrad.engine.call import StreamedCall
from streamgrad.engine.checks.contents import identity
from streamgrad.engine.checks.guards import protect_gradients
from streamgrad.engine.checks.in_use import InUse
from streamgrad.engine.host_offload import HostStore
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.layer import run_layer
from streamgrad.engine.module_walk import modules_of, parameters_by_depth, parameters_of
from streamgrad.engine.recurrent_chunk import RecurrentCall
from streamgrad.engine.replay import DRAWING
from streamgrad.engine.segment import Joint
from streamgrad.engine.shortage import is_only_process, naming_shortage
from streamgrad.engine.temporary import temporary_attributes
from streamgrad.hf.call_checks import drop_cache, own_token_arguments, refuse_a_cache_left_empty, refuse_what_needs_whole_layers
from streamgrad.hf.discover import (
    attention_configs,
    cannot_be_streamed,
    decoder_layers,
    foreign_attention,
    has_attention,
    is_recurrent,
    layer_refusals,
)
from streamgrad.hf.documents import Documents
from streamgrad.hf.fusion import Fusion
from streamgrad.hf.layer_args import LayerArguments
from streamgrad.hf.layer_run import LayerRun
from streamgrad.hf.libraries.deepspeed import is_partitioned
from streamgrad.hf.libraries.peft import PEFT_ADAPTERS
from streamgrad.hf.libraries.tensor_parallel import planned_together
from streamgrad.hf.mask_checks import check_mask, mask_of_layer
from streamgrad.hf.patching import (
    InstalledForward,
    is_checkpointed,
    named_arguments,
    not_checkpointed,
    not_compiled,
    own_forward,
    signature_of,
    tokens_of,
)
from streamgrad.hf.recorded import Recorder
from streamgrad.hf.seams import NotCausal, documents_as_stock, streamed_attention_in
from streamgrad.hf.sequence_slices import SequenceGroup, Slices, WholeSequences, sequence_group
from streamgrad.hf.step_facts import PlannedCall, kind_of_layer
from streamgrad.hf.step_plan import Planner, Sample
from streamgrad.hf.unusable import NoCache
from streamgrad.hf.weights_ahead import WeightsAhead
from streamgrad.hf.whole.attention import attention_of
from streamgrad.hf.whole.compiled_layers import LayerCompiler
from streamgrad.hf.whole.plain_pass import plain_layers, whole_step
from streamgrad.memory.planner import HeadFacts, Plan
from streamgrad.ops.autograd import in_transform

# By the id of a layer's mask, with the mask itself: an id may be reused once its object is gone.
_Masks = dict[tuple[int, int, int], tuple[object, CausalMask | DenseMask | TreeMask]]


@dataclass
class DecoderStream:
    """What `enable` leaves on the decoder."""

    config: StreamConfig
    backends: Kernels = field(init=False)
    planner: Planner = field(init=False)
    compiler: LayerCompiler = field(init=False)
    host_store: HostStore = field(default_factory=HostStore)
    in_use: InUse = field(default_factory=InUse)
    head: HeadFacts | None = None  # in the call that is under way, where the head is streamed too
    group: SequenceGroup | None = None  # whose ranks share every sequence
    tree: Tree | None = None  # of the row in the call that is under way, where sequences share their beginnings
    mask_BT: Tensor | None = None  # of this rank's slice, in the call that is under way, where the decoder is given the whole one

    def __post_init__(self) -> None:
        self.backends = backends_named(self.config.attention)
        self.planner = Planner(self.config)
        self.compiler = LayerCompiler(wanted=self.config.compile_layers)


def decoder_forward(decoder: Any, stock: Callable[..., Any], stream: DecoderStream, *args: Any, **kwargs: Any) -> Any:
    """Run the decoder streamed, or as it is where streaming has no use; `enable` installs this as its forward."""
    arguments = named_arguments(stock, args, kwargs)
    if stream.mask_BT is not None:
        arguments["attention_mask"] = stream.mask_BT
    refuse_a_cache_left_empty(arguments)
    group, name = sequence_group(decoder, stream.group), type(decoder).__name__
    if group is None and stream.tree is None and not _should_stream(decoder, stream, arguments):
        with stream.in_use.claimed(name, alone=False):
            return stock(*args, **kwargs)
    refuse_what_needs_whole_layers(decoder, arguments)
    check_mask(arguments, decoder.config)
    alone = group is None and stream.tree is None
    documents = documents_as_stock(arguments, decoder.config) if alone else nullcontext()
    sequences = (
        WholeSequences(arguments, stream.tree)
        if group is None
        else Slices.of(decoder, arguments, group, stream.planner, stream.tree)
    )
    expects_cache = drop_cache(sequences.arguments, decoder.config)
    own_token_arguments(sequences.arguments)
    try:
        with stream.in_use.claimed(name), documents:
            output = _streamed_or_again(decoder, stock, stream, sequences)
    except SeamError as error:
        raise cannot_be_streamed(decoder, error, enabled=True) from error
    if expects_cache and torch.is_grad_enabled() and getattr(output, "past_key_values", 0) is None:
        output["past_key_values"] = NoCache()
    if stream.head is None:  # else a gradient reaches the streamed head first, which lets all of the model be protected
        protect_gradients(output[0], lambda: parameters_by_depth(decoder))
    return output


def surrounding_forward(model: Any, stock: Callable[..., Any], config: StreamConfig, *args: Any, **kwargs: Any) -> Any:
    """Run a model that has the decoder as one of its parts; `enable` installs this as its forward."""
    arguments = named_arguments(stock, args, kwargs)
    if torch.is_grad_enabled() and arguments.get("use_cache") is None and "use_cache" in signature_of(stock).parameters:
        arguments["use_cache"] = False  # else some pass their configuration's default on, as if it had been asked for
    try:
        with masks_by_chunk(model, arguments):
            return stock(**arguments)
    except SeamError as error:
        raise cannot_be_streamed(model, error, enabled=True) from error


@contextmanager
def masks_by_chunk(model: Any, arguments: dict[str, Any]) -> Iterator[None]:
    """Let `model` make no (T x T) mask within the block for a decoder that will be streamed.

    Models of text and images make the decoder's masks themselves, as these depend on where the images are.
    """
    decoder = model.get_decoder()
    installed, configs = InstalledForward.on(decoder), _configs_of_text(model, decoder)
    if installed is None or not configs or not _should_stream(decoder, installed.stream, arguments):
        yield
        return
    for reason in foreign_attention(configs, decoder_layers(decoder)[0]):
        raise SeamError(reason)
    with streamed_attention_in(configs):
        yield


def _configs_of_text(model: Any, decoder: Any) -> list[Any]:
    """Return the configurations by which a model with other parts makes the decoder's masks; none if it is all decoder."""
    if model.config is decoder.config:
        return []
    configs = {id(config): config for config in (decoder.config, model.config.get_text_config(decoder=True))}
    return [config for config in configs.values() if config is not model.config]


def _streamed_or_again(decoder: Any, stock: Callable[..., Any], stream: DecoderStream, sequences: WholeSequences) -> Any:
    """Run the forward pass, and once more by a smaller plan if memory runs out and the plan is ours to make.

    No gradient is touched in forward, so nothing is left of the first run. Ranks do not do so: the others would wait.
    """
    for is_last in (False, True):
        try:
            return _streamed(decoder, stock, stream, sequences)
        except torch.OutOfMemoryError as error:
            planned = stream.planner.note_shortage()
            if is_last or stream.config.keep != "auto" or not is_only_process() or not torch.is_grad_enabled():
                error.args = (f"{error} {planned}".rstrip(),)
                raise
            message = f"streamgrad: the forward pass is run once more. {planned} {error}"
        # The error is gone here, and with it what the first run had allocated.
        warnings.warn(message, RuntimeWarning, stacklevel=4)


def _streamed(decoder: Any, stock: Callable[..., Any], stream: DecoderStream, sequences: WholeSequences) -> Any:
    def told() -> str:
        return f"while {type(decoder).__name__} ran forward, outside of its layers. A shorter sequence takes less."

    planner, layers, arguments = stream.planner, decoder_layers(decoder), sequences.arguments
    alone = sequences.sharing.ranks == 1
    step = whole_step(decoder, layers, stream.config, sequences, stream.head) if alone else None
    with naming_shortage(told):
        if step is not None and planner.keeps_everything(step, decoder, len(layers)):
            attention = partial(attention_of, step, decoder, layers, sequences, stream.backends)
            around = partial(plain_layers, decoder, stock, layers, step, stream.config, stream.compiler, attention)
            return stream.compiler.run(around, stock, arguments)
        with _streamed_layers(decoder, layers, stream, sequences), sequences.masks():
            output = sequences.output(stock(**arguments))
    if step is not None:
        planner.note_whole(step)
    return output


def _should_stream(decoder: Any, stream: DecoderStream, arguments: dict[str, Any]) -> bool:
    """Return True with a graph. Without one, return whether it saves memory: a long input, no cache to fill, no transform."""
    masks = given.values() if isinstance(given := arguments.get("attention_mask"), dict) else [given]
    if torch.is_grad_enabled() or any(isinstance(mask, CausalMask | NotCausal) for mask in masks):  # made outside
        return True
    if in_transform():
        return False
    tokens = tokens_of(arguments)
    use_cache = arguments.get("use_cache")
    fills_cache = getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache
    has_cache = arguments.get("past_key_values") is not None
    wants_more = arguments.get("output_attentions") or getattr(decoder.config, "output_attentions", False)
    if fills_cache or has_cache or wants_more or arguments.get("cache") is not None:  # the last, of continuous batching
        return False
    return tokens is not None and tokens.shape[1] > stream.planner.chunk_size(*tokens.shape[:2])


@contextmanager
def _streamed_layers(decoder: Any, layers: list[nn.Module], stream: DecoderStream, sequences: WholeSequences) -> Iterator[None]:
    call = _DecoderCall(decoder, layers, stream, sequences)
    with ExitStack() as restore:
        restore.callback(call.ahead.drop)
        rest = modules_of(decoder, but_for=layers)
        configs = attention_configs(rest)
        for reason in foreign_attention(configs, layers[0]):
            raise SeamError(reason)
        restore.enter_context(streamed_attention_in(configs))
        restore.enter_context(Fusion(rest, mode=stream.config.fused_kernels).installed())
        forwards = [(layer, "forward", call.streamed_forward(index)) for index, layer in enumerate(layers)]
        restore.enter_context(not_compiled(layers))
        forwards += [(part, "forward", _drawing_alone(own_forward(part))) for part in rest if isinstance(part, _DropoutNd)]
        restore.enter_context(temporary_attributes(forwards))
        restore.enter_context(not_checkpointed([*layers, *rest]))  # older decoders checkpoint their layers themselves
        yield


def _drawing_alone(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `forward`, run while no chunk of another thread draws random numbers."""

    def drawing(*args: Any, **kwargs: Any) -> Tensor:
        with DRAWING:
            return forward(*args, **kwargs)

    return drawing


class _DecoderCall:
    """What the layers of one call share: masks, most of which are the same, and the plan."""

    def __init__(self, decoder: Any, layers: list[nn.Module], stream: DecoderStream, sequences: WholeSequences) -> None:
        self.decoder, self.layers, self.stream, self.sequences = decoder, layers, stream, sequences
        self.forwards = [own_forward(layer) for layer in layers]  # which are about to be replaced
        self.masks: _Masks = {}
        self.documents, self.with_grad = Documents(sequences), torch.is_grad_enabled()
        self.plan: Plan | None = None
        self.dtype: torch.dtype | None = None  # of the hidden states that the plan was made with
        self.joint, self.ahead = Joint(), WeightsAhead(layers)

    def streamed_forward(self, index: int) -> Callable[..., Tensor | tuple[Any, ...]]:
        """Return the streamed forward of layer `index`."""
        layer, planner = self.layers[index], self.stream.planner

        def streamed(*args: Any, **kwargs: Any) -> Tensor | tuple[Any, ...]:
            # Done in the call, so that the device computes the previous layer meanwhile.
            if self.with_grad and is_checkpointed(within=_streamed.__code__):
                raise SeamError(
                    "its decoder checkpoints layers by itself, and would call them again in backward, without streaming. Let it "
                    "call them without torch.utils.checkpoint: streamed layers run again by themselves"
                )
            modules = modules_of(layer)
            for reason in (*layer_refusals(modules), *foreign_attention(attention_configs(modules), layer)):
                raise SeamError(reason)
            h_BTE, arguments = LayerArguments.bind(self.forwards[index], args, kwargs)
            recorder, recurrent = Recorder(), is_recurrent(modules)
            if arguments.token_inputs.tensors and self.sequences.sharing.ranks > 1:
                raise SeamError("its layers take inputs by token beside hidden states, and ranks share its sequences")
            starts = self.documents.starts(modules, arguments) if recurrent else []
            kind: Any = partial(RecurrentCall, document_starts=starts) if recurrent else StreamedCall
            run = LayerRun(modules, arguments, recorder, fused_kernels=self.stream.config.fused_kernels)
            mask = self._mask(arguments, h_BTE) if has_attention(modules) else None
            if recurrent and mask is not None and mask.uncut:
                raise SeamError("one of its layers has attention and a state, and some tokens see each other both ways")
            if self.plan is None:  # this is the first layer
                first = Sample(layer, run.alone, mask, tuple(recorder.keys), recurrent)
                self.plan, self.dtype = self._make_plan(h_BTE, chain([first], self._other_kinds(args, kwargs))), h_BTE.dtype
            policy, above = self.plan.policies[index], self.plan.policies[index + 1 : index + 2]
            call = kind(
                modules=modules,
                run=run,
                mask=mask,
                backends=self.stream.backends,
                # Tokens that ranks share lie in the order of their chunks, so the size is fixed, whatever the plan says.
                chunk_size=self.sequences.sharing.chunk_size or self.plan.chunk_sizes[index],
                policy=policy,
                host_store=self.stream.host_store,
                chunks_at_once=1 if recurrent or h_BTE.dtype is not self.dtype else planner.together(self.plan, index),
                may_join=partial(attends_in_blocks, mask, h_BTE.shape[0]),  # which does not hold the input
                uncut=() if mask is None else mask.uncut,
                token_inputs=arguments.token_inputs.tensors,
                sharing=self.sequences.sharing,
                adapters=PEFT_ADAPTERS,
                surroundings=self.ahead.beside(index, run.surroundings),
                called_as=(identity(self.forwards[index]), *run.switches()),
                index=index,
                in_use=self.stream.in_use,
                on_shortage=planner.note_shortage,
                on_full_stretch=planner.note_full_stretch,
                below=self.joint.node_below(h_BTE) if policy.recomputed else None,
            )
            out_BTE, *recorded = run_layer(call, h_BTE)
            if any(each.recomputed for each in above):
                self.joint.note(out_BTE)
            recorder.hand_over(map(self.sequences.sharing.whole, arguments.token_inputs.hand_over(recorded)))
            return out_BTE if arguments.beside is None else (out_BTE, *arguments.beside)

        return streamed

    @cached_property
    def parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters of each layer, found once a call: the device waits for the first layer meanwhile."""
        return [parameters_of(layer) for layer in self.layers]

    @cached_property
    def kinds(self) -> list[Hashable]:
        """Return the kind of each layer, found once a call."""
        return [kind_of_layer(layer) for layer in self.layers]

    @cached_property
    def gathered(self) -> bool:
        """Return whether an engine has the parameters of each layer elsewhere until the layer is called."""
        return isinstance(self.layers[0], FSDPModule) or any(map(is_partitioned, parameters_of(self.layers[0])))

    def _other_kinds(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Sample]:
        """Yield a layer of each other kind than the first's, with the first layer's arguments but for its mask.

        Layers that need other arguments are left out; so are all where an engine has their parameters elsewhere until the call.
        """
        if self.gathered:
            return
        (_, h_BTE), *named = named_arguments(self.forwards[0], args, kwargs).items()
        seen = {self.kinds[0]}
        for index, (layer, forward) in enumerate(zip(self.layers, self.forwards, strict=True)):
            names = signature_of(forward).parameters
            takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values())
            given = {name: value for name, value in named if takes_all or name in names}
            given |= {"layer_idx": index} if "layer_idx" in given else {}
            if self.kinds[index] in seen or not _accepts(forward, h_BTE, given):
                continue
            seen.add(self.kinds[index])
            modules = modules_of(layer)
            _, arguments = LayerArguments.bind(forward, (h_BTE,), given)
            arguments.attention_mask = mask = None
            if has_attention(modules):
                length, arguments.attention_mask = h_BTE.shape[1], CausalMask()
                mask = self.sequences.mask(mask_of_layer(arguments, self.decoder.config, len(h_BTE), length, chunk_size=length))
            run = LayerRun(modules, arguments, recorder := Recorder(), fused_kernels=self.stream.config.fused_kernels)
            yield Sample(layer, run.alone, mask, tuple(recorder.keys), is_recurrent(modules))

    def _mask(self, arguments: LayerArguments, h_BTE: Tensor) -> CausalMask | DenseMask | TreeMask:
        given, (rows, length) = arguments.attention_mask, h_BTE.shape[:2]
        key = id(given), rows, length
        if key not in self.masks:
            chunk_size = self.stream.planner.chunk_size(rows, length)
            mask = mask_of_layer(arguments, self.decoder.config, rows, length, chunk_size=chunk_size)
            self.masks[key] = given, self.sequences.mask(mask)
        return self.masks[key][1]

    def _make_plan(self, h_BTE: Tensor, samples: Iterable[Sample]) -> Plan:
        """Return the plan of all layers; `samples` has a layer of each kind, ready to be measured."""
        planner, stream, sharing = self.stream.planner, self.stream, self.sequences.sharing
        in_turn = self.gathered or sharing.ranks > 1  # layers run in the same order on all ranks
        if in_turn and torch.is_grad_enabled():
            planner.refuse_segments()
        if not torch.is_grad_enabled() or not planner.must_measure(self.layers, h_BTE):
            return planner.plan_without_costs(len(self.layers), *h_BTE.shape[:2])
        sharing = planned_together(self.layers, self.parameters, sharing, h_BTE.device)
        costs = planner.measured_costs(samples, stream.backends, h_BTE, sharing)
        if not costs:
            return planner.plan_without_costs(len(self.layers), *h_BTE.shape[:2])
        call = PlannedCall(
            self.decoder, self.parameters, self.kinds, h_BTE, stream.head, stream.host_store, sharing, may_recompute=not in_turn
        )
        return planner.plan(call, costs)


def _accepts(forward: Callable[..., Any], h_BTE: Tensor, arguments: dict[str, Any]) -> bool:
    try:
        signature_of(forward).bind(h_BTE, **arguments)
    except TypeError:
        return False
    return True
