"""Recognises functions by their instructions: a copy in a model's own file counts as what it was copied from."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import Any

import torch
from torch import nn


def same_code(function: Any, reference: Any) -> bool:
    """Return whether two functions have the same instructions, names, constants and defaults, and the first has no closure."""
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__closure__", None):
        return False
    defaults = [(each.__defaults__, each.__kwdefaults__) for each in (function, reference)]
    return _instructions(code) == _instructions(reference.__code__) and defaults[0] == defaults[1]


@functools.lru_cache(maxsize=512)
def _instructions(code: types.CodeType) -> list[tuple[str, Any]]:
    """Return a code's instructions with the values that they name: a docstring moves the places of constants."""
    return [(each.opname, each.argval) for each in dis.get_instructions(code)]


def eager_attention_of(module: nn.Module) -> list[Any]:
    """Return the functions that a module's forward, or what it decorates or inherits, may call for eager attention.

    They are what is called `eager_attention_forward` there, and global functions that take queries, keys, values and a mask.
    """
    inherited = [kind.__dict__.get("forward") for kind in type(module).__mro__ if kind is not nn.Module]
    found, to_see, seen = [], [module.__dict__.get("forward"), *inherited], set[int]()
    for each in to_see:  # which grows on the way
        function = getattr(getattr(each, "func", each), "__func__", getattr(each, "func", each))
        if id(function) in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(id(function))
        around = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        to_see += [getattr(function, "__wrapped__", None), *around]
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        found += [function.__globals__.get("eager_attention_forward"), *filter(_is_attention, named)]
    return found


def reads_argument(function: Any, name: str) -> bool:
    """Return whether a function has an argument of this name, or looks it up, and does not just let it pass.

    What is passed as `s_aux` gpt-oss's own function reads off the module.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return name in named or name in code.co_consts or (name == "s_aux" and "sinks" in code.co_names)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_attention(value: Any) -> bool:
    code = getattr(inspect.unwrap(value), "__code__", None) if isinstance(value, types.FunctionType) else None
    if code is None:
        return False
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "attention_mask" in names and all(any(name.startswith(letter) for name in names) for letter in "qkv")


def is_known_eager_attention(function: Any) -> bool:
    """Return whether it is a copy of an `eager_attention_forward` of transformers that computes what streamed attention does."""
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.llama import modeling_llama

    originals = modeling_llama.eager_attention_forward, modeling_gemma2.eager_attention_forward, modeling_llama.repeat_kv
    if not all(str(original.__module__).startswith("transformers.") for original in originals):
        return False  # somebody has replaced them
    *eager, repeat = originals
    repeats = getattr(function, "__globals__", {}).get("repeat_kv")
    return any(same_code(function, known) for known in (*eager, _sliced_eager_attention)) and same_code(repeats, repeat)


def _sliced_eager_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any, dropout: Any = 0.0, **kwargs: Any
) -> Any:
    """Stand for that of releases before 5, of which there are many copies; it is only compared with, never called."""
    key_states = repeat_kv(key, module.num_key_value_groups)  # type: ignore[name-defined]  # noqa: F821
    value_states = repeat_kv(value, module.num_key_value_groups)  # type: ignore[name-defined]  # noqa: F821

    attn_weights = torch.matmul(query, key_states.transpose(2, 3)) * scaling
    if attention_mask is not None:
        causal_mask = attention_mask[:, :, :, : key_states.shape[-2]]
        attn_weights = attn_weights + causal_mask

    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()

    return attn_output, attn_weights
