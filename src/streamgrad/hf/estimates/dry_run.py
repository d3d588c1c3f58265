"""What one decoder layer holds and computes a token, from its configuration alone: the layer's own code, run without any data.

The model is built on the meta device. One layer of it is run forward and backward on fake tensors, which have shapes and no
storage. Functions that make tensors of the right shapes replace attention and the fused kernels; everything else, adapters
included, is the code that will run. `memory.measure` counts its costs, as it does while training.

Shapes: B batch, H query heads, G key/value heads, L tokens, S keys, D head size, E model width, N rows.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from streamgrad.config import StreamConfig
from streamgrad.engine.kv_chunk import Attended, Chunk
from streamgrad.engine.module_walk import modules_of, parameters_in
from streamgrad.engine.recurrent_chunk import RecurrentChunk, RecurrentStream
from streamgrad.engine.temporary import temporary_attribute
from streamgrad.hf.configs import check_alike, short_reason, with_layers
from streamgrad.hf.decoder import DecoderStream, decoder_forward
from streamgrad.hf.discover import decoder_layers, find_decoder, has_attention, is_recurrent, sliding_window
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.seams import documents_of_sequence
from streamgrad.hf.step_facts import kind_of_layer
from streamgrad.hf.step_plan import Sample
from streamgrad.hf.whole_step import WholeStep
from streamgrad.memory.costs import LayerCosts, LayerProfile, ModelShape
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.memory.measure import measured_costs
from streamgrad.ops import fused
from streamgrad.ops.accumulate import accumulator_dtype

TOKENS = 512


def model_shape(config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16, lora_rank: int | None = None) -> ModelShape:
    """Return the shape of the causal language model that transformers builds from `config`, with the costs of its first layer.

    Where some layers have states, one layer of each kind is measured, and the shape has the costs of `_typical`.
    """
    check_alike(config, "planned for")
    text = config.get_text_config(decoder=True)
    whole = meta_model(config, dtype=dtype)
    own_layers = list(map(modules_of, decoder_layers(find_decoder(whole))))  # which refuses what cannot be streamed
    hybrid = any(map(is_recurrent, own_layers))
    parts = {module for modules in own_layers for module in modules}
    inside = sum(parameter.numel() for parameter in parameters_in(parts))
    linear = [module.weight.numel() for module in parts if isinstance(module, nn.Linear)]
    total, layers = sum(parameter.numel() for parameter in whole.parameters()), len(own_layers)
    head = whole.get_output_embeddings()
    if head is None:
        raise ValueError(
            f"{type(whole).__name__} has no language-modelling head, and a training step needs one. Pass a causal model."
        )
    kinds = getattr(text, "layer_types", None)
    # As many layers as have one of each kind: for each there may be rotary angles.
    part = config if hybrid else with_layers(config, 1 + max(map(kinds.index, kinds)) if kinds else 1)
    short = meta_model(part, dtype=dtype, lora_rank=lora_rank)
    measured = decoder_layers(short.get_decoder()) if hybrid else decoder_layers(short.get_decoder())[:1]
    trained = [parameter.numel() for layer in measured for parameter in layer.parameters() if parameter.requires_grad]
    adapters = sum(trained) // len(measured) if lora_rank else 0
    window = sliding_window(config)
    full = layers if window is None else 0 if kinds is None else kinds.count("full_attention")
    if hybrid and window is None:  # to layers without attention, one key a query
        window, full = 1, sum(map(has_attention, own_layers))
    head_parameters = sum(parameter.numel() for parameter in head.parameters())
    return ModelShape(
        layers=layers,
        full_attention_layers=full,
        window=window,
        width=text.hidden_size,
        vocabulary=text.vocab_size,
        itemsize=dtype.itemsize,
        layer_parameters=inside // layers + adapters,
        layer_trainable=adapters or inside // layers,
        outside_parameters=total - inside,
        outside_trainable=0 if lora_rank else total - inside,
        head_parameters=head_parameters,
        head_trainable=0 if lora_rank else head_parameters,
        tied=head.weight is whole.get_input_embeddings().weight,
        linear_weights=sum(linear) // layers,
        largest_linear=max(linear, default=0),
        profile=profile_layer(short, fused_parts=dtype.itemsize == 2, every_kind=hybrid),
        eager=profile_layer(short, fused_parts=False, every_kind=hybrid),
    )


def meta_model(config: PretrainedConfig, *, dtype: torch.dtype, lora_rank: int | None = None) -> PreTrainedModel:
    """Build the model without values; with a rank, frozen but for adapters on every linear map of its layers."""
    try:
        with torch.device("meta"):
            # A copy, as it keeps, and may change, what it is given.
            model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype).train()
    except Exception as error:  # of any kind: no class of transformers' says in one way what it cannot be made of
        raise ValueError(
            f"transformers cannot build a {config.model_type} model of this configuration: "
            f"{type(error).__name__}: {short_reason(error).rstrip('.')}. Correct its config.json, or pass another model."
        ) from error
    if lora_rank is not None:
        try:
            peft = importlib.import_module("peft")
        except ModuleNotFoundError as error:
            raise ValueError("method='lora' needs peft, whose adapters are measured. Run: pip install peft") from error
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of PEFT's, about its own patterns for experts
            model.add_adapter(peft.LoraConfig(r=lora_rank, lora_alpha=lora_rank, target_modules="all-linear"))
    return model


def profile_layer(model: PreTrainedModel, *, fused_parts: bool, every_kind: bool = False) -> LayerProfile:
    """Return the costs of the first layer of a model on the meta device, which stays as it is; or of one layer of every kind.

    `fused_parts` says whether norms, rotary embeddings and activations run as single kernels, as they do on a GPU in 16 bits.
    """
    decoder = find_decoder(model)
    stream = DecoderStream(StreamConfig(fused_kernels="on" if fused_parts else "off"))
    layers = decoder_layers(decoder)
    numbers = Counter(map(kind_of_layer, layers))
    firsts = {kind_of_layer(layer): layer for layer in reversed(layers)}
    measured = [*firsts.values()] if every_kind else layers[:1]
    recorder = _Recorder({id(layer): numbers[kind_of_layer(layer)] for layer in measured})
    stream.backends, stream.planner = [recorder.attention], recorder  # type: ignore[assignment]
    installed = InstalledForward(decoder, decoder_forward, stream)
    with FakeTensorMode(), _with_fake_parameters(decoder, measured), _shapes_for_kernels(), documents_of_sequence(None):
        installed.install()
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        try:
            with recorder.live:
                decoder(input_ids=ids)
        except _Finished:
            pass
        finally:
            installed.remove()
    assert recorder.profile is not None, "the decoder never planned its layers"
    return recorder.profile


class _Finished(Exception):
    """Raised when layers have been profiled: nothing after it is of interest."""


class _Recorder:
    """Takes the place of the decoder's planner, which is handed the first layer, and then the others of `numbers`, ready to run.

    `numbers` says how many layers of its kind there are for each layer, by its id.
    """

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers
        self.profile: LayerProfile | None = None
        self.attention = _ShapesOfAttention()
        self.live = LiveBytes()

    def chunk_size(self, batch: int, sequence: int) -> int:
        return sequence

    def keeps_everything(self, step: WholeStep, decoder: nn.Module, layers: int) -> bool:
        """Return False: layers that run plain are not handed to the planner."""
        return False

    def must_measure(self, layers: list[nn.Module], h_BLE: Tensor) -> bool:
        return True

    def measured_costs(self, samples: Iterable[Sample], backends: list[Any], h_BLE: Tensor, sharing: Any) -> NoReturn:
        positions = (self.live.live_bytes - h_BLE.nbytes) / TOKENS
        found: dict[int, LayerProfile] = {}
        for sample in islice(samples, len(self.numbers)):
            found[id(sample.layer)] = self._profiled(sample, backends, torch.empty_like(h_BLE).requires_grad_(), positions)
        if found.keys() != self.numbers.keys():
            raise ValueError(
                "it cannot be planned for: some of its layers take arguments that its first layer does not take. Train it with a "
                "memory_budget, which is planned for by what its layers are given."
            )
        self.profile = _typical([(profile, self.numbers[layer]) for layer, profile in found.items()])
        raise _Finished

    def _profiled(self, sample: Sample, backends: list[Any], h_BLE: Tensor, positions: float) -> LayerProfile:
        attention = self.attention
        attention.flops_before = attention.query_heads = attention.head_size = 0
        kind: Any = RecurrentChunk if sample.recurrent else Chunk
        with torch.enable_grad(), _flop_counter() as forward:
            attention.flops = forward
            out_BLE = sample.run(h_BLE, kind(0, TOKENS, RecurrentStream(TOKENS), sample.mask, backends))
        with _flop_counter() as backward:
            torch.autograd.backward(out_BLE, torch.empty_like(h_BLE))
        attention.flops = None
        # States are there once most of the layer has run.
        before = forward.get_total_flops() if sample.recurrent else attention.flops_before
        return LayerProfile(
            costs=measured_costs(sample.layer, sample.run, sample.mask, backends, h_BLE, recurrent=sample.recurrent),
            forward_flops=forward.get_total_flops() / TOKENS,
            backward_flops=backward.get_total_flops() / TOKENS,
            projection_flops=before / TOKENS,
            query_heads=attention.query_heads,
            head_size=attention.head_size,
            positions=positions,
        )


def _typical(kinds: Sequence[tuple[LayerProfile, int]]) -> LayerProfile:
    """Return a layer with the bytes of the largest of several kinds, and their mean FLOPs by number.

    Training counts what layers keep by their kinds, and so needs less than is estimated by such a layer.
    """
    profiles, numbers = zip(*kinds, strict=True)

    def mean(name: str) -> float:
        flops = sum(number * getattr(profile, name) for profile, number in kinds)
        return flops / sum(numbers) if len(kinds) > 1 else getattr(profiles[0], name)

    return LayerProfile(
        costs=LayerCosts.largest(profile.costs for profile in profiles),
        forward_flops=mean("forward_flops"),
        backward_flops=mean("backward_flops"),
        projection_flops=mean("projection_flops"),
        query_heads=max(profile.query_heads for profile in profiles),
        head_size=max(profile.head_size for profile in profiles),
        positions=profiles[0].positions,
    )


def _flop_counter() -> FlopCounterMode:
    """Return a counter of matrix products that knows those of all experts at once, which torch's own leaves out."""
    grouped = {torch.ops.aten._grouped_mm: lambda left, right, *args, out_shape=None, **kw: 2 * left[0] * left[1] * right[-1]}
    return FlopCounterMode(display=False, custom_mapping=grouped)


