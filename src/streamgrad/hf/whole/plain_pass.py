"""The plain pass: a step whose layers all keep their whole graph runs the model's own forward, under ordinary autograd.

Nothing of the engine is in between, since a chunk that is the whole sequence and is never run again needs none of it. At a few
thousand tokens a step takes as long as its Python code and launches, so this is the difference to the stock model. The head is
streamed as ever. Masks, hooks, recorded outputs and random numbers are the stock model's, and so is attention, but for the choice
of its kernel (`hf.whole.attention`). Layers that are compiled (`layer.compile()`, or `compile_layers=True`) run compiled.

Known limits: only for attention by SDPA, whose masks follow the same rules as streamed attention's. A mask of (T x T) is made
where padding, documents or a window ask for one, so rows of more than `_MASKED_TOKENS` are then left to streamed attention. A
row that is a tree has streamed attention in any case, within the model's own layers, which are then not compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.config import StreamConfig
from streamgrad.engine.module_walk import modules_of, parameters_of
from streamgrad.hf.discover import has_recurrent_layers, sliding_window
from streamgrad.hf.fusion import Fusion
from streamgrad.hf.layer_args import DOCUMENTS
from streamgrad.hf.libraries.deepspeed import is_partitioned
from streamgrad.hf.libraries.quantized import never_packed
from streamgrad.hf.patching import not_checkpointed, tokens_of
from streamgrad.hf.seams import attention_name
from streamgrad.hf.sequence_slices import WholeSequences
from streamgrad.hf.whole.compiled_layers import LayerCompiler
from streamgrad.hf.whole.layer_groups import groups_of
from streamgrad.hf.whole_step import WholeStep
from streamgrad.memory.planner import HeadFacts

# Beyond so many tokens a row, kernels for masks of (T x T) lose more than the engine's Python code takes.
_MASKED_TOKENS = 1024
# Beyond so many tokens a step, layers take the device longer than Python takes to call their graphs one by one.
_GROUPED_TOKENS = 4096


def whole_step(
    decoder: Any, layers: list[nn.Module], config: StreamConfig, sequences: WholeSequences, head: HeadFacts | None
) -> WholeStep | None:
    """Return what the plan of a plain pass depends on, or None for a call that has to go through the engine."""
    arguments, is_tree = sequences.arguments, sequences.tree is not None
    tokens, mask = tokens_of(arguments), arguments.get("attention_mask")
    if config.keep not in ("auto", "all") or config.attention not in ("auto", "fa4"):
        return None
    if not torch.is_grad_enabled() or tokens is None:
        return None
    if getattr(decoder.config, "attn_logit_softcapping", None) is not None:
        return None  # which SDPA leaves out in some releases
    if is_tree and has_recurrent_layers(decoder):
        return None  # the engine refuses it
    if attention_name(decoder.config) != "sdpa" or any(arguments.get(name) is not None for name in DOCUMENTS):
        return None
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == tokens.shape[:2]):
        return None
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None  # of a checkpoint, perhaps, which would run the step again and expect it to save the same tensors
    rows, sequence = tokens.shape[:2]
    masked = not is_tree and _may_need_mask(decoder, arguments, sequence)
    if masked and sequence > _MASKED_TOKENS:
        if _needs_mask(decoder, arguments, sequence):
            return None
        masked = False
    manner = _manner(layers[0], arguments, tokens, head)
    compiled = config.compile_layers or layers[0]._compiled_call_impl is not None
    return None if is_tree and compiled else WholeStep(manner, rows, sequence, tokens.device, masked, compiled)


def _may_need_mask(decoder: Any, arguments: dict[str, Any], sequence: int) -> bool:
    """Return whether the stock model may make a mask of (T x T), by what is known without the device."""
    given = any(arguments.get(name) is not None for name in ("attention_mask", "position_ids"))
    return given or _is_beyond_window(decoder, sequence)


def _needs_mask(decoder: Any, arguments: dict[str, Any], sequence: int) -> bool:
    """Return whether the stock model makes a mask of (T x T). This reads from the device, as the stock model does itself."""
    if _is_beyond_window(decoder, sequence):
        return True
    mask_BT = arguments.get("attention_mask")
    return not bool((arguments["position_ids"].diff(dim=-1) == 1).all() if mask_BT is None else mask_BT.all())


def _is_beyond_window(decoder: Any, sequence: int) -> bool:
    window = sliding_window(decoder.config)
    return window is not None and window < sequence


def _manner(layer: nn.Module, arguments: dict[str, Any], tokens: Tensor, head: HeadFacts | None) -> Hashable:
    """Return what steps have in common that take the same memory, but for their tokens."""
    parameters, kind = parameters_of(layer), tokens.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [(parameter.grad is None, bool(parameter._post_accumulate_grad_hooks)) for parameter in trained[:1]]
    flags = frozenset(name for name, value in arguments.items() if value is True)
    shapes = tuple(parameter.shape for parameter in trained)
    return type(layer), parameters[0].dtype, shapes, *gradients, autocast, layer.training, flags, head is None


@contextmanager
def plain_layers(
    decoder: Any,
    forward: Callable[..., Any],
    layers: list[nn.Module],
    step: WholeStep,
    config: StreamConfig,
    compiler: LayerCompiler,
    attention: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """Let the decoder's `forward` run as it is within the block, with fused or compiled parts, and nothing checkpointed.

    `attention()` returns the context in which its layers attend.
    """
    # Not where ZeRO-3 has the parameters elsewhere: a graph would hold them.
    may_compile = compiler.wanted and not any(map(is_partitioned, parameters_of(layers[0])))
    compiled = [layer for layer in layers if compiler.compiles(layer)] if may_compile else []
    with ExitStack() as restore:
        if not decoder.training:
            restore.enter_context(never_packed(modules_of(decoder)))
        if any(layer.__dict__.get("gradient_checkpointing") for layer in layers):
            restore.enter_context(not_checkpointed(modules_of(decoder)))
        if config.fused_kernels == "on" or (config.fused_kernels == "auto" and step.device.type == "cuda"):
            by_compiler = [*compiled, *(layer for layer in layers if layer._compiled_call_impl is not None)]
            modules = modules_of(decoder, but_for=by_compiler)
            restore.enter_context(Fusion(modules, mode=config.fused_kernels).installed())
        restore.enter_context(attention())
        if compiled:
            may_group = compiler.may_group and len(compiled) == len(layers) and step.tokens <= _GROUPED_TOKENS
            groups = groups_of(decoder, forward, layers) if may_group else [[layer] for layer in compiled]
            restore.enter_context(compiler.installed(groups))
        yield
