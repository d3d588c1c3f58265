"""Finding the parts of a Hugging Face model that are streamed, and refusing, by name and with the reason, what cannot be.

What is checked here is known before any work. What only shows when a layer runs (it goes around a seam, or takes an argument
that cannot be cut) raises `SeamError` there, so nothing is ever run wrongly.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import Cache, PreTrainedModel, __version__
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from streamgrad.engine.module_walk import modules_of
from streamgrad.hf.configs import layer_configs
from streamgrad.hf.known_code import eager_attention_of, is_known_eager_attention
from streamgrad.hf.layer_args import CACHE_NAMES, cache_argument
from streamgrad.hf.libraries.deepspeed import has_zero3_hooks
from streamgrad.hf.libraries.peft import base_model, may_be_adapter, why_not_in_chunks
from streamgrad.hf.libraries.quantized import is_packed
from streamgrad.hf.patching import own_forward, signature_of

# Rotary embeddings whose frequencies follow the longest position they are shown: a chunk would show them its own.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_TOKEN_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.modules.batchnorm._BatchNorm)
# Methods of a cache by which layers remember earlier tokens in a state (`engine.recurrent_chunk`).
_WRITE_STATES = {"update_conv_state", "update_recurrent_state"}
_WITHOUT_ATTENTION = {"mlp", "moe"}
_STREAMABLE_LAYER_TYPES = {
    "full_attention", "sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", *_WITHOUT_ATTENTION,
}  # fmt: skip


def unwrap(model: Any) -> PreTrainedModel:
    """Return the Hugging Face model inside PEFT, DDP, FSDP, DeepSpeed or torch.compile wrappers."""
    *_, inner = wrappers_and_model(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}, and streamgrad streams Hugging Face models. Pass a transformers.PreTrainedModel "
            "such as AutoModelForCausalLM.from_pretrained(...) returns, or a PEFT, DDP, FSDP or DeepSpeed wrapper of one."
        )
    return inner


def wrappers_and_model(model: Any) -> Iterator[Any]:
    """Yield the model's wrappers from the outermost on, and last what is inside of them."""
    inner: Any = model
    yield inner
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        compiled, module = getattr(inner, "_orig_mod", None), wrapped_by_engine(inner)
        inside = base_model(inner) or (compiled if isinstance(compiled, nn.Module) else module)
        if inside is None:
            return
        yield (inner := inside)


def wrapped_by_engine(wrapper: Any) -> nn.Module | None:
    """Return the module inside DDP, FSDP or DeepSpeed; None where it is none of them."""
    module = getattr(wrapper, "module", None)
    return module if isinstance(module, nn.Module) else None


def cannot_be_streamed(model: nn.Module, reason: object, *, enabled: bool = False, remedy: str = "") -> ValueError:
    """Return the error that refuses a model for `reason`, which ends with what to do instead."""
    remedy = remedy or (
        "Call streamgrad.disable(model) to train it without."
        if enabled
        else "Train it without streamgrad, with model.gradient_checkpointing_enable(), or take a model of a family that is "
        "streamed: docs/compatibility.md lists them."
    )
    return ValueError(f"{type(model).__name__} cannot be streamed: {str(reason).rstrip('.')}. {remedy}")


# What transformers makes of a `distributed_config`, and what to do in its place.
_LOADED_IN_PARTS = {
    "ep_size": "expert parallelism ({}), whose experts sum over ranks in every chunk. Load whole experts, sharded by FSDP2 or "
    "ZeRO-3.",
    "tp_size": "tensor parallelism ({}), whose modules reduce gradients of their own, once a chunk. Cut its layers by torch's "
    "parallelize_module, share sequences by streamgrad.parallel, or parameters by FSDP2 or ZeRO-3.",
    "pp_size": "pipeline parallelism ({}), whose stages pass no gradient on. Make stages by torch.distributed.pipelining.",
}


