"""Asks PEFT's modules what streaming has to know of them: what a program may switch, and what looks at a whole sequence.

PEFT itself is not imported, so that models without adapters do not need it. Its classes are known by their names.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from streamgrad.engine.checks.guards import AdapterFacts
from streamgrad.versions import check_version

# What decides which parameters an adapter uses, and how. A new adapter changes no value, so that only these tell.
_SWITCHES = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def base_model(wrapper: Any) -> Any:
    """Return the model inside a `peft.PeftModel`; None where it is not one."""
    if not hasattr(wrapper, "get_base_model"):
        return None
    check_version("peft")
    return wrapper.get_base_model()


def adds_tokens(wrapper: Any) -> bool:
    """Return whether it is a `peft.PeftModel` that puts tokens of its own before a row: prompt or prefix tuning."""
    return bool(getattr(getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False))


def may_be_adapter(module: nn.Module) -> bool:
    """Return whether `why_not_in_chunks` may have something to say of the module."""
    own = module.__dict__
    return "forward" in own or "lora_variant" in own or _is_called("LilyLayer", type(module))  # type: ignore[arg-type]


def why_not_in_chunks(module: nn.Module) -> str | None:
    """Return what makes an adapter depend on the whole sequence; None where a chunk is all that it needs."""
    if _is_called("LilyLayer", type(module)):  # type: ignore[arg-type]
        return "is a Lily adapter, whose router averages over all tokens"
    wrapper = getattr(module.__dict__.get("forward"), "__self__", None)
    if wrapper is not None and _is_called("XLoraLayer", type(wrapper)):  # type: ignore[arg-type]
        return "is an X-LoRA adapter, whose scales are made for the whole sequence by a trainable module outside of the layer"
    variants = module.__dict__.get("lora_variant")
    if isinstance(variants, dict) and any("ALora" in getattr(v, "__name__", str(v)) for v in variants.values()):
        return "is an activated LoRA (aLoRA), whose offsets count from the end of the whole sequence"
    return None


def _switches(modules: Sequence[nn.Module]) -> list[Any]:
    """Return copies of the modules' switches, and the hooks by which PEFT chooses adapters by row.

    Hooks of other modules may come and go if they only look on.
    """
    found: list[Any] = []
    for module in modules:
        own = module.__dict__
        if not own.keys().isdisjoint(_SWITCHES):  # few modules have any, and all are looked at twice a step
            found += [(name, _copied(own[name])) for name in _SWITCHES if name in own]
            if "_active_adapter" in own:
                found.append((tuple(own["_forward_pre_hooks"]), tuple(own["_forward_hooks"])))
    return found


def _copied(value: Any) -> Any:
    """Copy a switch, which may be changed in place. One name equals a list of one: PEFT makes the one of the other."""
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if isinstance(each, int | float)}
    if isinstance(value, list | str):
        return (value,) if isinstance(value, str) else tuple(value)
    return value if isinstance(value, int | float) else None


def _restored_parameters(modules: Sequence[Any]) -> list[Tensor]:
    """Return the parameters that adapters of experts set and restore in forward."""
    return [module.get_param() for module in modules if _is_called("ParamWrapper", type(module))]  # type: ignore[arg-type]


@functools.lru_cache(maxsize=2048)
def _is_called(name: str, kind: type) -> bool:
    """Return whether a class, or one that it is derived from, has the name."""
    return any(base.__name__ == name for base in kind.__mro__)


PEFT_ADAPTERS = AdapterFacts(state=_switches, versionless=_restored_parameters)
