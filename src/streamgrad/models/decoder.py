"""The decoder's forward while streaming: its own code, with every layer call replaced by a streamed one.

Layers are replaced for the duration of one call only. So whatever else patches, wraps or checkpoints them between calls is seen
as it stands, and a model between calls is the stock model but for two instance attributes (see api.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.attention.backends import Backend, backends_named
from streamgrad.attention.masks import CausalMask, DenseMask
from streamgrad.config import StreamConfig
from streamgrad.core.chunk import Chunk, SeamError
from streamgrad.core.layer import StreamedCall
from streamgrad.core.storage import HostStore
from streamgrad.models.arguments import LayerArguments
from streamgrad.models.attention import streamed_attention_in
from streamgrad.models.forwards import named_arguments, own_forward, temporary_attribute
from streamgrad.models.masks import layer_mask, with_documents


@dataclass
class DecoderStream:
    """What `enable` leaves on the decoder."""

    config: StreamConfig
    layers: list[nn.Module]
    stock_forward: Callable[..., Any] | None
    backends: list[Backend] = field(init=False)
    host_store: HostStore | None = field(init=False)

    def __post_init__(self) -> None:
        self.backends = backends_named(self.config.attention)
        self.host_store = HostStore() if self.config.offload == "host" else None

    def __deepcopy__(self, memo: dict) -> DecoderStream:
        """A copied model gets kernels and host buffers of its own."""
        return DecoderStream(self.config, copy.deepcopy(self.layers, memo), copy.deepcopy(self.stock_forward, memo))


def decoder_forward(decoder: Any, *args: Any, **kwargs: Any) -> Any:
    """Installed as the decoder's forward by `enable`."""
    stream: DecoderStream = decoder._streamgrad
    stock = stream.stock_forward or type(decoder).forward.__get__(decoder)
    arguments = named_arguments(stock, args, kwargs)
    if not _should_stream(decoder, stream, arguments):
        return stock(*args, **kwargs)
    _refuse_what_needs_whole_layers(decoder, arguments)
    _drop_cache(arguments)
    try:
        with streamed_attention_in(decoder.config), _streamed_layers(decoder, stream):
            return stock(**arguments)
    except SeamError as error:
        raise ValueError(
            f"{type(decoder).__name__} cannot be streamed: {error}. Call streamgrad.disable(model) to train it without."
        ) from error


def _should_stream(decoder: Any, stream: DecoderStream, arguments: dict[str, Any]) -> bool:
    """With a graph, always. Without one, where it saves memory: a long input and no cache to be filled."""
    if stream.config.keep == "all":
        return False
    if torch.is_grad_enabled():
        return True
    tokens = arguments.get("input_ids") if arguments.get("input_ids") is not None else arguments.get("inputs_embeds")
    use_cache = arguments.get("use_cache")
    fills_cache = getattr(decoder.config, "use_cache", False) if use_cache is None else use_cache
    has_cache = arguments.get("past_key_values") is not None
    return not fills_cache and not has_cache and tokens is not None and tokens.shape[1] > stream.config.chunk_size


def _refuse_what_needs_whole_layers(decoder: Any, arguments: dict[str, Any]) -> None:
    for name, reason in (
        ("output_attentions", "attention weights are (T x T) and never exist while streaming"),
        ("output_router_logits", "a load-balancing loss needs the router logits of all tokens, with their gradient"),
    ):
        asked = arguments.get(name)
        if asked if asked is not None else getattr(decoder.config, name, False):
            raise ValueError(f"{name}=True cannot be streamed: {reason}. Pass {name}=False, or call streamgrad.disable(model).")
    cache = arguments.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values holds {cache.get_seq_length()} tokens, and gradients through cached keys cannot be streamed. "
            "Pass the whole sequence without a cache, or call under torch.no_grad()."
        )


def _drop_cache(arguments: dict[str, Any]) -> None:
    """A cache filled while training would hold every key and value of every layer, with their graph."""
    if arguments.pop("use_cache", None) or arguments.get("past_key_values") is not None:
        warnings.warn(
            "streamgrad: use_cache=True is ignored while gradients are computed; no past_key_values are returned.",
            UserWarning,
            stacklevel=3,
        )
    arguments.pop("past_key_values", None)
    arguments["use_cache"] = False


@contextmanager
def _streamed_layers(decoder: Any, stream: DecoderStream) -> Iterator[None]:
    masks: dict[int, CausalMask | DenseMask] = {}
    with ExitStack() as restore:
        for layer in stream.layers:
            replacement = _streamed_forward(layer, own_forward(layer), decoder.config, stream, masks)
            restore.enter_context(temporary_attribute(layer, "forward", replacement))
            if getattr(layer, "gradient_checkpointing", False):
                # A streamed layer already recomputes itself; checkpointing around it would run it a third time.
                restore.enter_context(temporary_attribute(layer, "gradient_checkpointing", False))
        yield


def _streamed_forward(
    layer: nn.Module,
    forward: Callable[..., Any],
    hf_config: Any,
    stream: DecoderStream,
    masks: dict[int, CausalMask | DenseMask],
) -> Callable[..., Tensor | tuple[Tensor]]:
    """`forward`, streamed; `masks` is shared by the layers of one call, most of which are given the same mask."""

    def streamed(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        h_BTE, arguments = LayerArguments.bind(forward, args, kwargs)
        key = id(arguments.attention_mask)
        if key not in masks:
            masks[key] = _mask_of(arguments, h_BTE.shape[1], stream.config.chunk_size)

        def run(h_BLE: Tensor, chunk: Chunk) -> Tensor:
            with streamed_attention_in(hf_config):
                return arguments.run(h_BLE, chunk)

        call = StreamedCall(
            layer=layer,
            run=run,
            mask=masks[key],
            backends=stream.backends,
            chunk_size=stream.config.chunk_size,
            keep_attention=stream.config.keep == "attention",
            host_store=stream.host_store,
        )
        out_BTE = call(h_BTE)
        return (out_BTE,) if arguments.returns_tuple else out_BTE

    return streamed


def _mask_of(arguments: LayerArguments, length: int, chunk_size: int) -> CausalMask | DenseMask:
    mask = layer_mask(arguments.attention_mask, length, chunk_size=chunk_size)
    boundaries = arguments.others.get("cu_seq_lens_q")
    if boundaries is not None and isinstance(mask, CausalMask):
        return with_documents(mask, boundaries, length)
    return mask