def find_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module whose forward runs the decoder layers, after checking that these can be streamed."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} cannot be streamed: it is an encoder-decoder. Pass a decoder-only causal language model.")
    loaded = getattr(model.config, "distributed_config", None)
    for size, remark in _LOADED_IN_PARTS.items():
        ranks = getattr(loaded, size, None) or (size == "tp_size" and getattr(model, size, None)) or 1
        if ranks > 1:
            raise ValueError(f"{name} cannot be streamed: it was loaded with {remark.format(f'{size}={ranks}')}")
    decoder = model.get_decoder()
    layers = decoder_layers(decoder)
    if not layers:
        raise cannot_be_streamed(model, f"{type(decoder).__name__}, which get_decoder() returns, has no list of decoder layers")
    for place, origin in replaced_attention(layers[0]):
        package = origin.partition(".")[0]
        raise cannot_be_streamed(
            model,
            f"{place} has a forward of {origin}, which does not call transformers' attention, and that is all that is streamed",
            remedy=f"Load it with transformers in a process that does not import {package}, or train it with {package} alone.",
        )
    for reason in _refusals(decoder, layers, config, makes_masks=config is model.config):
        raise cannot_be_streamed(model, reason, remedy=_newer_transformers(layers))
    return decoder


def _begin_anew(layer: nn.Module) -> bool:
    """Return whether it is a layer of a transformers whose layers take no state up with several tokens, if they have one."""
    return type(layer).__module__.startswith("transformers.") and not hasattr(Cache, "is_recording_past")


def _newer_transformers(layers: list[nn.Module]) -> str:
    """Return which transformers streams layers with states, where the installed one does not and some may have any."""
    states = any(isinstance(module, nn.Conv1d) or is_recurrent([module]) for layer in layers for module in modules_of(layer))
    if not states or not _begin_anew(layers[0]):
        return ""
    return (
        f"transformers {__version__} is installed, and layers with states (linear attention, Mamba 2) are streamed from 5.21 on."
        ' Run: pip install "transformers>=5.21"'
    )