class _ShapesOfAttention:
    """An attention kernel that makes tensors of the right shapes and computes nothing."""

    name = "shapes"

    def __init__(self) -> None:
        self.flops: FlopCounterMode | None = None
        self.flops_before = self.query_heads = self.head_size = 0

    def refusal(self, *operands: Any) -> None:
        return None

    def forward(self, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, block: Any) -> Attended:
        if self.flops is not None:
            self.flops_before = self.flops.get_total_flops()
        self.query_heads, self.head_size = query_BHLD.shape[1], query_BHLD.shape[3]
        # Laid out as the queries are. Where these have the heads of a token together, what follows needs no copy.
        same = value_BGSD.shape[3] == query_BHLD.shape[3]
        out_BHLD = torch.empty_like(query_BHLD) if same else query_BHLD.new_empty(*query_BHLD.shape[:3], value_BGSD.shape[3])
        lse_BHL = query_BHLD.new_empty(query_BHLD.shape[:3], dtype=accumulator_dtype(query_BHLD.dtype))
        return Attended(out_BHLD, lse_BHL)

    def backward(
        self, dout_BHLD: Tensor, query_BHLD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, done: Attended, block: Any
    ) -> tuple[Tensor, list[Any]]:
        return torch.empty_like(query_BHLD), [(0, key_BGSD.shape[2], torch.empty_like(key_BGSD), torch.empty_like(value_BGSD))]


