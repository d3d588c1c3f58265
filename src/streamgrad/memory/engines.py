"""What training keeps on one rank under each engine, by formula: everything but activations.

With P parameters of which T train, N ranks, and U parameters in the largest unit that is gathered at once (a decoder layer, the
head or the embeddings, which DeepSpeed and Accelerate's FSDP2 gather one after the other):

    engine   parameters   gradients   optimizer state   working copies
    none     P            T           T                 -
    ddp      P            T           T                 T gradients in buckets
    zero1    P            T           T / N             -
    zero2    P            T / N       T / N             U gradients on their way to their ranks
    zero3    P / N        T / N       T / N             U parameters, U gradients
    fsdp2    P / N        T / N       T / N             2 U parameters (one at work, one on its way), U gradients

each times its bytes. Streaming changes none of it: a layer's gradients leave it once, and its weights are gathered once for all
its chunks. The sum of a layer's gradients over its chunks, in fp32, is counted while the layer works (`memory.costs`).

Known limits: fragments, communication buffers (`reduce_bucket_size`, NCCL's own) and the rounding up of shards are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ENGINES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp2")


@dataclass(frozen=True)
class RankBytes:
    parameters: float
    gradients: float
    optimizer: float
    working: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.working


def rank_bytes(
    engine: str,
    *,
    parameters: int,
    trainable: int,
    unit: int,
    ranks: int,
    parameter_size: float = 2,
    gradient_size: float = 2,
    optimizer_size: int = 12,
    gathered_size: float | None = None,
    reduced_size: float | None = None,
) -> RankBytes:
    """Return the bytes on one of `ranks` ranks, for numbers of parameters as in the module's table.

    Args:
        parameters, trainable: of the whole model; with LoRA, `trainable` counts the adapters.
        unit: parameters of the largest unit that is gathered at once.
        optimizer_size: bytes per trainable parameter. 12: AdamW with fp32 moments and an fp32 copy of 16-bit weights, as
            DeepSpeed keeps it; 8: AdamW on fp32 weights; 4: AdamW in pure bf16.
        gathered_size, reduced_size: bytes of a parameter while it is gathered and of a gradient on its way, where they are other
            than those of the shards: FSDP2's mixed precision shards fp32 and gathers bf16.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine={engine!r} is not known. Pass one of {', '.join(map(repr, ENGINES))}.")
    if ranks < 1 or not 0 <= trainable <= parameters or not 0 <= unit <= parameters:
        raise ValueError(
            f"ranks={ranks}, parameters={parameters}, trainable={trainable}, unit={unit}: there is at least one rank, and a part "
            "of the parameters cannot be more than all of them."
        )
    shards_parameters = engine in ("zero3", "fsdp2")
    shards_gradients = shards_parameters or engine == "zero2"
    shards_optimizer = shards_gradients or engine == "zero1"
    gathered = {"zero3": 1, "fsdp2": 2}.get(engine, 0)
    in_flight = trainable if engine == "ddp" else min(unit, trainable) if shards_gradients else 0
    return RankBytes(
        parameters=parameters * parameter_size / (ranks if shards_parameters else 1),
        gradients=trainable * gradient_size / (ranks if shards_gradients else 1),
        optimizer=trainable * optimizer_size / (ranks if shards_optimizer else 1),
        working=gathered * unit * (gathered_size or parameter_size) + in_flight * (reduced_size or gradient_size),
    )


def longest_sequence(peak_bytes: Callable[[int], float], budget_bytes: float, *, step: int = 100, limit: int = 1 << 24) -> int:
    """Return the largest multiple of `step` tokens whose `peak_bytes(tokens)`, a growing function, fits the budget, or 0."""
    low, high = 0, limit // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if peak_bytes(middle * step) <= budget_bytes else (low, middle - 1)
    return low * step
