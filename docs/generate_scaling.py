"""Write docs/scaling.md, the longest sequences on 8 to 1,024 H100s: `python docs/generate_scaling.py`."""

from __future__ import annotations

from pathlib import Path

from streamgrad.hf.estimate import estimator_of
from streamgrad.hf.estimate_options import Options
from streamgrad.memory.this_machine import machine

PAGE = Path(__file__).parent / "scaling.md"
# A model, and the GPUs that share a sequence: at most as many as it has key heads.
MODELS = {"llama-3.1-8b": 8, "qwen3-32b": 8, "llama-3.1-70b": 8, "qwen3-235b-a22b": 4}
GPUS = (8, 32, 1024)
ENGINES = ("zero3", "fsdp2")
HOST_GIB = 2048
STATE = ("weights", "optimizer state", "gradients")

HEAD = """# From 8 to 1,024 GPUs

The longest sequence that P GPUs share, on nodes of eight H100s with 80 GB and {host} GiB of host memory: full training in
bfloat16 with AdamW, layer inputs on the host where the GPU is full, P as many as the model has key heads. More GPUs train more
sequences at a time, and shard weights, gradients and optimizer state further. Bytes are those of one GPU in its largest phase;
the last column has what all eight GPUs of a node keep on its host.

"""
COLUMNS = (
    "model", "engine", "GPUs", "P", "longest sequence", "state", "activations", "other", "seconds a step", "tokens a second",
    "node's host",
)  # fmt: skip
TAIL = """
A dash: nothing fits. **Predicted, not measured**: this is `streamgrad plan`'s arithmetic, for example `python -m streamgrad plan
qwen3-32b --max --gpu h100 --host-memory {host}GiB --engine zero3 --gpus 32 --sp 8`. What engines keep on a rank is tested
against simulated ranks (tests/parallel; FSDP2's fp32 weights by hand only), and what they exchange against counted elements.
Products and attention run at the
rates measured on an H200 (787, and 600 forward and 520 backward TFLOP/s). A GPU sends 450 GB/s within its node and 50 GB/s to
others, which are published peaks. Seconds are a lower bound, tokens a second an upper one. ZeRO-3 has DeepSpeed's fp32 moments
and copy; FSDP2 has fp32 weights and moments, as Accelerate makes them.

Published by others, and measured: ALST trains Llama-8B at 3.7 million tokens on 8 H100s and at 15 million on 32; UPipe an 8B
model at 5 million on 8; TRL has 1 million tokens on 8 H100s in 380 seconds and 56 GB. On 32 GPUs and more their sequences are
shared by more ranks than there are key heads, which this table does not count on.
"""


def row(model: str, engine: str, gpus: int) -> str:
    """Return the longest sequence on so many GPUs, what one of them holds then, and the time of a step."""
    place, ranks = machine(gpu="h100", host_bytes=HOST_GIB * 2**30), MODELS[model]
    estimator = estimator_of(model, Options(engine=engine, gpus=gpus, sp=ranks, machine=place))
    tokens, start = estimator.longest(), [model, engine, f"{gpus:,}", str(ranks)]
    if not tokens:
        return "| " + " | ".join([*start, *"-" * (len(COLUMNS) - len(start))]) + " |"
    streamed = estimator.streamed(estimator.load(tokens), tokens)
    held, seconds = streamed.device_bytes, streamed.seconds.total
    state, other = sum(held.get(name, 0.0) for name in STATE), held.get("other", 0.0)
    cells = [
        f"{tokens:,}",
        *(f"{count / 2**30:.1f} GiB" for count in (state, streamed.peak_bytes - state - other, other)),
        f"{seconds:,.0f}",
        f"{gpus // ranks * tokens / seconds:,.0f}",
        f"{8 * sum(streamed.host_bytes.values()) / 2**30:,.0f} GiB",
    ]
    return "| " + " | ".join([*start, *cells]) + " |"


def table() -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    return "\n".join(lines + [row(model, engine, gpus) for model in MODELS for engine in ENGINES for gpus in GPUS]) + "\n"


def page() -> str:
    return HEAD.format(host=HOST_GIB) + table() + TAIL.format(host=HOST_GIB)


if __name__ == "__main__":
    PAGE.write_text(page())
