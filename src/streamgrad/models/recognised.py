"""Which preset a configuration is that of, by its file alone: published models come as directories, and need not be measured.

A configuration is taken for a preset's where transformers would make a model of the same bytes and FLOPs of it. What is not known
to have no part in these must be the same, to the type; whatever is not understood is no preset's.
"""

from __future__ import annotations

from types import NoneType
from typing import Any

from streamgrad.models.names import packaged

# Of a configuration, what has no part in bytes and FLOPs, and the values of it that any model can be made with.
_ANY = {
    "_name_or_path": lambda value: isinstance(value, str),
    "architectures": lambda value: isinstance(value, list | NoneType),
    "transformers_version": lambda value: isinstance(value, str),
    "dtype": lambda value: value in (None, "bfloat16", "float16", "float32"),
    "use_cache": lambda value: isinstance(value, bool),
    "norm_topk_prob": lambda value: isinstance(value, bool),
    **dict.fromkeys(("bos_token_id", "eos_token_id"), lambda value: value is None or type(value) is int),
    **dict.fromkeys(("initializer_range", "rms_norm_eps", "rope_theta"), lambda value: _is_positive(value)),
    **dict.fromkeys(("max_position_embeddings", "max_window_layers"), lambda value: type(value) is int and value > 0),
}
WITHOUT_A_PART = (*_ANY, "pad_token_id", "id2label", "label2id")
# Kinds of rotary angles that are as many as the usual ones, and what is said of each.
_ANGLES = {
    "default": {"rope_theta"},
    "llama3": {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
# The names that transformers writes, by others that it reads.
_OTHER_NAMES = {"num_experts": "num_local_experts", "torch_dtype": "dtype"}


def preset_that_says(configuration: Any) -> str | None:
    """The preset that it is the configuration of; None where there is any doubt."""
    if not isinstance(configuration, dict):
        return None
    said = {str(_OTHER_NAMES.get(key, key)): value for key, value in configuration.items()}
    # Two names of one thing are one too many, and with a window it matters in which layers.
    if len(said) < len(configuration) or said.get("use_sliding_window", False) is not False:
        return None
    for name, shipped in packaged("shapes.json").items():
        complete = shipped["configuration"]
        if said.keys() >= set(shipped["stated"]) and all(_same(key, value, complete) for key, value in said.items()):
            return name
    return None


def _same(key: str, value: Any, complete: dict[str, Any]) -> bool:
    if key in complete and type(value) is type(complete[key]) and value == complete[key]:
        return True
    if key in ("rope_scaling", "rope_parameters"):
        return value is None or (isinstance(value, dict) and _are_known_angles(value))
    if key == "pad_token_id":
        return value is None or (type(value) is int and 0 <= value < complete["vocab_size"])
    return key in _ANY and _ANY[key](value)


def _are_known_angles(said: dict[str, Any]) -> bool:
    known = next((names for kind, names in _ANGLES.items() if kind == said.get("rope_type")), None)
    numbers = {key: value for key, value in said.items() if key != "rope_type"}
    return known is not None and known - {"rope_theta"} <= numbers.keys() <= known and all(map(_is_positive, numbers.values()))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
