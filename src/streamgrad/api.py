"""`enable` and `disable`: the one line that lets a Hugging Face model stream, and the one that undoes it.

Enabling sets two instance attributes, `forward` and `_streamgrad`, on the decoder, on the model where it has a language-modelling
head, and on models in between, which have the decoder beside other parts (text with images). Parameters, buffers, classes, hooks,
configuration and state dict are untouched.
"""

from __future__ import annotations

from typing import Any, TypeVar

from streamgrad.config import StreamConfig
from streamgrad.hf.causal_lm import HeadStream, causal_lm_forward, traced_logit_map
from streamgrad.hf.decoder import DecoderStream, surrounding_forward
from streamgrad.hf.discover import find_decoder, surrounding_models, unwrap
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.status import announcing_forward

ModelT = TypeVar("ModelT")


def enable(model: ModelT, config: StreamConfig | None = None, **options: Any) -> ModelT:
    """Compute this model's gradients in sequence chunks: same loss, same gradients, a fraction of the memory.

    ```diff
      model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-8B", dtype="bfloat16")
    + streamgrad.enable(model)
    ```

    Args:
        model: a `transformers.PreTrainedModel`, or a PEFT, DDP, FSDP or DeepSpeed wrapper of one.
        config: a `StreamConfig`; `options` replace its fields by name.

    Returns `model`. While gradients are computed, `model(..., labels=...)` returns the loss and no logits: any use of
    `outputs.logits` raises. Under `torch.no_grad()` or without labels, logits are returned as always.

    Raises `ValueError` or `TypeError`, with the model untouched, for a model or an option that cannot be streamed.
    """
    settings = StreamConfig.resolve(config, options)
    inner = unwrap(model)
    decoder = find_decoder(inner)
    current = InstalledForward.on(decoder)
    if current is not None and current.stream.config != settings:
        raise ValueError(
            f"{type(inner).__name__} is already enabled with {current.stream.config}, which differs from {settings}. "
            "Call streamgrad.disable(model) first."
        )
    stream = DecoderStream(settings)  # which raises for kernels that are not there
    head = inner.get_output_embeddings()
    if head is not None and inner is not decoder and (current is None or InstalledForward.on(inner) is None):
        head_stream = HeadStream(settings, traced_logit_map(inner, decoder, head))
        InstalledForward(inner, causal_lm_forward, head_stream).install()
    for part in surrounding_models(inner, decoder):
        if InstalledForward.on(part) is None:
            InstalledForward(part, surrounding_forward, settings).install()
    if current is None:
        InstalledForward(decoder, announcing_forward, stream).install()
    return model


def disable(model: ModelT) -> ModelT:
    """Undo `enable`: the model is the stock one again, bit for bit. Does nothing to a model that is not enabled."""
    inner = unwrap(model)
    for module in inner.modules():
        installed = InstalledForward.on(module)
        if installed is not None:
            installed.remove()
    return model


def is_enabled(model: Any) -> bool:
    """Return whether `enable` is in force for this model."""
    return InstalledForward.on(unwrap(model).get_decoder()) is not None
