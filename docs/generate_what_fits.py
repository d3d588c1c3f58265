"""Write docs/what-fits.md, the longest sequences on cards of 24, 48 and 80 GB: `python docs/generate_what_fits.py`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from streamgrad.hf.estimates.estimate import Estimator
from streamgrad.hf.estimates.options import Options
from streamgrad.hf.estimates.shapes import shape_of
from streamgrad.memory.cards import gpu_named
from streamgrad.memory.peers import longest_with_liger
from streamgrad.memory.this_machine import machine

PAGE = Path(__file__).parent / "what-fits.md"
MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b")
# Memory as it is sold: the card, and GiB of its host.
CARDS = {"24 GB": ("rtx4090", 128), "48 GB": ("rtxa6000", 256), "80 GB": ("h100", 256)}
METHODS = {
    "QLoRA": [{"method": "lora", "quantization": "nf4"}],
    "LoRA": [{"method": "lora"}],
    # From the fastest to the smallest.
    "full": [{"optimizer": name} for name in ("adamw", "adamw8bit", "in-backward", "host")],
}
# In full training the first optimizer that leaves room for so many tokens is shown, or else the one that leaves the most.
ENOUGH = 65_536
OPTIMIZERS = {"adamw": "AdamW", "adamw8bit": "8-bit AdamW", "in-backward": "AdamW in backward", "host": "AdamW on the host"}

HEAD = """# What fits on a card

The longest sequence, in thousands of tokens, of one training step **with the optimizer**, on one GPU: **streamgrad** /
checkpointing with Liger's kernels / transformers' checkpointing. A dash: nothing fits.

"""
TAIL = """
These numbers are **predicted, not measured**: they are `streamgrad plan`'s arithmetic, whose peaks are tested against steps
measured on an H200 ([plan.md](plan.md#how-far-off-they-are)). `python docs/generate_what_fits.py` writes this page.

- One sequence in bfloat16, trained with SFT. Adapters of rank 32 are on every linear map, with AdamW; QLoRA keeps those maps in
  nf4.
- **Cards:**
{cards}
  streamgrad keeps on the host what the card cannot hold. An optimizer on the host and what layers keep there share 85 per cent of
  it. Stay 10 per cent below a length that uses the host. Every layer keeps its input (`recompute_layers=1`): longer sequences fit
  in the same host where only some do.
- **Full training** has the first optimizer of this list that leaves room for {enough:,} tokens, or else the one that leaves the
  most: AdamW with its moments in bfloat16; 8-bit AdamW; AdamW in backward (`streamgrad.optimizer_in_backward`, which frees
  gradients as layers finish); AdamW on the host, with the gradients. All three lengths of a cell are with the same one.
- **Checkpointing** holds every layer's input, one layer's whole graph, and logits in fp32 three times: log-probabilities, and the
  gradients of these and of the logits. **With Liger** it holds a layer's graph with fused norms and activations, and its head
  makes logits in pieces. Against the measured steps of Qwen3-4B, all of it trained, the latter is within 7 per cent
  ([tests/memory/test_peers.py](../tests/memory/test_peers.py)); other sizes and adapters have no measured step to compare with.
- A longest length is not a fast one. `python -m streamgrad plan qwen3-8b --max --gpu rtx4090 --method lora --quantization nf4`
  says how long a step takes.
"""


@cache
def longest(model: str, card: str, host_gib: int, settings: tuple[tuple[str, str], ...]) -> tuple[int, int, int]:
    """Return the tokens that fit: streamed, with Liger and checkpointing, and with checkpointing."""
    options = Options(**dict(settings), recompute_layers=1, machine=machine(gpu=card, host_bytes=host_gib * 2**30))
    shape = shape_of(model, lora_rank=options.rank).quantized(options.quantization)
    own = Estimator(shape, options)
    if options.host_left(own.state) < 0:
        return 0, 0, 0
    return own.longest(), longest_with_liger(options.card(own.state), own.load(1)), own.longest_checkpointed()


def cell(model: str, method: str, card: str, host_gib: int) -> str:
    """Return the longest lengths of one model on one card, with the optimizer where there is a choice."""
    found: dict[str, tuple[int, int, int]] = {}
    for settings in METHODS[method]:
        name = settings.get("optimizer", "")
        found[name] = longest(model, card, host_gib, tuple(settings.items()))
        if found[name][0] >= ENOUGH:
            break
    # Of equal ones the first, which is the fastest.
    name = max(found, key=lambda each: (found[each][0] >= ENOUGH, found[each][0]))
    streamed, *others = map(thousands, found[name])
    return "-" if not found[name][0] else " / ".join([f"**{streamed}**", *others]) + (name and f" ({OPTIMIZERS[name]})")


def thousands(tokens: int) -> str:
    return f"{tokens // 1000}k" if tokens >= 1000 else "-"


def row(model: str, method: str) -> str:
    name = model.replace("qwen3-", "Qwen3-").replace("b", "B")
    return f"| {name} | {method} | " + " | ".join(cell(model, method, *card) for card in CARDS.values()) + " |"


def table() -> str:
    lines = ["| model | training | " + " | ".join(CARDS) + " |", "|---" * (2 + len(CARDS)) + "|"]
    return "\n".join(lines + [row(model, method) for model in MODELS for method in METHODS]) + "\n"


def page() -> str:
    cards = "\n".join(
        f"  {size}: {gpu_named(card).label}, {gpu_named(card).gib:g} GiB for a process, in a host of {host} GiB;"
        for size, (card, host) in CARDS.items()
    )
    return HEAD + table() + TAIL.format(cards=cards, enough=ENOUGH)


if __name__ == "__main__":
    PAGE.write_text(page())
