"""The attention of layers that run whole (`hf.whole.plain_pass`): the stock model's, by the fastest of torch's kernels.

torch's own order may begin with cuDNN, and every new length would wait for its plan (`attention.backends.cudnn_plans`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from streamgrad.attention.backends import flash_implementation
from streamgrad.attention.backends.cudnn_plans import FLASH_LOSS, PRICES, attention_flops
from streamgrad.engine.module_walk import modules_of
from streamgrad.hf.discover import attention_configs
from streamgrad.hf.seams import attention_replaced_in
from streamgrad.hf.whole_step import WholeStep

# What a layer must lose on flash, forward and backward, for another compiled graph to be worth its time: with about 1,500 tokens
# of 32 heads of 128. In shorter steps the device waits for launches.
GRAPH_SECONDS = 0.1e-3
# Names without "flash", which transformers takes for packages that need other masks.
_ORDERS = {
    "streamgrad-cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "streamgrad-fa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH],
}


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


for _name, _order in _ORDERS.items():
    AttentionInterface.register(_name, _attention_by(_order))
    AttentionMaskInterface.register(_name, sdpa_mask)


def fastest_attention(step: WholeStep, decoder: Any, layers: Sequence[nn.Module]) -> AbstractContextManager[Any]:
    """Return the context in which layers attend by cuDNN where the step is worth its plan, and else by flash where that can.

    Compiled layers have a graph for either, and so a name for either: compilers keep the kernel that a graph was made with.
    """
    if step.device.type != "cuda":
        return nullcontext()
    name = "streamgrad-cudnn" if _is_worth_cudnn(step, decoder, len(layers)) else "streamgrad-fa"
    if step.compiled:
        return attention_replaced_in(attention_configs([decoder, *modules_of(layers[0])]), name)
    return sdpa_kernel(_ORDERS[name], set_priority=True)


def _is_worth_cudnn(step: WholeStep, decoder: Any, layers: int) -> bool:
    if flash_implementation() is not None:  # FlashAttention-3 or 4, which is faster than cuDNN
        return False
    config = decoder.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    layer_flops = 2 * attention_flops(step.rows, heads, size, step.sequence**2 / 2)
    if step.compiled and FLASH_LOSS * layer_flops < GRAPH_SECONDS:
        return False
    shape = step.rows, step.sequence, heads, size, step.device.index, next(decoder.parameters()).dtype, step.masked
    return PRICES.is_worth_in_step(shape, layers * layer_flops)
