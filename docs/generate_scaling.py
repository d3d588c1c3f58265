"""Write docs/scaling.md, the longest sequences that 8 to 1,024 H100s share: `python docs/generate_scaling.py` (minutes)."""

from __future__ import annotations

from pathlib import Path

from streamgrad.hf.estimates.estimate import Estimator, estimator_of
from streamgrad.hf.estimates.options import Options
from streamgrad.hf.estimates.report import Outlook
from streamgrad.memory.seconds import Links, Rates
from streamgrad.memory.this_machine import machine

PAGE = Path(__file__).parent / "scaling.md"
MODELS = ("llama-3.1-8b", "qwen3-32b", "llama-3.1-70b", "qwen3-235b-a22b")
GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
ENGINES = ("zero3", "fsdp2")
HOST_GIB = 2048
# The components of a plan, in columns.
PARTS = {
    "state": ("weights", "optimizer state", "gradients"),
    "kept": ("kept inputs", "kept attention", "kept graphs"),
    "keys": ("keys and values",),
    "at work": ("hidden states", "chunk activations", "logits"),
    "other": ("workspace", "other"),
}
# Who measured what: the model, GPUs, tokens of the sequence, and what is published of the step.
PUBLISHED = (
    ("TRL", "qwen3-8b", 8, 1_000_000, "380 s, 56 GB"),
    ("ALST", "llama-3.1-8b", 8, 3_700_000, "the longest"),
    ("UPipe", "llama-3.1-8b", 8, 5_000_000, "the longest"),
    ("ALST", "llama-3.1-8b", 32, 15_000_000, "the longest"),
)

HEAD = """# From 8 to 1,024 GPUs

The longest sequence that all GPUs share (`--sp` as many as `--gpus`), on nodes of eight H100s with 80 GB and {host} GiB of host
memory: full training in bfloat16 with AdamW, layer inputs on the host where the GPUs are full. More GPUs than query heads form a
[ring](distributed.md#sequence-parallelism), the smallest that works. Bytes are those of one GPU in its largest phase:

- `state`: weights, optimizer state and gradients;
- `kept`: what layers keep for backward;
- `keys`: keys and values of the layer at work, and the sums of their gradients;
- `at work`: hidden states and a chunk's activations;
- `other`: what engines gather and kernels need.

The host's are those of all eight GPUs of a node.

"""
COLUMNS = ("model", "engine", "GPUs", "ring", "longest sequence", *PARTS, "node's host", "seconds a step", "tokens a second")
LIMITS = """
A dash: nothing fits. With more GPUs than key heads, each of them holds one key head of the whole sequence for the layer at work,
1.5 kB a token with the sums in fp32 (heads of 128). So 80 GB hold about 50 million tokens, whatever the number of GPUs. To use
more of them, let fewer share a sequence (`--sp`), and train several at a time.

## Beside published steps

"""
PUBLISHED_COLUMNS = (
    "published by", "model", "GPUs", "tokens", "measured there", "here: seconds, at least", "GPU", "node's host", "longest",
)  # fmt: skip
TAIL = """
Theirs are measured, on H100s with 80 GB; streamgrad's are what ZeRO-3 and `plan` say for as many tokens on as many GPUs. A plan
takes the memory that there is to compute less again, so its bytes are no lower limit.

## What this rests on

**Predicted, not measured**: this is `streamgrad plan`'s arithmetic, for example `python -m streamgrad plan qwen3-32b --max --gpu
h100 --host-memory {host}GiB --engine zero3 --gpus 128 --sp 128`. Tests compare it with simulated ranks. The peak bytes of steps
that one, two and four ranks share, with and without a ring, are within 7 per cent of what is counted there, and the elements that
they exchange are equal ([test_sequence_parallel.py](../tests/parallel/test_sequence_parallel.py)). Weights and optimizer state
under the shipped `fsdp2.yaml` and `zero3.yaml`, and FSDP2's gradients, have the bytes that are counted on two ranks
([test_documented_launches.py](../tests/parallel/test_documented_launches.py)).

Products and attention run at the rates measured on one H200 ({gemm:.0f}, and {forward:.0f} forward and {backward:.0f} backward
TFLOP/s). A GPU sends {inside:.0f} GB/s within its node and {across:.0f} GB/s to others, which are published peaks. Heads are
traded at the first among GPUs of one node and at the second beyond it; so are the keys of a ring. Seconds are a lower bound, but
for the ring, whose time is counted as if no attention ran meanwhile; tokens a second are an upper one. ZeRO-3 has DeepSpeed's
fp32 moments and copy; FSDP2 has fp32 weights, gradients and moments, as Accelerate makes them.
"""


def estimator(model: str, engine: str, gpus: int) -> Estimator:
    place = machine(gpu="h100", host_bytes=HOST_GIB * 2**30)
    return estimator_of(model, Options(engine=engine, gpus=gpus, sp=gpus, machine=place))


def node_host(streamed: Outlook) -> str:
    return f"{8 * sum(streamed.host_bytes.values()) / 2**30:,.0f} GiB"


def row(model: str, engine: str, gpus: int) -> str:
    """Return the longest sequence on so many GPUs, what one of them holds then, and the time of a step."""
    found = estimator(model, engine, gpus)
    tokens, start = found.longest(), [model, engine, f"{gpus:,}", str(found.options.ring)]
    if not tokens:
        return line([*start, *"-" * (len(COLUMNS) - len(start))])
    streamed = found.streamed(found.load(tokens), tokens)
    held = [sum(streamed.device_bytes.get(name, 0.0) for name in names) for names in PARTS.values()]
    cells = [f"{tokens:,}", *(f"{count / 2**30:.1f} GiB" for count in held), node_host(streamed)]
    return line([*start, *cells, f"{streamed.seconds.total:,.0f}", f"{tokens / streamed.seconds.total:,.0f}"])


def published_row(who: str, model: str, gpus: int, tokens: int, measured: str) -> str:
    """Return a published step beside the plan for the same model, GPUs and tokens."""
    found = estimator(model, "zero3", gpus)
    longest = found.longest()
    streamed = found.streamed(found.load(tokens), longest)
    ours = [f"{streamed.seconds.total:,.0f}", f"{streamed.peak_bytes / 1e9:.1f} GB", node_host(streamed), f"{longest:,}"]
    return line([who, model, str(gpus), f"{tokens:,}", measured, *ours])


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def table(columns: tuple[str, ...], rows: list[str]) -> str:
    return "\n".join([line(list(columns)), "|---" * len(columns) + "|", *rows]) + "\n"


def tables() -> tuple[str, str]:
    """Return the table of all models, engines and numbers of GPUs, and the one of published steps."""
    rows = [row(model, engine, gpus) for model in MODELS for engine in ENGINES for gpus in GPUS]
    return table(COLUMNS, rows), table(PUBLISHED_COLUMNS, [published_row(*each) for each in PUBLISHED])


def page(lengths: str, published: str) -> str:
    """Return the page around its two tables."""
    rates, links = Rates(), Links()
    speeds = {"inside": links.inside / 1e9, "across": links.across / 1e9, "gemm": rates.gemm / 1e12}
    speeds |= {"forward": rates.attention_forward / 1e12, "backward": rates.attention_backward / 1e12}
    return HEAD.format(host=HOST_GIB) + lengths + LIMITS + published + TAIL.format(host=HOST_GIB, **speeds)


if __name__ == "__main__":
    PAGE.write_text(page(*tables()))
