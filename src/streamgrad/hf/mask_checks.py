"""The masks of layers; those that the stock model would read otherwise than streamed attention does are refused.

A token that sees no key (padding on the left) gets zeros from streamed attention, as from SDPA, flash and flex attention. Eager
attention gives it the mean of all values, those of later tokens included, unless it has a sink, which then takes all weight.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.attention.masks import CausalMask, DenseMask, rows_without_keys
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.hf.discover import decoder_layers, sliding_window
from streamgrad.hf.layer_args import LayerArguments
from streamgrad.hf.patching import tokens_of
from streamgrad.hf.seams import attention_name, layer_mask, with_documents

# Kernels for which a mask of None hides nothing; for others it means causal.
_SEES_ALL_WITHOUT_MASK = {"eager", "flex_attention"}


def check_mask(arguments: dict[str, Any], config: Any) -> None:
    """Raise for a mask whose shape or dtype the stock model cannot take, or does not read as streamed attention does."""
    tokens = tokens_of(arguments)
    rows = "" if tokens is None else f" in a batch of {len(tokens)}"
    for mask in _tensors(arguments.get("attention_mask")):
        if mask.ndim not in (2, 4) or (mask.ndim == 2 and tokens is not None and len(mask) != len(tokens)):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}{rows}. Pass (batch, tokens), nonzero for real tokens, or "
                "(batch, 1, tokens, tokens), which says what each token sees."
            )
        if mask.ndim == 4 and mask.dtype != torch.bool and not mask.is_floating_point():
            raise ValueError(
                f"the 4-D attention mask is {mask.dtype}, and could say what is seen or what is added to scores. Pass a boolean "
                "mask, True where a query sees a key, or a floating-point one, 0 there and -inf elsewhere."
            )
        if mask.ndim == 4 and mask.dtype == torch.bool and attention_name(config) in ("eager", "flex_attention"):
            raise ValueError(
                f"the 4-D attention mask is boolean, and {attention_name(config)} attention, which this model has, adds it "
                "to scores as 0 and 1, so that it hides nothing. Pass a floating-point mask, 0 where a query sees a key and "
                "torch.finfo(dtype).min elsewhere, or call model.set_attn_implementation('sdpa')."
            )


def check_predictions(attention_mask: Any, predicts_BT: Tensor, decoder: Any) -> None:
    """Warn once if a token that sees no key has a prediction in the loss; raise if streamed attention gives it another one."""
    for mask in _tensors(attention_mask):
        batch, length = predicts_BT.shape
        if mask.ndim not in (2, 4) or mask.shape[-1] != length or len(mask) not in (1, batch):
            continue  # refused where the mask is used
        found = (predicts_BT & rows_without_keys(mask, sliding_window(decoder.config)).to(predicts_BT.device)).nonzero()
        if len(found):
            row, token = found[0].tolist()
            which = f"labels[{row}, {token + 1}] would be predicted from token {token}, which sees no key"
            is_finite = mask.ndim == 4 and DenseMask(mask).blind_BHT is not None
            accept_blind_predictions(which, decoder, is_finite=is_finite)


def accept_blind_predictions(which: str, decoder: Any, *, is_finite: bool = False) -> None:
    """Warn once of `which` predictions from tokens that see no key; raise unless stock attention gives those tokens zeros.

    It does not if it is eager without sinks, or if keys are hidden by a mask of finite values.
    """
    if is_finite or (attention_name(decoder.config) == "eager" and not all(map(_has_sink, decoder_layers(decoder)))):
        other = "pass a boolean mask to a model with SDPA" if is_finite else "call model.set_attn_implementation('sdpa')"
        raise ValueError(
            f"{which}: the attention mask hides them all. Stock attention then takes the mean of all values, later ones "
            "included, which cannot be streamed. Set such labels to -100 (with left padding: those of the first real token of "
            f"each row), pad on the right, or {other}."
        )
    _warn_of_blind_predictions()


def _has_sink(layer: nn.Module) -> bool:
    return any(getattr(module, "sinks", None) is not None for module in layer.modules())


@functools.cache
def _warn_of_blind_predictions() -> None:
    """Warn, the first time only: later calls are answered by the cache."""
    warnings.warn(
        "streamgrad: some labels are predicted from tokens that see no key (with left padding, the first real token of each row "
        "is predicted from padding). Attention gives these tokens zeros, as SDPA does in the stock model. To leave such labels "
        "out of the loss, set them to -100.",
        UserWarning,
        stacklevel=2,
    )


def _tensors(attention_mask: Any) -> list[Tensor]:
    """Return the mask, or those of a dict by type of layer, which some models take."""
    masks = attention_mask.values() if isinstance(attention_mask, dict) else [attention_mask]
    return [mask for mask in masks if isinstance(mask, Tensor)]


def mask_of_layer(arguments: LayerArguments, config: Any, rows: int, length: int, *, chunk_size: int) -> CausalMask | DenseMask:
    """Return the mask of a layer that is called with these arguments, as one that can be built by chunk."""
    if arguments.attention_mask is None and (name := attention_name(config)) in _SEES_ALL_WITHOUT_MASK:
        raise SeamError(
            f"its layers are given no attention mask, and {name} attention then lets each token see those after it too; call "
            "model.set_attn_implementation('sdpa') if that is not meant"
        )
    mask = layer_mask(arguments.attention_mask, length, chunk_size=chunk_size)
    mask = _of_these_tokens(mask, rows, length) if isinstance(mask, CausalMask) else mask
    boundaries, of_keys = (arguments.others.get(f"cu_seq_lens_{side}") for side in "qk")
    if boundaries is None:
        return mask
    if of_keys is not None and of_keys is not boundaries and not torch.equal(boundaries, of_keys.to(boundaries)):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k differ ({boundaries.numel()} and {of_keys.numel()} boundaries), and a token sees "
            "the keys of its own document. Pass the same boundaries as both."
        )
    return with_documents(mask, boundaries, length) if isinstance(mask, CausalMask) else mask


def _of_these_tokens(mask: CausalMask, rows: int, length: int) -> CausalMask:
    """Return the mask, or one that hides as little if it does for other tokens: the stock model has none for those.

    Decoders may call layers with other tokens than they made their mask for: with some in front, with half of them, row by row.
    """
    batch, *_, made_for = mask.shape
    if batch in (1, rows) and made_for in (0, length):
        return mask
    if mask.rule is None and mask.blocks is None and (mask.padding_BT is None or bool(mask.padding_BT.all())):
        return CausalMask()
    raise SeamError(
        f"its layers are called with {rows} x {length} tokens and the mask of {batch} x {made_for}, which says of other tokens "
        "what they see"
    )
