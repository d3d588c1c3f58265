"""Tiny models with the linear maps of their layers quantised, as bitsandbytes does it, and the same models dequantised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tiny import tiny_model

KINDS = ("nf4", "fp4", "nf4 doubly", "int8")


def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'streamgrad[quantized]'")


def quantized_model(kind: str, *, dtype: torch.dtype, head: bool = False, **changes):
    """A tiny Qwen3 that computes in `dtype`; with `head`, its head is quantised too."""
    model = tiny_model("qwen3", dtype=torch.float32, **changes).to(dtype)
    _replace_linear(model, head, lambda linear: _quantized(kind, linear))
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = kind == "int8", kind != "int8"  # by which PEFT chooses its adapters
    return model


def dequantized_model(kind: str, *, dtype: torch.dtype, head: bool = False, **changes):
    """The same function, of ordinary weights in `dtype`."""
    model = quantized_model(kind, dtype=torch.float32, head=head, **changes)
    _replace_linear(model, head, _dequantized)
    return model.to(dtype)


def _replace_linear(model, head: bool, replacement) -> None:
    for root in (*model.model.layers, *([model] if head else [])):
        for parent in root.modules() if root is not model else [model]:
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, replacement(child))


def _quantized(kind: str, linear: nn.Linear) -> nn.Module:
    modules, sizes = bitsandbytes().nn, (linear.in_features, linear.out_features)
    weight = linear.weight.detach().float()
    if kind == "int8":
        made = modules.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
        made.weight = modules.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to("cpu")
    else:
        options = {"quant_type": kind[:3], "compress_statistics": "doubly" in kind}
        made = modules.Linear4bit(*sizes, bias=False, compute_dtype=linear.weight.dtype, **options)
        made.weight = modules.Params4bit(weight, requires_grad=False, **options).to("cpu")
    return made


def _dequantized(module: nn.Module) -> nn.Linear:
    linear = nn.Linear(module.in_features, module.out_features, bias=False)
    if hasattr(module.weight, "quant_state"):
        values = bitsandbytes().functional.dequantize_4bit(module.weight.detach(), module.weight.quant_state)
    else:
        values = module.weight.CB.float() * module.weight.SCB[:, None] / 127
    linear.weight = nn.Parameter(values.float(), requires_grad=False)
    return linear
