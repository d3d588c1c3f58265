"""The shapes of well-known families by formulas: what `hf.dry_run` would measure, without torch or transformers.

A layer's parameters, FLOPs and bytes are sums of products of its sizes, or the largest of such sums. docs/generate_families.py
fits them to dry runs of random sizes and writes families.json; tests hold them to dry runs of other sizes. A configuration is
understood where every key of it is a size, is known to have no part in bytes and FLOPs, or says what the family's default does;
what is not understood is left to be measured. Bytes that do not grow with the tokens have no part: where they decide which of two
moments is the larger one, as in Gemma layers of toy sizes, a formula is some bytes a token off.

Sizes: E model width, F of the MLP, H query heads, G key/value heads, D head size, Q = H D, K = G D, V vocabulary, N layers; of
experts M width, X how many, A active for a token; R rank of adapters.
"""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

from streamgrad.hf.presets import packaged
from streamgrad.memory.costs import LayerCosts
from streamgrad.memory.model_shape import LayerProfile, ModelShape

SIZES = {
    "hidden_size": "E", "intermediate_size": "F", "num_attention_heads": "H", "num_key_value_heads": "G", "head_dim": "D",
    "vocab_size": "V", "num_hidden_layers": "N", "moe_intermediate_size": "M", "num_local_experts": "X",
    "num_experts_per_tok": "A",
}  # fmt: skip
# No model has as many; what torch can count has a bound too.
_LARGEST, _MOST_LAYERS = 1 << 24, 10_000
# Which layers have a window.
_WINDOWS = ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern")
# Of a configuration, what has no part in bytes and FLOPs, and the values of it that any model can be made with.
_ANY = {
    "_name_or_path": lambda value: isinstance(value, str),
    "architectures": lambda value: isinstance(value, list | NoneType),
    "transformers_version": lambda value: isinstance(value, str),
    "dtype": lambda value: value in (None, "bfloat16", "float16", "float32"),
    "cache_implementation": lambda value: isinstance(value, str),
    "bos_token_id": lambda value: value is None or type(value) is int,
    "eos_token_id": lambda value: (
        value is None or all(type(each) is int for each in (value if isinstance(value, list) else [value]))
    ),
    **dict.fromkeys(
        ("use_cache", "unsloth_fixed", "is_llama_config", "_attn_implementation_autoset"), lambda value: isinstance(value, bool)
    ),
    **dict.fromkeys(("use_mrope", "rope_interleaved"), lambda value: value is False),
    **dict.fromkeys(("initializer_range", "rms_norm_eps"), lambda value: type(value) is float and 0 < value <= 1),
    **dict.fromkeys(
        ("rope_theta", "rope_local_base_freq", "query_pre_attn_scalar", "router_aux_loss_coef"), lambda value: _is_positive(value)
    ),
    **dict.fromkeys(("max_position_embeddings", "max_window_layers"), lambda value: _is_count(value)),
}
WITHOUT_A_PART = (*_ANY, "pad_token_id", "rope_parameters", "id2label", "label2id")
# Kinds of rotary angles that are as many as the usual ones, and what is said of each.
_ANGLES = {
    "default": {"rope_theta"},
    "linear": {"rope_theta", "factor"},
    "yarn": {"rope_theta", "factor", "original_max_position_embeddings"},
    "llama3": {"rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
# The names that transformers writes, by others that it reads.
_OTHER_NAMES = {"num_experts": "num_local_experts", "torch_dtype": "dtype"}


def known_shape(configuration: Any, *, dtype: str, lora_rank: int | None) -> ModelShape | None:
    """Of a config.json, as it was read; None where there is any doubt."""
    if not isinstance(configuration, dict) or dtype not in ("bfloat16", "float16"):
        return None
    said = {str(_OTHER_NAMES.get(key, key)): value for key, value in configuration.items()}
    family = packaged("families.json").get(str(said.get("model_type")))
    if family is None or len(said) < len(configuration):  # two names of one thing are one too many
        return None
    if any(said.get(key) is not value for key, value in family["stated"].items()):
        return None
    if said.get("rope_scaling") is not None and said.get("rope_parameters") is not None:
        return None
    sizes = _sizes(said, family)
    windows = sizes and _windows(said, family["defaults"], sizes["N"])
    if not sizes or not windows or not all(_has_no_part(key, value, family, sizes) for key, value in said.items()):
        return None
    if "X" in sizes and dtype != "bfloat16":  # in which alone torch makes the products of all experts at once
        return None
    tied = said.get("tie_word_embeddings", family["defaults"]["tie_word_embeddings"])
    formulas = family.get("full" if lora_rank is None else "lora")
    return formulas and _shape(formulas, sizes | {"R": lora_rank or 0}, windows, tied=tied, frozen=lora_rank is not None)


def value_of(sums: list[dict[str, int]], sizes: dict[str, int]) -> int:
    """The largest of some sums of products, each of them a factor by the product's name: {"E*F": 3, "1": 8} is 3 E F + 8."""
    return max(
        sum(factor * math.prod(sizes[name] for name in product.split("*") if name != "1") for product, factor in terms.items())
        for terms in sums
    )


def _shape(
    formulas: dict[str, Any], sizes: dict[str, int], windows: tuple[int | None, int], *, tied: bool, frozen: bool
) -> ModelShape:
    """In 16 bits."""
    trainable = value_of(formulas["trainable"], sizes)
    head = sizes["V"] * sizes["E"]
    outside = (1 if tied else 2) * head + sizes["E"]  # the embeddings, the head and the norm before it

    def profile(name: str) -> LayerProfile:
        found = {quantity: float(value_of(sums, sizes)) for quantity, sums in formulas[name].items()}
        costs = LayerCosts(
            input=2.0 * sizes["E"],
            keys_and_values=4.0 * sizes["K"],
            key_sums=8.0 * sizes["K"],
            attention=2.0 * sizes["Q"] + 4.0 * sizes["H"],
            graph=found.pop("graph"),
            widest=found.pop("widest"),
            at_attention=found.pop("at_attention"),
            gradients=2 * trainable,
            gradient_sums=4 * trainable,
            largest_gradient=2 * value_of(formulas["largest"], sizes),
        )
        return LayerProfile(costs=costs, query_heads=sizes["H"], head_size=sizes["D"], **found)

    return ModelShape(
        layers=sizes["N"],
        full_attention_layers=windows[1],
        window=windows[0],
        width=sizes["E"],
        vocabulary=sizes["V"],
        itemsize=2,
        layer_parameters=value_of(formulas["parameters"], sizes),
        layer_trainable=trainable,
        outside_parameters=outside,
        outside_trainable=0 if frozen else outside,
        head_parameters=head,
        head_trainable=0 if frozen else head,
        tied=tied,
        profile=profile("profile"),
        eager=profile("eager"),
    )


def _sizes(said: dict[str, Any], family: dict[str, Any]) -> dict[str, int] | None:
    """By their letters, if all are said and fit together."""
    sizes = {letter: said[key] for key, letter in SIZES.items() if key in said and key in family["sizes"]}
    if not all(map(_is_count, sizes.values())) or not {SIZES[key] for key in family["sizes"]} - {"D"} <= sizes.keys():
        return None
    # Where heads do not share the width, families differ in what they take; a single head needs fewer copies.
    if sizes["E"] % sizes["H"] or sizes["H"] % sizes["G"] or sizes["H"] == 1 or sizes["N"] > _MOST_LAYERS:
        return None
    sizes.setdefault("D", family["head_size"] or sizes["E"] // sizes["H"])
    if sizes["D"] % 2:
        return None
    # One expert a token takes another way, as do sizes that kernels for many products at once cannot take.
    if "X" in sizes and not (2 <= sizes["A"] <= sizes["X"] and sizes["E"] % 8 == sizes["M"] % 8 == 0):
        return None
    return sizes | {"Q": sizes["H"] * sizes["D"], "K": sizes["G"] * sizes["D"]}


def _windows(said: dict[str, Any], defaults: dict[str, Any], layers: int) -> tuple[int | None, int] | None:
    """The window, and the number of layers without one."""
    if "sliding_window" not in defaults:
        return None, layers
    window = said.get("sliding_window", defaults["sliding_window"])
    if window is not None and not _is_count(window):
        return None
    kinds = said.get("layer_types", ["full_attention"] * layers)
    if "use_sliding_window" in defaults:  # and it is not used, or the configuration would not be understood
        return (None, layers) if kinds == ["full_attention"] * layers else None
    if "layer_types" not in defaults:
        return window, 0 if window else layers
    pattern = said.get("sliding_window_pattern", defaults["_sliding_window_pattern"])
    if window is None or not _is_count(pattern) or said.get("_sliding_window_pattern", pattern) != pattern:
        return None
    if "layer_types" not in said:
        kinds = ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        return None
    full, sliding = (kinds.count(kind) for kind in ("full_attention", "sliding_attention"))
    # A set of rotary angles for each kind, of which there are two.
    return (window, full) if full and sliding and full + sliding == layers else None


def _has_no_part(key: str, value: Any, family: dict[str, Any], sizes: dict[str, int]) -> bool:
    """Or one that `_sizes` and `_windows` have looked at."""
    defaults = family["defaults"]
    if key in ("model_type", *family["sizes"], *family["stated"]) or (key in _WINDOWS and {key, f"_{key}"} & defaults.keys()):
        return True
    if key == "tie_word_embeddings":
        return isinstance(value, bool)
    if key in ("rope_scaling", "rope_parameters"):
        by_kind = "_sliding_window_pattern" in defaults and key == "rope_parameters"
        return value is None or (_are_known_angles_by_kind(value) if by_kind else _are_known_angles(value))
    if key == "pad_token_id":
        return value is None or (type(value) is int and 0 <= value < sizes["V"])
    if key in defaults:
        return type(value) is type(defaults[key]) and value == defaults[key]
    return key in _ANY and _ANY[key](value)


def _are_known_angles_by_kind(said: Any) -> bool:
    both = isinstance(said, dict) and said.keys() == {"full_attention", "sliding_attention"}
    return both and all(map(_are_known_angles, said.values()))


def _are_known_angles(said: Any) -> bool:
    if not isinstance(said, dict):
        return False
    named = [said[key] for key in ("rope_type", "type") if key in said]  # as it is called now, and was
    known = next((names for kind, names in _ANGLES.items() if named and all(name == kind for name in named)), None)
    numbers = {key: value for key, value in said.items() if key not in ("rope_type", "type")}
    return known is not None and known - {"rope_theta"} <= numbers.keys() <= known and all(map(_is_positive, numbers.values()))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 2**53


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= _LARGEST
