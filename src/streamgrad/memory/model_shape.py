"""A model as far as memory and time are concerned: about forty numbers, which `hf.dry_run` measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamgrad.memory.costs import LayerCosts


@dataclass(frozen=True)
class LayerProfile:
    """Of one layer: bytes and FLOPs a token. Attention's own FLOPs, which depend on the length, are not among them."""

    costs: LayerCosts
    forward_flops: float
    backward_flops: float
    projection_flops: float  # of the part of forward that makes queries, keys and values
    query_heads: int
    head_size: int
    positions: float  # bytes of what there is beside its input when it is called: positions, and all sets of rotary angles


@dataclass(frozen=True)
class ModelShape:
    """Numbers of parameters, adapters included."""

    layers: int
    full_attention_layers: int  # the others have a window
    window: int | None
    width: int
    vocabulary: int
    itemsize: int
    layer_parameters: int
    layer_trainable: int
    outside_parameters: int
    outside_trainable: int
    head_parameters: int
    head_trainable: int
    tied: bool
    profile: LayerProfile  # with fused parts
    eager: LayerProfile  # as transformers runs it

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> ModelShape:
        """What `dataclasses.asdict` made of one."""
        profiles = {name: row[name] | {"costs": LayerCosts(**row[name]["costs"])} for name in ("profile", "eager")}
        return cls(**row | {name: LayerProfile(**profile) for name, profile in profiles.items()})
