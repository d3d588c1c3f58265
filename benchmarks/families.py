"""Measures a step of models that the paper has none of: experts with their balance loss, images, adapters, windows, hybrids.

A step is forward and backward on one sequence, beside transformers' own checkpointing, without and with Liger's kernels, under
one limit of memory for all.
`streamgrad-input` keeps the inputs of layers on the device and nothing else, as checkpointing does. Weights are random and
nothing is downloaded.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import streamgrad
from benchmarks.peers import apply_liger
from benchmarks.records import versions
from streamgrad.cli.bench_run import device_name, median_ms
from streamgrad.engine.shortage import is_out_of_memory
from streamgrad.hf.configs import preset_config, with_layers
from streamgrad.hf.libraries.quantized import bytes_of
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.live_bytes import peak_bytes_of

_PACKAGES = ("transformers", "peft", "bitsandbytes", "flash-linear-attention", "liger-kernel", "triton")
METHODS = ("streamgrad", "streamgrad-input", "checkpointing", "liger")
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, kw_only=True)
class FamilyRecord:
    """Records one method at one length; measurements are None where `error` says why. `limit_bytes` is the memory allowed."""

    benchmark: str = "families"
    case: str
    method: str
    seq_len: int
    layers: int
    step_ms: float | None
    peak_bytes: int | None
    limit_bytes: int | None
    plan: str
    error: str | None
    device: str
    versions: dict[str, str]
    command: str


Case = tuple[Any, Callable[[int], dict[str, Any]]]  # a model, and what it is called with at a length


def experts(layers: int | None, device: torch.device) -> Case:
    """Qwen3-30B-A3B with adapters of rank 16 on attention, and the balance loss of its routers."""
    config = _with_layers(preset_config("qwen3-30b-a3b"), layers)
    config.output_router_logits = True
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return _adapted(model, _PROJECTIONS[:4]), lambda tokens: _text(tokens, config.vocab_size, device)


def images(layers: int | None, device: torch.device) -> Case:
    """Qwen3-VL-8B's shape, all of it trained: a quarter of the tokens are of images of 256 tokens each."""
    config = AutoConfig.for_model("qwen3_vl")
    text = config.text_config
    sizes = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": layers or 36, "num_attention_heads": 32,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}  # fmt: skip
    for name, value in sizes.items():
        setattr(text, name, value)
    config.vision_config.out_hidden_size = text.hidden_size
    with device:
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)

    def batch(tokens: int) -> dict[str, Any]:
        found = _text(tokens, 150_000, device)
        side, patch = 32, config.vision_config.patch_size
        count = max(1, tokens // 4 // 256)
        for index in range(count):
            start = 16 + index * (tokens // count)
            found["input_ids"][0, start : start + 256] = config.image_token_id
        found["labels"] = found["input_ids"].masked_fill(found["input_ids"] == config.image_token_id, -100)
        width = 3 * config.vision_config.temporal_patch_size * patch * patch
        found["pixel_values"] = torch.randn(count * side * side, width, dtype=torch.bfloat16, device=device)
        found["image_grid_thw"] = torch.tensor([[1, side, side]] * count, device=device)
        found["mm_token_type_ids"] = (found["input_ids"] == config.image_token_id).long()
        return found

    return model.train(), batch


def hybrid(family: str, few: int) -> Callable[[int | None, torch.device], Case]:
    """Return the case of a family with mostly recurrent layers, at its published width, all of it trained, with few layers."""

    def case(layers: int | None, device: torch.device) -> Case:
        config = AutoConfig.for_model(family, num_hidden_layers=layers or few, use_cache=False)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return model.train(), lambda tokens: _text(tokens, config.vocab_size, device)

    return case


def trained(preset: str, *, adapted: bool) -> Callable[[int | None, torch.device], Case]:
    """Return the case of a preset in bf16, with adapters of rank 16 on every projection or trained whole."""

    def case(layers: int | None, device: torch.device) -> Case:
        config = _with_layers(preset_config(preset), layers)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = _adapted(model, _PROJECTIONS) if adapted else model.train()
        return model, lambda tokens: _text(tokens, config.get_text_config().vocab_size, device)

    return case


def quantised(preset: str) -> Callable[[int | None, torch.device], Case]:
    """Return the case of a preset in nf4 with adapters of rank 16; one weight at a time is whole."""

    def case(layers: int | None, device: torch.device) -> Case:
        library = importlib.import_module("bitsandbytes")
        config = _with_layers(preset_config(preset), layers)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
        packed = [(parent, name, child) for layer in model.model.layers for parent in layer.modules()
                  for name, child in parent.named_children() if isinstance(child, nn.Linear)]  # fmt: skip
        for parent, name, child in packed:
            options = {"compute_dtype": torch.bfloat16, "compress_statistics": False, "quant_type": "nf4"}
            with torch.device("meta"):
                made = library.nn.Linear4bit(child.in_features, child.out_features, bias=False, **options)
            weight = torch.randn(child.weight.shape, device=device, dtype=torch.bfloat16) * child.in_features**-0.5
            made.weight = library.nn.Params4bit(weight, requires_grad=False, compress_statistics=False, quant_type="nf4").to(
                device
            )
            setattr(parent, name, made)
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    values = torch.ones if parameter.ndim == 1 else torch.randn
                    scaled = values(parameter.shape, device=device) * (1.0 if parameter.ndim == 1 else 0.02)
                    module._parameters[name] = nn.Parameter(scaled.bfloat16(), requires_grad=False)
        model.is_loaded_in_4bit = True
        return _adapted(model, _PROJECTIONS), lambda tokens: _text(tokens, config.vocab_size, device)

    return case


CASES: dict[str, Callable[[int | None, torch.device], Case]] = {
    "experts": experts,
    "images": images,
    "gemma-3-4b": trained("gemma-3-4b", adapted=False),
    "lora-8b": trained("qwen3-8b", adapted=True),
    "qlora-8b": quantised("qwen3-8b"),
    "qlora-32b": quantised("qwen3-32b"),
    "qwen3-next": hybrid("qwen3_next", 4),
    "qwen3.5": hybrid("qwen3_5_text", 8),
}

# What Liger knows them by.
_TYPES = {
    "experts": "qwen3_moe", "images": "qwen3_vl", "gemma-3-4b": "gemma3_text", "lora-8b": "qwen3", "qlora-8b": "qwen3",
    "qlora-32b": "qwen3", "qwen3-next": "qwen3_next", "qwen3.5": "qwen3_5_text",
}  # fmt: skip


def measure_family(
    *, case: str, lengths: Sequence[int], methods: Sequence[str], limit_bytes: int | None, layers: int | None, runs: int,
    warm_ups: int, device: torch.device, command: str,
) -> Iterator[FamilyRecord]:  # fmt: skip
    """Yield the records of one case at several lengths by several methods, each as soon as it is measured.

    Liger comes last, with a model of its own: its kernels stay in the classes of the process.
    """
    torch.manual_seed(0)
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(device).total_memory)
    told = {"case": case, "limit_bytes": limit_bytes, "device": device_name(device), "command": command,
            "versions": versions(*_PACKAGES)}  # fmt: skip
    others = [name for name in methods if name != "liger"]
    if others:
        yield from _measured_by(others, *CASES[case](layers, device), lengths, (warm_ups, runs), device, told)
        _free(None, device)
    if "liger" in methods:
        apply_liger(_TYPES[case], fused_loss=True)
        yield from _measured_by(["liger"], *CASES[case](layers, device), lengths, (warm_ups, runs), device, told)


def _measured_by(
    methods: Sequence[str], model: Any, batch: Callable[[int], dict[str, Any]], lengths: Sequence[int],
    repeats: tuple[int, int], device: torch.device, told: dict[str, Any],
) -> Iterator[FamilyRecord]:  # fmt: skip
    for tokens in lengths:
        inputs = batch(tokens)
        for method in methods:
            _prepare(method, model)
            step_ms, peak_bytes, error = _measured(model, inputs, repeats, device)
            installed = InstalledForward.on(_inner(model).get_decoder())
            plan = "" if installed is None else str(installed.stream.planner.latest)
            streamgrad.disable(model)
            model.gradient_checkpointing_disable()
            yield FamilyRecord(
                method=method, seq_len=tokens, step_ms=step_ms, peak_bytes=peak_bytes, error=error, plan=plan,
                layers=_inner(model).config.get_text_config().num_hidden_layers, **told,
            )  # fmt: skip
            _free(model, device)


def _prepare(method: str, model: Any) -> None:
    if method != "streamgrad":
        model.gradient_checkpointing_enable()  # of what is not streamed too: the layers of a vision tower
    if method == "streamgrad":
        streamgrad.enable(model)
    elif method == "streamgrad-input":
        streamgrad.enable(model, keep="input", offload="none")


def _measured(
    model: nn.Module, inputs: dict[str, Any], repeats: tuple[int, int], device: torch.device
) -> tuple[float | None, int | None, str | None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**inputs).loss.backward()

    try:
        for _ in range(repeats[0]):
            step()  # what libraries set up at their first uses, cuDNN's plans among it, is no part of a step
        peak_bytes = peak_bytes_of(step, device)[1]  # above weights and the gradients of the step before
        held = bytes_of(model.parameters()) + sum(each.nbytes for each in model.parameters() if each.requires_grad)
        return median_ms(step, device, repeats[1]), peak_bytes + held, None
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
    return None, None, "out of memory"


def _inner(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _with_layers(config: Any, layers: int | None) -> Any:
    return config if layers is None else with_layers(config, layers)


def _adapted(model: Any, targets: list[str]) -> Any:
    peft = importlib.import_module("peft")
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=targets), autocast_adapter_dtype=False
    )
    adapted.enable_input_require_grads()
    return adapted.to(torch.bfloat16).train() if not getattr(model, "is_loaded_in_4bit", False) else adapted.train()


def _text(tokens: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    ids = torch.randint(vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _free(model: nn.Module | None, device: torch.device) -> None:
    if model is not None:
        model.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
