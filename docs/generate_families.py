"""Write src/streamgrad/models/families.json, the formulas of `hf.families`: `python docs/generate_families.py [FAMILY ...]`.

A layer's code does the same whatever its sizes are. So a run of it is a fixed list of moments, and the bytes alive at a moment
are always the same sum of products of the sizes; runs of a few random sizes tell its factors, which are whole numbers. The
largest moment is then the largest of these sums, of which those are kept that are not below another one everywhere.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import AutoConfig

from streamgrad.hf import families
from streamgrad.hf.configs import with_layers
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.dry_run import meta_model, model_shape
from streamgrad.hf.families import SIZES, WITHOUT_A_PART
from streamgrad.hf.presets import packaged
from streamgrad.memory import measure as probe
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.memory.model_shape import ModelShape

FILE = Path(families.__file__).parent / "families.json"
DENSE = tuple(key for key, letter in SIZES.items() if letter not in "MXA")
FAMILIES = {
    "llama": DENSE, "mistral": DENSE, "qwen2": DENSE, "qwen3": DENSE, "gemma3_text": DENSE, "qwen3_moe": tuple(SIZES),
}  # fmt: skip
# Of which published models say something else than transformers takes by default; formulas are of models that say it.
STATED = {"qwen3_moe": {"norm_topk_prob": True}}
# Products that a token's bytes, and that parameters and FLOPs are made of; those with a rank, or of experts, where there are any.
BYTES = ("1", "E", "F", "Q", "K", "D", "H", "G", "R", "A", "A*E", "A*M", "X")
PRODUCTS = (
    "E", "Q", "K", "F", "D", "E*Q", "E*K", "E*F", "R*E", "R*Q", "R*K", "R*F", "E*X", "X*E*M", "A*E*M",
)  # fmt: skip

Sums = list[dict[str, int]]


@dataclass
class Run:
    """One dry run: sizes, what was measured, the live bytes at each moment of a trial (as `memory.measure` counts them, a token), and
    the sizes of the layer's trainable parameters."""

    sizes: dict[str, int]
    shape: ModelShape
    moments: dict[str, list[float]]
    trainable: list[int]


class _Watched(LiveBytes):
    """Notes the live bytes whenever something is made."""

    made: ClassVar[list[list[int]]] = []

    def __enter__(self) -> _Watched:
        self.made.append([])
        return super().__enter__()

    def _born(self, key: int, size: int) -> None:
        super()._born(key, size)
        self.made[-1].append(self.live_bytes)


def random_sizes(chance: random.Random, keys: tuple[str, ...]) -> dict[str, int]:
    """Heads share keys by groups, and there are several of each: other layouts make fewer copies, never more."""
    sizes = {
        "G": chance.randint(2, 6),
        "D": 2 * chance.randint(8, 80),
        "F": chance.randint(100, 4000),
        "V": chance.randint(50, 500),
    }
    sizes["H"] = sizes["G"] * chance.randint(2, 6)
    sizes |= {"E": 8 * sizes["H"] * chance.randint(2, 40), "N": 7}
    if "num_local_experts" in keys:
        sizes |= {"X": chance.randint(6, 20), "A": chance.randint(2, 5), "M": 8 * chance.randint(8, 100)}
    return sizes


