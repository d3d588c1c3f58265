"""LoRA adapters with non-zero weights, so that every adapter matrix has a gradient."""

from __future__ import annotations

from typing import Any

import peft
import torch
from torch import nn

# Projections under the names that the families in tiny.py give them.
_ATTENTION = r".*\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|query_key_value|dense)"
_ATTENTION_AND_MLP = r".*\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|query_key_value|dense|down_proj|gate_up_proj|dense_h_to_4h)"


def with_lora(model, *, targets: str | list[str] | None = None, dropout: float = 0.0, **options) -> peft.PeftModel:
    if targets is None:
        # Experts are stacked parameters, not modules: there LoRA goes on attention.
        targets = _ATTENTION if "experts" in str(model.config.to_dict().keys()) else _ATTENTION_AND_MLP
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=targets, lora_dropout=dropout, **options)
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = (0.3 * torch.randn(parameter.shape, generator=generator)).to(dtype)
    return adapted


def inner_of(model: nn.Module) -> Any:
    """Return the model that may be inside of adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
