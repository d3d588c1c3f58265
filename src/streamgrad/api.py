"""`enable` and `disable`: the one line that wires a Hugging Face model to the engine, and the one that takes it out again.

An enabled model differs from the stock one in two instance attributes each on the decoder and, where there is a
language-modelling head, on the model: a `forward` and the stream's settings. Parameters, buffers, classes, hooks, configuration
and state dict are untouched.
"""

from __future__ import annotations

import types
from typing import Any, TypeVar

from streamgrad.config import StreamConfig
from streamgrad.models.causal_lm import HeadStream, causal_lm_forward, traced_logit_map
from streamgrad.models.decoder import DecoderStream, decoder_forward
from streamgrad.models.support import find_parts, unwrap

ModelT = TypeVar("ModelT")


def enable(model: ModelT, config: StreamConfig | None = None, **options: Any) -> ModelT:
    """Compute this model's gradients in sequence chunks: same loss, same gradients, a fraction of the memory.

    ```diff
      model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="bfloat16")
    + streamgrad.enable(model)
    ```

    Args:
        model: a `transformers.PreTrainedModel`, or a PEFT, DDP, FSDP or DeepSpeed wrapper of one.
        config: a `StreamConfig`; `options` by name are put on top of it.

    Returns `model`. While gradients are computed, `model(..., labels=...)` returns the loss with `logits=None`; under
    `torch.no_grad()` or without labels, logits are returned as always.

    Raises `ValueError` or `TypeError`, with the model untouched, for a model or an option that cannot be streamed.
    """
    settings = StreamConfig.resolve(config, options)
    inner = unwrap(model)
    parts = find_parts(inner)
    if is_enabled(model):
        current = parts.decoder._streamgrad.config
        if current != settings:
            raise ValueError(
                f"{type(inner).__name__} is already enabled with {current}, which differs from {settings}. "
                "Call streamgrad.disable(model) first."
            )
        return model
    head = inner.get_output_embeddings()
    if head is not None and inner is not parts.decoder:
        head_stream = HeadStream(settings, traced_logit_map(inner, parts.decoder, head), inner.__dict__.get("forward"))
        _install(inner, "_streamgrad_head", head_stream, causal_lm_forward)
    decoder_stream = DecoderStream(settings, parts.layers, parts.decoder.__dict__.get("forward"))
    _install(parts.decoder, "_streamgrad", decoder_stream, decoder_forward)
    return model


def disable(model: ModelT) -> ModelT:
    """Take streaming out again; the model is the stock one, bit for bit. Does nothing to a model that is not enabled."""
    inner = unwrap(model)
    for module, name in ((inner, "_streamgrad_head"), (inner.get_decoder(), "_streamgrad")):
        stream = module.__dict__.pop(name, None)
        if stream is not None:
            del module.__dict__["forward"]
            if stream.stock_forward is not None:
                module.__dict__["forward"] = stream.stock_forward
    return model


def is_enabled(model: Any) -> bool:
    """Whether `enable` is in force for this model."""
    return "_streamgrad" in unwrap(model).get_decoder().__dict__


def _install(module: Any, name: str, stream: object, forward: Any) -> None:
    # In __dict__ and as a bound method: `copy.deepcopy` then rebinds it to the copy instead of running the original's weights.
    module.__dict__[name] = stream
    module.__dict__["forward"] = types.MethodType(forward, module)
