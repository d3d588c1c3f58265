"""Returns, as text, the assumptions behind a report's numbers that may not hold for a user."""

from __future__ import annotations

from streamgrad.hf.estimates.options import Options
from streamgrad.memory.costs import ModelShape
from streamgrad.memory.fit import FILLED, FILLED_BESIDE_HOST
from streamgrad.memory.planner import HOST_SHARE
from streamgrad.memory.traffic import smallest_ring
from streamgrad.memory.training_state import copies_to_fp32


def common_assumptions(options: Options) -> list[str]:
    """Return what all numbers depend on: the machine, dtypes, and what time is made of."""
    rates = options.machine.rates
    return [
        *options.machine.told,
        f"weights and gradients in {options.dtype}; gradients are set to None between steps",
        f"tensors fill at most {100 * FILLED:g}% of the GPU ({100 * FILLED_BESIDE_HOST:g}% where host memory is used too), with "
        f"PYTORCH_ALLOC_CONF=expandable_segments:True; {100 * HOST_SHARE:.0f}% of the host is free",
        f"time is FLOPs over rates: products {rates.gemm / 1e12:.0f}, attention forward {rates.attention_forward / 1e12:.0f} and "
        f"backward {rates.attention_backward / 1e12:.0f} TFLOP/s, or launches where chunks are small; elementwise work, copies "
        "of activations and the optimizer's step are not counted",
        *_between_ranks(options),
    ]


def assumptions(options: Options, shape: ModelShape) -> list[str]:
    """Return what the numbers of a report depend on."""
    said = [
        *common_assumptions(options),
        *_of_the_ring(options, shape),
        "checkpointing is transformers' own, with SDPA, eager norms and a loss on full logits, and has the same optimizer",
        *_of_the_optimizer(options, shape),
    ]
    if options.quantization != "none":
        said.append(
            f"the linear maps of the layers in {options.quantization}, as bitsandbytes keeps them, without double quantisation; "
            "embeddings, head, norms and stacked experts as they are; dequantising takes memory, and its time is not counted"
        )
    if options.objective == "dpo":
        reference = (
            "a second, frozen model on the same GPU, whole" if options.method == "full" else "the model without its adapters"
        )
        pairs = "a batch of pairs is one pass of twice as many sequences, of `seq_len` tokens each"
        said.append(f"{pairs}; the reference is {reference}")
    if options.objective == "grpo":
        said.append("the update alone, without a reference (TRL's beta=0); generating completions is not counted")
    return said


def _between_ranks(options: Options) -> list[str]:
    """Return how fast ranks talk, and to whom."""
    links, ranks = options.machine.links, options.ranks
    if ranks.gpus == 1:
        return []
    across = f", {links.across / 1e9:g} between machines of {ranks.node} GPUs" if ranks.gpus > ranks.node else ""
    shared = f"; the {ranks.sequence} GPUs of a sequence wait for their exchanges" if ranks.sequence > 1 else ""
    return [
        f"a GPU sends {links.inside / 1e9:g} GB/s within its machine{across} (published peaks): weights are gathered and "
        f"gradients summed while it computes{shared}; {ranks.on_a_host} GPUs share the memory of a host"
    ]


def _of_the_ring(options: Options, shape: ModelShape) -> list[str]:
    """Return who has which heads, where ranks that share a sequence are a ring too."""
    ranks, heads = options.ranks, shape.profile.query_heads
    if ranks.ring == 1:
        return []
    least = f", the smallest that works with {heads} query heads" if ranks.ring == smallest_ring(ranks.sequence, heads) else ""
    return [
        f"ring={ranks.ring}{least}: groups of {ranks.heads} GPUs trade heads, and {ranks.ring} GPUs with the same heads gather "
        "each other's keys (streamgrad.parallel.sequence_parallel); their time is counted as if no attention ran meanwhile"
    ]


def _of_the_optimizer(options: Options, shape: ModelShape) -> list[str]:
    """Return what is kept to step weights, and where."""
    said, optimizer = [], options.optimizer
    adamw = optimizer in ("adamw", "in-backward", "host")
    if adamw and copies_to_fp32(options.engine, shape.itemsize):
        said.append("AdamW's moments and a copy of the weights in fp32, as DeepSpeed keeps them")
    elif adamw and options.setup.master_size(shape) == 4 and shape.itemsize == 2:
        said.append(
            "trained weights, their gradients and AdamW's moments in fp32, gathered in 16 bits: Accelerate makes them so with "
            "FSDP2 and mixed precision; master_dtype='bfloat16' plans for fully_shard on 16-bit weights"
        )
    elif adamw:
        said.append(f"AdamW's moments in {options.dtype}, as torch keeps them")
    if optimizer == "in-backward":
        said.append("each unit's weights are stepped and its gradients freed in backward (streamgrad.optimizer_in_backward)")
    if optimizer == "host":
        said.append("gradients leave for the host as layers finish; optimizer state and the step are there, its time not counted")
    if options.weights == "host":
        by_zero3 = "embeddings and head wait there too (DeepSpeed's offload_param)"
        by_fsdp2 = (
            "embeddings and head stay on it (streamgrad train --weights host --bf16 false --dtype bfloat16; in mixed precision "
            "Accelerate keeps 16 bytes a trained weight)"
        )
        where = by_zero3 if options.engine == "zero3" else by_fsdp2
        said.append(f"layers wait in pinned memory, two are on the GPU at a time; {where}")
    return said
