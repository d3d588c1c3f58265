"""DeepSpeed ZeRO-3: a decoder layer is gathered and released as a whole.

ZeRO-3 gathers parameters by hooks on every module that has some. A streamed layer calls its modules once per chunk, and holds
gradient accumulators of its parameters during backward: they must be gathered around the layer, not inside it. DeepSpeed calls a
module that is gathered as a whole a *leaf module*. DDP, FSDP2 and ZeRO-1/2 need none.
"""

from __future__ import annotations

from typing import Any, TypeVar

from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from streamgrad.api import enable
from streamgrad.config import StreamConfig
from streamgrad.hf.discover import decoder_layers, unwrap
from streamgrad.hf.libraries.deepspeed import has_zero3_hooks
from streamgrad.hf.patching import InstalledForward

ModelT = TypeVar("ModelT")


def enable_for_trainer(model: Any, config: StreamConfig | None) -> None:
    """Enable `model` with `config`, and mark ZeRO-3's leaves; None leaves a model that is enabled already as it is.

    A trainer makes its engine right after its constructor, and so after this.
    """
    current = InstalledForward.on(unwrap(model).get_decoder())
    enable(model, current.stream.config if config is None and current is not None else config)
    if is_deepspeed_zero3_enabled():
        make_zero3_leaves(model)


def make_zero3_leaves(model: ModelT) -> ModelT:
    """Mark every decoder layer as a ZeRO-3 leaf module; call it before `deepspeed.initialize` or `accelerator.prepare`. Equals

        deepspeed.utils.set_z3_leaf_modules(model, [type of the decoder layers])

    and, in a DeepSpeed configuration, `"zero_optimization": {"leaf_module": {"classes": ["Qwen3DecoderLayer"]}}`. It does no harm
    under another engine, or without streaming. Returns `model`.
    """
    from deepspeed.utils import set_z3_leaf_module

    inner = unwrap(model)
    layers = decoder_layers(inner.get_decoder())
    for layer in layers:
        if any(has_zero3_hooks(module) for module in layer.modules() if module is not layer):
            raise RuntimeError(
                f"ZeRO-3 already has hooks inside {type(layer).__name__}, which cannot become a leaf module any more. Call "
                "streamgrad.parallel.make_zero3_leaves(model) before deepspeed.initialize or accelerator.prepare."
            )
    for layer in layers:
        set_z3_leaf_module(layer, True)
    return model