def config_of(family: str, sizes: dict[str, int]) -> Any:
    said = {key: sizes[letter] for key, letter in SIZES.items() if letter in sizes}
    said |= STATED.get(family, {})
    return AutoConfig.for_model(family, **said, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def dry_run(family: str, sizes: dict[str, int], rank: int | None) -> Run:
    _Watched.made.clear()
    stock, probe.LiveBytes = probe.LiveBytes, _Watched
    try:
        shape = model_shape(config_of(family, sizes), lora_rank=rank)
    finally:
        probe.LiveBytes = stock
    moments = {}
    for name, (whole, half) in zip(("profile", "eager"), (_Watched.made[:2], _Watched.made[2:]), strict=True):
        tokens = probe.PROBED_TOKENS // 2
        moments[name] = [(one - other) / tokens for one, other in zip(whole, half, strict=True)]
    layer = decoder_layers(
        meta_model(with_layers(config_of(family, sizes), 1), dtype=torch.bfloat16, lora_rank=rank).get_decoder()
    )[0]
    trainable = [parameter.numel() for parameter in layer.parameters() if parameter.requires_grad]
    sizes = sizes | {"Q": sizes["H"] * sizes["D"], "K": sizes["G"] * sizes["D"], "R": rank or 0}
    return Run(sizes, shape, moments, trainable)


def fitted(runs: list[Run], values: list[float], products: tuple[str, ...]) -> dict[str, int]:
    """The sum of products that all runs' values are, exactly."""
    known = [product for product in products if set(product.split("*")) <= {"1", *runs[0].sizes}]
    known = [product for product in known if "R" not in product or runs[0].sizes["R"]]
    matrix = [[math.prod(run.sizes.get(name, 1) for name in product.split("*")) for product in known] for run in runs]
    scale = np.max(matrix, axis=0)
    factors = np.linalg.lstsq(np.array(matrix, float) / scale, np.array(values, float), rcond=None)[0] / scale
    whole = [round(factor) for factor in factors]
    assert [sum(f * x for f, x in zip(whole, row, strict=True)) for row in matrix] == list(values), "no sum of these products"
    return {product: factor for product, factor in zip(known, whole, strict=True) if factor}


def largest(sums: Sums) -> Sums:
    """Those that are not below another one everywhere, each once."""
    unique = [dict(items) for items in sorted({tuple(sorted(terms.items())) for terms in sums})]

    def is_below(terms: dict[str, int], other: dict[str, int]) -> bool:
        return other != terms and all(other.get(name, 0) >= terms.get(name, 0) for name in {*terms, *other})

    return [terms for terms in unique if not any(is_below(terms, other) for other in unique)]


def formulas(family: str, *, lora: bool) -> dict[str, Any]:
    chance = random.Random(f"{family} {lora}")
    keys = FAMILIES[family]
    runs = [
        dry_run(family, random_sizes(chance, keys), chance.randint(2, 64) if lora else None) for _ in range(len(PRODUCTS) + 3)
    ]
    trainable = zip(*(run.trainable for run in runs), strict=True)
    return {
        "parameters": [fitted(runs, [run.shape.layer_parameters for run in runs], PRODUCTS)],
        "trainable": [fitted(runs, [run.shape.layer_trainable for run in runs], PRODUCTS)],
        "largest": largest([fitted(runs, list(values), PRODUCTS) for values in trainable]),
        **{name: formulas_of_profile(runs, name) for name in ("profile", "eager")},
    }


def formulas_of_profile(runs: list[Run], name: str) -> dict[str, Sums]:
    profiles = [getattr(run.shape, name) for run in runs]
    moments = [fitted(runs, list(values), BYTES) for values in zip(*(run.moments[name] for run in runs), strict=True)]
    costs = ("graph", "at_attention")
    flops = ("forward_flops", "backward_flops", "projection_flops")
    return {
        **{cost: [fitted(runs, [getattr(profile.costs, cost) for profile in profiles], BYTES)] for cost in costs},
        # Counted beside keys and values.
        "widest": largest([{**terms, "K": terms.get("K", 0) - 4} for terms in moments]),
        **{kind: [fitted(runs, [getattr(profile, kind) for profile in profiles], PRODUCTS)] for kind in flops},
        "positions": [fitted(runs, [profile.positions for profile in profiles], BYTES)],
    }


def family_entry(family: str) -> dict[str, Any]:
    keys = FAMILIES[family]
    # As it would stand in a file.
    defaults = json.loads(AutoConfig.for_model(family).to_json_string(use_diff=False))
    without = AutoConfig.for_model(family, hidden_size=96, num_attention_heads=8, num_key_value_heads=4, num_hidden_layers=2)
    size = getattr(without, "head_dim", None)
    known = {*WITHOUT_A_PART, *SIZES, *STATED.get(family, {}), "model_type"}
    return {
        "sizes": keys,
        "head_size": None if size in (None, 12) else size,
        "stated": STATED.get(family, {}),
        "defaults": {key: value for key, value in defaults.items() if key not in known},
        "full": formulas(family, lora=False),
        # Adapters of experts are multiplied with the experts' weights, which is as much whatever the number of tokens.
        **({} if "num_local_experts" in keys else {"lora": formulas(family, lora=True)}),
    }


def as_text(entries: dict[str, Any]) -> str:
    """One line for each quantity: there are many numbers, and changes of them are to be seen."""
    lines = []
    for family, entry in entries.items():
        parts = []
        for name, value in entry.items():
            if name in ("full", "lora"):
                inner = [f'   "{quantity}": {json.dumps(sums)}' for quantity, sums in value.items()]
                parts.append(f'  "{name}": {{\n' + ",\n".join(inner) + "\n  }")
            else:
                parts.append(f'  "{name}": {json.dumps(value)}')
        lines.append(f' "{family}": {{\n' + ",\n".join(parts) + "\n }")
    note = "written by docs/generate_families.py: what models.families knows"
    return "{\n" + ",\n".join([f' "note": "{note}"', *lines]) + "\n}\n"


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(FAMILIES)
    entries = packaged("families.json") if FILE.exists() else {}
    entries |= {family: family_entry(family) for family in wanted}
    FILE.write_text(as_text({family: entries[family] for family in FAMILIES if family in entries}))