def surrounding_models(model: PreTrainedModel, decoder: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models, `model` itself only if it has no head of its own, that have the decoder beside other parts."""
    headless = [part for part in model.modules() if part is not model or model.get_output_embeddings() is None]
    models = [part for part in headless if isinstance(part, PreTrainedModel) and part.config is not decoder.config]
    return [part for part in models if any(module is decoder for module in part.modules())]


def decoder_layers(decoder: nn.Module) -> list[nn.Module]:
    """Return the layers as they stand now, each once: adapters replicate layers and users remove some."""
    config = getattr(decoder, "config", None)
    count = getattr(config, "num_hidden_layers", None)
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child)]
    exact = [child for child in lists if len(child) == count]
    return list(dict.fromkeys((exact or lists or [nn.ModuleList()])[0]))


def layer_refusals(modules: list[nn.Module]) -> Iterator[str]:
    """Yield why a layer with these modules cannot run in chunks.

    Something in it mixes tokens outside of attention or depends on the whole sequence; or an engine gathers the layer in parts,
    once a chunk, although ranks differ in their number of chunks.
    """
    layer, recurrent = modules[0], is_recurrent(modules)
    if isinstance(getattr(layer, "_orig_mod", None), nn.Module):
        yield "its layers are wrapped by torch.compile; leave that out, or compile modules inside of the layers"
    if "mamba_selective_scan" in names_in(modules):
        yield f"{type(layer).__name__} has the scan of Mamba 1, which begins with a new state wherever it is given several tokens"
    if "update_recurrent_state" in names_in(modules) and _begin_anew(layer):
        yield f"{type(layer).__name__} begins with a new state wherever it is given several tokens"
    for module in filter(_is_suspect, modules):
        reason = _class_refusal(type(module))  # type: ignore[arg-type]
        if recurrent and isinstance(module, nn.Conv1d):
            continue  # it sees earlier tokens through a state
        if reason is not None and (module is not layer or not isinstance(module, FSDPModule)):
            yield reason.format(place=_place(layer, module), layer=type(layer).__name__)
        if follows_length(module):
            yield (
                f"{_place(layer, module)} is inside the layer and depends on the sequence length ({module.rope_type} rotary "
                "embedding)"
            )
        if type(module).__name__ == "Float8Linear" and _has_tensorwise_scales(module):
            yield (
                f"{_place(layer, module)} trains in float8 with one scale for a whole tensor, which would be another one in each "
                "chunk; use row-wise scales, Float8LinearConfig.from_recipe_name('rowwise'), which are exact in chunks"
            )
        if "_hf_hook" in module.__dict__ and any(p is not None and p.is_meta for p in module._parameters.values()):
            yield (
                f"Accelerate brings the weight of {_place(layer, module)} from the host at each call (cpu_offload, disk_offload) "
                "and leaves it without a gradient, streamed or not; keep the states of the optimizer on the host instead, or the "
                "weights by FSDP2's CPUOffloadPolicy (docs/optimizers.md)"
            )
        if is_packed(module):
            yield (
                f"bitsandbytes has packed the weight of {_place(layer, module)} for inference on this processor, in eval mode, "
                "and its products have no gradient any more; load the model anew, and call model.train() before its first pass"
            )
        adapter = why_not_in_chunks(module)
        if adapter is not None:
            yield f"{_place(layer, module)} {adapter}"
        if parametrize._cache_enabled and "parametrizations" in module._modules:
            yield f"{_place(layer, module)} is parametrized, and what parametrize.cached() keeps has no graph; leave cached() out"
        if module is not layer and has_zero3_hooks(module):
            yield (
                f"ZeRO-3 gathers the parameters of {type(layer).__name__} module by module; so that a layer is gathered as a "
                "whole, call streamgrad.parallel.make_zero3_leaves(model) before deepspeed.initialize or accelerator.prepare"
            )


def _is_suspect(module: nn.Module) -> bool:
    """Return whether `layer_refusals` has to look closer at the module, as it need not at nearly all, in every step."""
    own, kind = module.__dict__, type(module)
    return (
        _class_refusal(kind) is not None  # type: ignore[arg-type]
        or type(own["_parameters"].get("weight")) not in (nn.Parameter, type(None))
        or "parametrizations" in own["_modules"]
        or "rope_type" in own
        or "_hf_hook" in own
        or has_zero3_hooks(module)
        or may_be_adapter(module)
        or kind.__name__ == "Float8Linear"
    )


def _has_tensorwise_scales(module: Any) -> bool:
    """Return whether torchao scales its inputs or their gradients by one number; the weight is the same in every chunk."""
    of_tokens = ("cast_config_input", "cast_config_grad_output")
    casts = [value for name, value in vars(module.config).items() if name.startswith(of_tokens)]
    scaled = [cast for cast in casts if getattr(cast.scaling_type, "name", "") != "DISABLED"]
    return any(cast.scaling_granularity.name == "TENSORWISE" for cast in scaled)


def is_recurrent(modules: list[nn.Module]) -> bool:
    """Return whether a layer's modules hand a state from token to token, in place of attention or beside it."""
    return not _WRITE_STATES.isdisjoint(names_in(modules))


def has_recurrent_layers(decoder: nn.Module) -> bool:
    """Return whether some of its layers have states."""
    return any(is_recurrent(modules_of(layer)) for layer in decoder_layers(decoder))


def has_attention(modules: list[nn.Module]) -> bool:
    """Return whether a layer has attention. One without states has it unless it says otherwise."""
    if is_recurrent(modules):
        return _looks_attention_up(modules)
    return modules[0].__dict__.get("block_type") not in _WITHOUT_ATTENTION


def _looks_attention_up(modules: list[nn.Module]) -> bool:
    """Return whether the modules' code uses transformers' table of attention functions: not all models that do say so."""
    return "ALL_ATTENTION_FUNCTIONS" in names_in(modules)


def names_in(modules: list[nn.Module]) -> frozenset[str]:
    """Return the global names, attributes and strings in the code of the modules' forward methods."""
    return _names_in_forwards(tuple(map(type, modules)))


@functools.lru_cache(maxsize=1024)
def _names_in_forwards(kinds: tuple[type, ...]) -> frozenset[str]:
    return frozenset().union(*map(_names_in_forward, kinds))


@functools.lru_cache(maxsize=1024)
def _names_in_forward(kind: type) -> set[str]:
    # Not by the class, where TorchScript has something that cannot be looked up.
    code = getattr(inspect.unwrap(inspect.getattr_static(kind, "forward")), "__code__", None)
    return set() if code is None else {*code.co_names, *(word for word in code.co_consts if isinstance(word, str))}


def _place(layer: nn.Module, module: nn.Module) -> str:
    path = next(path for path, inner in layer.named_modules() if inner is module)
    return f"{type(layer).__name__}.{path}"


@functools.lru_cache(maxsize=1024)
def _class_refusal(kind: type) -> str | None:
    """Return why no module of this class may be inside a layer; `{place}` and `{layer}` are its path and the layer's class."""
    if issubclass(kind, _TOKEN_MIXERS):
        return f"{{place}} is a {kind.__name__}, which mixes tokens outside of attention"
    if issubclass(kind, torch.jit.ScriptModule):
        return "{place} is a TorchScript module, whose code cannot be looked at; put the module there that it was made of"
    if any(base.__name__ == "CheckpointWrapper" for base in kind.__mro__):
        return "CheckpointWrapper is around its layers or inside them; leave it out, as streamed layers are run again anyway"
    if issubclass(kind, FullyShardedDataParallel):
        return "its layers are wrapped by FullyShardedDataParallel, which gathers at every call; use FSDP2 (fully_shard)"
    if issubclass(kind, FSDPModule):
        return "fully_shard was applied to modules inside {layer}; apply it to {layer} as a whole"
    if any(base.__module__ == "deepspeed.module_inject.layers" for base in kind.__mro__):
        return (
            f"{{place}} is DeepSpeed's {kind.__name__}: AutoTP (autotp_size) has cut it for tensor parallelism, whose sums over "
            "ranks would be taken in every chunk; leave autotp_size out, and share sequences between the ranks (sp_size)"
        )
    return None


def attention_configs(modules: list[nn.Module]) -> list[Any]:
    """Return the configurations that say which attention is used: most often one; replicated layers may hold copies."""
    configs = {id(own["config"]): own["config"] for module in modules if "config" in (own := module.__dict__)}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


def foreign_attention(configs: list[Any], layer: nn.Module) -> Iterator[str]:
    """Yield why attention is not transformers' own, which the streamed one equals, or a copy of it in the model's file."""
    for name in {config._attn_implementation_internal for config in configs} - {None}:
        if name == "sdpa" and F.scaled_dot_product_attention is not torch._C._nn.scaled_dot_product_attention:
            yield (
                "torch.nn.functional.scaled_dot_product_attention has been replaced, as torch's context_parallel does, and "
                "streamed attention would not call what is in its place; streamgrad.parallel shares sequences between ranks"
            )
        functions = [interface.get(name) for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)]
        files = {"transformers", "torch", "streamgrad", "deepspeed"}  # whose Ulysses is known (`hf.sequence_slices`)
        own = []
        if name == "eager":
            own = [function for module in modules_of(layer) for function in eager_attention_of(module)]
            functions += own
        functions = list(map(_unwrapped, functions))
        ours = [function for function in functions if str(getattr(function, "__module__", None)).startswith("transformers.")]
        functions += [called for function in ours for called in _called_by(function)]
        for function in functions:
            origin = getattr(function, "__module__", None)
            is_known = function is None or (origin or "").partition(".")[0] in files
            if not is_known and not (function in own and is_known_eager_attention(function)):
                yield (
                    f"its attention, {name!r}, has a function of {origin} in place of transformers' own, which is all that is "
                    "streamed; put that back, with model.set_attn_implementation('sdpa') where the name is your own, or in a "
                    f"process that does not import {(origin or '').partition('.')[0]}"
                )


