"""The attention of layers that run whole (`hf.whole.plain_pass`): the stock model's, by the fastest of torch's kernels.

torch's own order may begin with cuDNN, and every new length would wait for its plans (`attention.backends.cudnn_plans`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamgrad.attention.backends import Kernels, flash_implementation
from streamgrad.attention.backends.cudnn_plans import FLASH_LOSS, PRICES, attention_flops, is_planned_by_call
from streamgrad.attention.masks import CausalMask
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream, SeamError
from streamgrad.engine.module_walk import modules_of
from streamgrad.hf.discover import attention_configs, foreign_attention
from streamgrad.hf.seams import attention_replaced_in, stream_attention_forward, streamed_attention_in, whole_rows_attend
from streamgrad.hf.sequence_slices import WholeSequences
from streamgrad.hf.whole_step import WholeStep
from streamgrad.ops.autograd import in_transform

# What a layer must lose on flash, forward and backward, for another compiled graph to be worth its time: with about 1,500 tokens
# of 32 heads of 128. In shorter steps the device waits for launches.
GRAPH_SECONDS = 0.1e-3
# Names without "flash", which transformers takes for packages that need other masks.
_ORDERS = {
    "streamgrad-cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "streamgrad-fa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}
_BY_CALL_NAME = "streamgrad-by-call"


def _attention_by(order: list[SDPBackend]) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        """Return what `sdpa_attention_forward` does, with kernels tried in this order; a compiler takes it into its graph."""
        # Not once around the step: AOTAutograd's cache, on disk, knows graphs by their nodes, and would take one for the other.
        with sdpa_kernel(order, set_priority=True):
            found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, **options)
        return found

    return attend


# What `sdpa_attention_forward` acts on beside the tensors, a scale and whether attention is causal. It ignores all else.
_ACTED_ON = {*list(inspect.signature(sdpa_attention_forward).parameters)[5:], "softcap"} - {"scaling", "is_causal", "kwargs"}


class _ByCall(NamedTuple):
    """What the attention of a step shares whose kernels are chosen call by call."""

    mask: CausalMask
    kernels: Kernels


_BY_CALL: ContextVar[_ByCall | None] = ContextVar("how layers that run whole attend", default=None)


def _attend_by_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *by_position: Any, **options: Any
) -> tuple[Tensor, Any]:
    """Return what `sdpa_attention_forward` does, forward and backward each by the kernel that is then worth its plan."""
    shared, tokens, scaling = _BY_CALL.get(), query.shape[2], options.get("scaling")
    is_causal = getattr(module, "is_causal", True) is True and options.get("is_causal") in (None, True)
    is_plain = mask is None and not by_position and is_causal and 1 < tokens == key.shape[2]
    others = (options.get(name) for name in _ACTED_ON)
    has_others = any(isinstance(other, Tensor) or other for other in others) or not isinstance(scaling, float | None)
    if shared is None or not is_plain or has_others or in_transform():
        found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, mask, *by_position, **options)
        return found
    chunk = Chunk(0, tokens, KeyValueStream(tokens), shared.mask, shared.kernels)
    return stream_attention_forward(module, query, key, value, chunk, scaling=scaling)


for _name, _attend in {_BY_CALL_NAME: _attend_by_call, **{name: _attention_by(order) for name, order in _ORDERS.items()}}.items():
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, sdpa_mask)


def attention_of(
    step: WholeStep, decoder: Any, layers: list[nn.Module], sequences: WholeSequences, kernels: Kernels
) -> AbstractContextManager[Any]:
    """Return the context in which layers that run whole attend: by streamed attention if a row is a tree, else as they do."""
    if sequences.tree is None:
        return fastest_attention(step, decoder, layers, kernels)
    configs = attention_configs(modules_of(decoder))
    for reason in foreign_attention(configs, layers[0]):
        raise SeamError(reason)
    return _streamed_whole(configs, functools.cache(sequences.mask), kernels)


@contextmanager
def _streamed_whole(configs: list[Any], mask: Callable[[CausalMask], object], kernels: Kernels) -> Iterator[None]:
    with streamed_attention_in(configs), whole_rows_attend(mask, kernels):
        yield


def fastest_attention(
    step: WholeStep, decoder: Any, layers: Sequence[nn.Module], kernels: Kernels
) -> AbstractContextManager[Any]:
    """Return the context in which layers attend by cuDNN where the step is worth its plans, and else by flash where that can.

    In long steps each call has its kernel, and `kernels` notes which. Compiled layers have a graph for either, and so a name for
    either: compilers keep the kernel that a graph was made with.
    """
    if step.device.type != "cuda":
        kernels.used.add("sdpa")
        return nullcontext()
    configs = attention_configs([decoder, *modules_of(layers[0])])
    forward_flops, backward_flops = (_layer_flops(step, decoder, backward=backward) for backward in (False, True))
    by_call = not step.compiled and not step.masked and is_planned_by_call(backward_flops) and flash_implementation() is None
    if by_call and not any(foreign_attention(configs, layers[0])):
        return _attention_by_call(configs, kernels)
    kernels.used.add("sdpa")
    name = "streamgrad-cudnn" if _is_worth_cudnn(step, decoder, forward_flops + backward_flops, len(layers)) else "streamgrad-fa"
    return attention_replaced_in(configs, name) if step.compiled else sdpa_kernel(_ORDERS[name], set_priority=True)


@contextmanager
def _attention_by_call(configs: list[Any], kernels: Kernels) -> Iterator[None]:
    token = _BY_CALL.set(_ByCall(CausalMask(), kernels))
    try:
        # Calls that are left to the stock function have no plan made for them.
        with attention_replaced_in(configs, _BY_CALL_NAME), sdpa_kernel(_ORDERS["streamgrad-fa"], set_priority=True):
            yield
    finally:
        _BY_CALL.reset(token)


def _layer_flops(step: WholeStep, decoder: Any, *, backward: bool) -> float:
    config = decoder.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return attention_flops(step.rows, heads, size, step.sequence**2 / 2, backward=backward)


def _is_worth_cudnn(step: WholeStep, decoder: Any, layer_flops: float, layers: int) -> bool:
    if flash_implementation() is not None:  # FlashAttention-3 or 4, which is faster than cuDNN
        return False
    if step.compiled and FLASH_LOSS * layer_flops < GRAPH_SECONDS:
        return False
    dtype = next(decoder.parameters()).dtype
    shape = step.rows, step.sequence, layer_flops, step.device.index, dtype, step.masked
    return PRICES.is_worth_in_step(shape, layers * layer_flops)