class _ShapesOfKernels:
    """What `ops.fused_kernels` computes, without computing it."""

    @staticmethod
    def norm_forward(x_NE: Tensor, weight_E: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
        return x_NE.new_empty(x_NE.shape), x_NE.new_empty(len(x_NE), 1, dtype=accumulator_dtype(x_NE.dtype))

    @staticmethod
    def norm_backward(
        dout_NE: Tensor, x_NE: Tensor, inverse_N1: Tensor, weight_E: Tensor, offset: float
    ) -> tuple[Tensor, Tensor]:
        return x_NE.new_empty(x_NE.shape), weight_E.new_empty(weight_E.shape, dtype=inverse_N1.dtype)

    @staticmethod
    def gated_forward(gate_NE: Tensor, up_NE: Tensor, activation: str, weight_N: Tensor | None = None) -> Tensor:
        return gate_NE.new_empty(gate_NE.shape)

    @staticmethod
    def gated_backward(
        dout_NE: Tensor, gate_NE: Tensor, up_NE: Tensor, activation: str, *, in_place: bool, weight_N: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        dweight_N = None if weight_N is None else weight_N.new_empty(weight_N.shape, dtype=accumulator_dtype(gate_NE.dtype))
        halves = (gate_NE, up_NE) if in_place else (gate_NE.new_empty(gate_NE.shape), up_NE.new_empty(up_NE.shape))
        return *halves, dweight_N

    @staticmethod
    def sum_of_rows(rows_SE: Tensor, place_TK: Tensor, stop_X: Tensor) -> Tensor:
        return rows_SE.new_empty(len(place_TK), rows_SE.shape[1])

    @staticmethod
    def rotate(heads: Sequence[Tensor], cos_BLD: Tensor, sin_BLD: Tensor, *, back: bool) -> list[Tensor]:
        return [x_BHLD.new_empty(x_BHLD.transpose(1, 2).shape).transpose(1, 2) for x_BHLD in heads]


def _shapes_for_kernels() -> AbstractContextManager[None]:
    """Within the block, fused parts make no more tensors than their kernels do."""
    return temporary_attribute(fused, "code_for", lambda tensor: _ShapesOfKernels)


@contextmanager
def _with_fake_parameters(decoder: nn.Module, layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within the block, the decoder's tensors (of its layers, those of `layers`) are fake ones instead of meta ones."""
    rest = {id(module) for layer in decoder_layers(decoder) if layer not in layers for module in layer.modules()}
    entries: list[tuple[dict[str, Any], str, Tensor]] = [
        (tensors, name, tensor)
        for module in decoder.modules()
        if id(module) not in rest
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    try:
        for tensors, name, tensor in entries:
            fake = torch.empty(tensor.shape, dtype=tensor.dtype)
            is_parameter = isinstance(tensor, nn.Parameter)
            tensors[name] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
        yield
    finally:
        for tensors, name, tensor in entries:
            tensors[name] = tensor
