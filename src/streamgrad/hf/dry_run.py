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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, masking_utils

from streamgrad.config import StreamConfig
from streamgrad.engine.kv_chunk import Attended, Chunk, KeyValueStream
from streamgrad.hf.configs import check_alike, short_reason, with_layers
from streamgrad.hf.decoder import DecoderStream, decoder_forward
from streamgrad.hf.discover import decoder_layers, find_decoder, has_recurrent_layers, sliding_window
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.step_plan import Sample
from streamgrad.memory.costs import LayerProfile, ModelShape
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.memory.measure import measured_costs
from streamgrad.ops import fused
from streamgrad.ops.accumulate import accumulator_dtype

TOKENS = 512


def model_shape(config: PretrainedConfig, *, dtype: torch.dtype = torch.bfloat16, lora_rank: int | None = None) -> ModelShape:
    """Return the shape of the causal language model that transformers builds from `config`, with the costs of its first layer."""
    check_alike(config, "planned for")
    text = config.get_text_config(decoder=True)
    whole = meta_model(config, dtype=dtype)
    if has_recurrent_layers(find_decoder(whole)):  # which refuses what cannot be streamed
        raise ValueError(
            f"{type(whole).__name__} cannot be planned for: its layers are of several kinds, and what one of them takes does not "
            "tell what the others do."
        )
    parts = [module for layer in decoder_layers(whole.get_decoder()) for module in layer.modules()]
    inside = sum(parameter.numel() for module in parts for parameter in module.parameters(recurse=False))
    linear = [module.weight.numel() for module in parts if isinstance(module, nn.Linear)]
    total, layers = sum(parameter.numel() for parameter in whole.parameters()), text.num_hidden_layers
    head = whole.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(whole).__name__} has no language-modelling head, and a training step needs one.")
    kinds = getattr(text, "layer_types", None)
    # As many layers as have one of each kind: for each there may be rotary angles.
    short = meta_model(with_layers(config, 1 + max(map(kinds.index, kinds)) if kinds else 1), dtype=dtype, lora_rank=lora_rank)
    first = decoder_layers(short.get_decoder())[0]
    adapters = sum(parameter.numel() for parameter in first.parameters() if parameter.requires_grad) if lora_rank else 0
    window = sliding_window(config)
    full = layers if window is None else 0 if kinds is None else kinds.count("full_attention")
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
        profile=profile_layer(short, fused_parts=dtype.itemsize == 2),
        eager=profile_layer(short, fused_parts=False),
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
            f"{type(error).__name__}: {short_reason(error)}"
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


def profile_layer(model: PreTrainedModel, *, fused_parts: bool) -> LayerProfile:
    """Return the costs of the first layer of a model on the meta device, which stays as it is.

    `fused_parts` says whether norms, rotary embeddings and activations run as single kernels, as they do on a GPU in 16 bits.
    """
    decoder = find_decoder(model)
    stream = DecoderStream(StreamConfig(fused_kernels="on" if fused_parts else "off"))
    recorder = _Recorder()
    stream.backends, stream.planner = [recorder.attention], recorder  # type: ignore[assignment]
    installed = InstalledForward(decoder, decoder_forward, stream)
    with FakeTensorMode(), _with_fake_parameters(decoder), _shapes_for_kernels(), _no_packing():
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
    """Raised when the first layer has been profiled: nothing after it is of interest."""


class _Recorder:
    """Takes the place of the decoder's planner, which is handed the first layer, ready to run."""

    def __init__(self) -> None:
        self.profile: LayerProfile | None = None
        self.attention = _ShapesOfAttention()
        self.live = LiveBytes()

    def chunk_size(self, batch: int, sequence: int) -> int:
        return sequence

    def must_measure(self, layers: list[nn.Module], h_BLE: Tensor) -> bool:
        return True

    def measured_costs(self, samples: Iterable[Sample], backends: list[Any], h_BLE: Tensor, sharing: Any) -> NoReturn:
        first = next(iter(samples))
        positions = self.live.live_bytes - h_BLE.nbytes
        h_BLE, attention = torch.empty_like(h_BLE).requires_grad_(), self.attention
        with torch.enable_grad(), _flop_counter() as forward:
            attention.flops = forward
            out_BLE = first.run(h_BLE, Chunk(0, TOKENS, KeyValueStream(TOKENS), first.mask, backends))
        with _flop_counter() as backward:
            torch.autograd.backward(out_BLE, torch.empty_like(h_BLE))
        attention.flops = None
        self.profile = LayerProfile(
            costs=measured_costs(first.layer, first.run, first.mask, backends, h_BLE),
            forward_flops=forward.get_total_flops() / TOKENS,
            backward_flops=backward.get_total_flops() / TOKENS,
            projection_flops=attention.flops_before / TOKENS,
            query_heads=attention.query_heads,
            head_size=attention.head_size,
            positions=positions / TOKENS,
        )
        raise _Finished


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
    def gated_forward(gate_NE: Tensor, up_NE: Tensor, activation: str) -> Tensor:
        return gate_NE.new_empty(gate_NE.shape)

    @staticmethod
    def gated_backward(
        dout_NE: Tensor, gate_NE: Tensor, up_NE: Tensor, activation: str, *, in_place: bool
    ) -> tuple[Tensor, Tensor]:
        return (gate_NE, up_NE) if in_place else (gate_NE.new_empty(gate_NE.shape), up_NE.new_empty(up_NE.shape))

    @staticmethod
    def rotate(heads: Sequence[Tensor], cos_BLD: Tensor, sin_BLD: Tensor, *, back: bool) -> list[Tensor]:
        return [x_BHLD.new_empty(x_BHLD.transpose(1, 2).shape).transpose(1, 2) for x_BHLD in heads]


@contextmanager
def _shapes_for_kernels() -> Iterator[None]:
    """Within the block, fused parts make no more tensors than their kernels do."""
    stock = fused._code_for
    fused._code_for = lambda tensor: _ShapesOfKernels
    try:
        yield
    finally:
        fused._code_for = stock


@contextmanager
def _no_packing() -> Iterator[None]:
    """Within the block, transformers does not look into position ids for packed documents: fake ones have no values."""
    stock = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = stock


@contextmanager
def _with_fake_parameters(decoder: nn.Module) -> Iterator[None]:
    """Within the block, the decoder's tensors (of its layers, those of the first) are fake ones instead of meta ones."""
    rest = {id(module) for layer in decoder_layers(decoder)[1:] for module in layer.modules()}
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
