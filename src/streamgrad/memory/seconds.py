"""How long a step takes: FLOPs over rates or, where chunks are small, the time that a program takes to launch their kernels.

Elementwise kernels, copies of activations to and from the host (which hide behind computation at long sequences) and an
optimizer's step are not counted, so a real step is longer. What ranks send is counted in `memory.traffic`. In benchmarks/results,
after warming up and with chunks of 4,096 tokens and more, steps of full training are longer by 5 to 18 per cent from 36,000
tokens on and by 29 to 44 at 6,000. Steps with LoRA are longer by 30 per cent at 32,000 tokens and by 38 to 71 at 8,000.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from streamgrad.engine.policy import LayerPolicy
from streamgrad.memory.costs import LayerProfile, ModelShape, chunks_in_forward
from streamgrad.memory.phases import Workload

# Seconds to launch the kernels of one layer, the least that was seen (docs/performance.md): forward for chunks that run together,
# the re-run of a chunk and its backward, and both for a layer that keeps everything, which has one chunk and does not run it
# again.
_FORWARD_LAUNCHES, _BACKWARD_LAUNCHES, _KEPT_LAUNCHES = 1.5e-3, 3.9e-3, 4.0e-3


@dataclass(frozen=True)
class Rates:
    """FLOPs a second, as measured on one H200 in bfloat16 (head size 128, 16 to 32 thousand keys)."""

    gemm: float = 787e12
    attention_forward: float = 600e12
    attention_backward: float = 520e12

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if not 0 < rate < math.inf:
                raise ValueError(f"{name}={rate / 1e12:g} TFLOP/s: time is FLOPs over this rate. Pass a finite one above 0.")


@dataclass(frozen=True)
class Links:
    """Bytes a second that one GPU sends, and as many that it gets: within its machine, to other machines, and with its host.

    The first two are published peaks: NVLink of an H100, and 400 Gbit/s for each GPU. The last was measured on an H200.
    """

    inside: float = 450e9
    across: float = 50e9
    host: float = 55e9


@dataclass(frozen=True)
class Seconds:
    """Seconds of a step by part."""

    attention: float
    layers: float  # all other matrix products of the layers
    head: float
    reference: float = 0.0  # a frozen model's pass over the same tokens
    launches: float = 0.0  # of the layers' kernels, while others run
    exchanges: float = 0.0  # of tokens for heads, between ranks that share a sequence; the device waits for them
    ring: float = 0.0  # of keys, values and their gradients, between ranks with the same heads
    beside: float = 0.0  # copies of weights and gradients, between ranks or to and from the host, while the device computes

    @property
    def total(self) -> float:
        busy = self.attention + self.layers + self.head + self.reference + self.exchanges + self.ring
        return max(busy, self.launches, self.beside)


def streamed_seconds(
    load: Workload,
    policies: Sequence[LayerPolicy],
    chunk_sizes: Sequence[int],
    rates: Rates,
    *,
    head_products: int,
    reference: bool,
) -> Seconds:
    """Return the time of a streamed step: layers run forward again unless all is kept, attention only where it is not kept."""
    profile, again, attention_again, launches = load.shape.profile, 0.0, 0, 0.0
    for (keep, size), count in Counter((policy.keep, size) for policy, size in zip(policies, chunk_sizes, strict=True)).items():
        launches += count * _launches(load, LayerPolicy(keep), size)
        if keep != "all":
            # Keys of all chunks but the last come first, where they are not kept.
            before_last = (load.sequence - 1) // size * size / load.sequence if keep == "input" else 0.0
            again += count * (profile.forward_flops + before_last * profile.projection_flops)
        attention_again += count if keep == "input" else 0
    # Layers whose output is the input of one that keeps none run forward once more.
    rerun = sum(policy.recomputed for policy in policies)
    again, attention_again = again + rerun * profile.forward_flops, attention_again + rerun
    seconds = _seconds(load, profile, again, attention_again / load.shape.layers, rates, head_products, reference)
    return replace(seconds, launches=launches)


def _launches(load: Workload, policy: LayerPolicy, chunk_size: int) -> float:
    """Return the time that a program takes to launch the kernels of one layer."""
    if policy.keep == "all":
        return _KEPT_LAUNCHES
    chunks = math.ceil(load.sequence / chunk_size)
    together = chunks_in_forward(load.shape.profile.costs, load.batch, policy, chunk_size) if load.joins_chunks else 1
    stretches = 1 + math.ceil((chunks - 1) / together)  # the first chunk runs alone
    return _FORWARD_LAUNCHES * stretches + _BACKWARD_LAUNCHES * chunks


def checkpointing_seconds(load: Workload, rates: Rates, *, head_products: int, reference: bool) -> Seconds:
    """Return the time of a step with gradient checkpointing: everything in the layers runs forward twice."""
    again = load.shape.layers * load.shape.eager.forward_flops
    return _seconds(load, load.shape.eager, again, 1.0, rates, head_products, reference)


def _seconds(
    load: Workload, profile: LayerProfile, again: float, attention_again: float, rates: Rates, head_products: int, reference: bool
) -> Seconds:
    shape, tokens = load.shape, load.tokens
    once = shape.layers * profile.forward_flops
    flops = tokens * (once + again + shape.layers * profile.backward_flops)
    # Two products forward and five backward for each pair of a query and a key that it sees, in every head.
    pair = 2 * profile.query_heads * profile.head_size * load.sum_over_rows(partial(_pairs, shape))
    forward_s, backward_s = 2 * pair / rates.attention_forward, 5 * pair / rates.attention_backward
    product_s = 2 * load.targets * shape.head_parameters / rates.gemm
    reference_s = tokens * once / rates.gemm + forward_s + product_s if reference else 0.0
    attention_s = (1.0 + attention_again) * forward_s + backward_s
    return Seconds(attention_s, flops / rates.gemm, head_products * product_s, reference_s)


def _pairs(shape: ModelShape, length: int) -> float:
    """Return the number of pairs of a query and a key that it sees, in one sequence, summed over the layers."""
    window = min(shape.window or length, length)
    windowed = window * length - window * window / 2
    return shape.full_attention_layers * length * length / 2 + (shape.layers - shape.full_attention_layers) * windowed