def _called_by(function: Any) -> list[Any]:
    """Return what a function of transformers calls by global names: rings of ranks replace FlashAttention's there."""
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    values = [function.__globals__.get(name) for name in names]
    return [value for value in values if isinstance(value, types.FunctionType)]


def replaced_attention(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield where a package other than the model's, as Unsloth does, has put attention of its own, and the module it is in.

    Its function takes the mask, and nothing in the layer looks attention up in transformers' table any more. Replacements that
    look it up, or that are no attention (norms, MLPs), are left to the trial of the layer.
    """
    parts = [(path, module, inspect.unwrap(own_forward(module))) for path, module in layer.named_modules()]
    if any("ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ()) for *_, forward in parts):
        return
    for path, module, forward in parts:
        origin = getattr(forward, "__module__", None) or ""
        packages = {kind.__module__.partition(".")[0] for kind in type(module).__mro__}
        if origin.partition(".")[0] not in packages and "attention_mask" in signature_of(forward).parameters:
            yield f"{type(layer).__name__}.{path}".rstrip("."), origin


def _unwrapped(function: Any) -> Any:
    return _unwrapped(function.func) if isinstance(function, functools.partial) else function


def follows_length(module: nn.Module) -> bool:
    """Return whether it is a rotary embedding whose frequencies follow the longest position that it is shown."""
    kinds = module.__dict__.get("rope_type")
    if kinds is None:
        return False
    return any(kind in _LENGTH_DEPENDENT_ROPE for kind in (kinds.values() if isinstance(kinds, dict) else (kinds,)))


def _refusals(decoder: Any, layers: list[nn.Module], config: Any, *, makes_masks: bool) -> Iterator[str]:
    """Yield why the decoder cannot be streamed exactly, the most telling reason first.

    Where it does not make its own masks, which tokens see each other both ways is known in each call.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) - _STREAMABLE_LAYER_TYPES
    if kinds:
        yield (
            f"it has layers of type {', '.join(sorted(kinds))}, and only full, sliding-window and linear attention and "
            "convolutions are streamed"
        )
    for layer in layers:
        yield from layer_refusals(modules_of(layer))
    with_attention = [modules for modules in map(modules_of, layers) if has_attention(modules)]
    if not isinstance(decoder, PreTrainedModel) or not (
        getattr(decoder, "_supports_attention_backend", False) or all(map(_looks_attention_up, with_attention))
    ):
        yield "its attention does not go through transformers' AttentionInterface"
    yield from foreign_attention(attention_configs(modules_of(decoder, but_for=layers)), layers[0])
    for layer_config in layer_configs(config):
        heads, key_heads = (getattr(layer_config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
        if isinstance(heads, int) and isinstance(key_heads, int) and (key_heads < 1 or heads % key_heads):
            yield f"its {heads} query heads cannot share {key_heads} key/value heads evenly"
    both_ways = makes_masks and getattr(config, "use_bidirectional_attention", None)
    if getattr(config, "is_causal", True) is False or both_ways:
        yield "its configuration asks for bidirectional attention"
    for layer in layers:
        if cache_argument(own_forward(layer)) is None:
            yield f"{type(layer).__name__} takes no key/value cache (none of {', '.join(CACHE_NAMES)})"


def sliding_window(config: Any) -> int | None:
    """Return the window, or the narrowest one, of the model's sliding-attention layers, if it has any."""
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    windows = [getattr(each, "sliding_window", None) for each in layer_configs(config)]
    found = [window for window in windows if window is not None]
    return min(found, default=None) if kinds is None or "sliding_attention" in kinds else None
