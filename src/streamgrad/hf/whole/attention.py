"""The attention of layers that run whole (`hf.whole.plain_pass`): the stock model's, by the fastest of torch's kernels.

torch's own order may begin with cuDNN, and every new length would wait for its plans (`attention.backends.cudnn_plans`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamgrad.attention.backends import Block, Kernels, flash_implementation
from streamgrad.attention.backends.cudnn_plans import FLASH_LOSS, PRICES, attention_flops, is_planned_by_call
from streamgrad.attention.masks import CausalMask
from streamgrad.engine.kv_chunk import Chunk, SeamError
from streamgrad.engine.module_walk import modules_of
from streamgrad.engine.replay import as_autocast
from streamgrad.hf.discover import attention_configs, foreign_attention
from streamgrad.hf.seams import (
    attention_name,
    attention_replaced_in,
    stream_attention_forward,
    streamed_attention_in,
    whole_rows,
    whole_rows_attend,
)
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
_BY_CALL = "streamgrad-by-call"


def _attention_by(order: list[SDPBackend]) -> Callable[..., tuple[Tensor, None]]:
    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *by_position: Any,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Return what `sdpa_attention_forward` does, with kernels tried in this order; a compiler takes it into its graph."""
        # Not once around the step: AOTAutograd's cache, on disk, knows graphs by their nodes, and would take one for the other.
        with sdpa_kernel(order, set_priority=True):
            found: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, attention_mask, *by_position, **options
            )
        return found

    return attend


# What `sdpa_attention_forward` acts on beside the tensors, a scale and whether attention is causal.
_ACTED_ON = {*list(inspect.signature(sdpa_attention_forward).parameters)[5:], "softcap"} - {"scaling", "is_causal", "kwargs"}


def _attend_by_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *by_position: Any, **options: Any
) -> tuple[Tensor, Any]:
    """Return what `sdpa_attention_forward` does, forward and backward each by the kernel that is then worth its plan."""
    inside = None
    if not torch.compiler.is_compiling():  # a module that its user has compiled keeps the kernel of its graph
        if isinstance(attention_mask, Chunk | CausalMask):  # another thread streams a model of the same configuration
            return stream_attention_forward(module, query, key, value, attention_mask, *by_position, **options)
        inside = whole_rows()
    if inside is not None:
        # Hooks for saved tensors may be of a checkpoint within the layer, which runs it again outside of this pass and expects
        # the same tensors.
        is_followed = in_transform() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if attention_mask is None and not by_position and not is_followed:
            query, key, value = (as_autocast(tensor) for tensor in (query, key, value))
            if _may_run_on_cudnn(module, query, key, value, inside.backends, options):
                return stream_attention_forward(module, query, key, value, None, **options)
        inside.backends.used.add("sdpa")
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, *by_position, **options)
    return found


def _may_run_on_cudnn(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kernels: Kernels, options: dict[str, Any]
) -> bool:
    """Return whether a call is of plain causal attention that cuDNN takes, so that a plan has to be worth it."""
    is_causal = getattr(module, "is_causal", True) is True and options.get("is_causal") in (None, True)
    others = (options.get(name) for name in _ACTED_ON)
    if not is_causal or any(isinstance(other, Tensor) or other for other in others) or not 1 < query.shape[2] == key.shape[2]:
        return False
    block = Block(scale=1.0, causal=True)
    return any(kernel.name == "cudnn" and kernel.refusal(query, key, value, block) is None for kernel in kernels)


for _name, _attend in {_BY_CALL: _attend_by_call, **{name: _attention_by(order) for name, order in _ORDERS.items()}}.items():
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
    forward_flops, backward_flops = (_layer_flops(step, decoder, backward=backward) for backward in (False, True))
    by_call = not step.compiled and not step.masked and is_planned_by_call(backward_flops) and flash_implementation() is None
    configs = []
    if by_call or step.compiled:  # shorter steps have no time for a look at all parts of a layer
        configs = attention_configs([decoder, *modules_of(layers[0])])
        configs = [config for config in configs if attention_name(config) == "sdpa"]
    if by_call and not any(foreign_attention(configs, layers[0])):
        return _attention_by_call(configs, kernels)
    kernels.used.add("sdpa")
    name = "streamgrad-cudnn" if _is_worth_cudnn(step, decoder, forward_flops + backward_flops, len(layers)) else "streamgrad-fa"
    return attention_replaced_in(configs, name) if step.compiled else sdpa_kernel(_ORDERS[name], set_priority=True)


@contextmanager
def _attention_by_call(configs: list[Any], kernels: Kernels) -> Iterator[None]:
    with ExitStack() as restore:
        restore.enter_context(attention_replaced_in(configs, _BY_CALL))
        restore.enter_context(whole_rows_attend(lambda mask: mask, kernels, unmasked=CausalMask()))
        # Calls that are left to the stock function have no plan made for them.
        restore.enter_context(sdpa_kernel(_ORDERS["streamgrad-fa"], set_priority=True))
        yield


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
