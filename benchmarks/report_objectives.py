"""The report's sections on what the paper has no table of: prompts computed once, experts, images and quantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.selection import Record, Records, latest
from benchmarks.words import gb, markdown_table, ms, no_record, or_dash, origin

# The picture has prompts of many lengths and groups of several sizes, with completions of this one.
PICTURED_COMPLETION = 1000
_CASES = {
    "experts": "Qwen3-30B-A3B with its balance loss, LoRA on attention",
    "images": "Qwen3-VL-8B's shape, a quarter of the tokens images",
    "gemma-3-4b": "Gemma-3-4B's text model, windows of 1,024",
    "lora-8b": "Qwen3-8B, LoRA",
    "qlora-8b": "Qwen3-8B in nf4, LoRA",
    "qlora-32b": "Qwen3-32B in nf4, LoRA",
    "qwen3-next": "Qwen3-Next's shape, {layers} layers",
    "qwen3.5": "Qwen3.5-9B's shape, {layers} layers",
}


def shared_prompts(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return the times of steps whose rows have one prompt, shared, separate and by a peer, and the longest prompts."""
    measured = records["shared_prompts"]
    if not measured:
        return [no_record("shared-prompts")]
    compared = [record for record in measured if record["limit_bytes"] is None and not _is_of_the_picture(record)]
    cells = latest(compared, *_SHAPE, "method", "keep")
    rows = []
    for shape in dict.fromkeys(cell[:-2] for cell in cells):
        peer = next((cell for (*at, method, _), cell in cells.items() if (*at,) == shape and method == "trl"), None)
        found = [cells.get((*shape, method, keep)) for keep in ("input", "auto") for method in ("separate", "shared")]
        gains = [
            _quotient(peer, found[1]),
            _quotient(found[0], found[1]),
            _quotient(peer, found[3]),
            _quotient(found[2], found[3]),
        ]
        rows.append([
            *_shape_words(shape), *(f"{ms(record)}, {gb(record)}" for record in (peer, *found)),
            *(or_dash(gain, "{:.2f}x") for gain in gains),
        ])  # fmt: skip
    header = [
        "objective", "tokens", "TRL's way", "every row, inputs kept", "prompt once, inputs kept", "every row, auto",
        "prompt once, auto", "gain on TRL's way, inputs kept", "on every row", "gain on TRL's way, auto", "on every row",
    ]  # fmt: skip
    return [
        "Qwen3-4B, all of it trained, medians, and peaks above weights and gradients: forward and backward of the policy "
        "over completions of one prompt, and the reference's forward pass for DPO. TRL's way is what its trainers run: Liger's "
        "kernels, checkpointing, its own head; a row at a time for GRPO. With inputs kept, streamgrad holds what checkpointing "
        "holds; auto fills the card. The records with inputs kept are of a third step, in which cuDNN may still make plans.",
        markdown_table(header, rows),
        origin(cells.values()),
        *_longest_prompts(records),
        *(["![Gain of computing a prompt once](plots/shared_prompts.png)"] if any(map(_is_of_the_picture, measured)) else []),
    ]


def _longest_prompts(records: Records) -> list[str]:
    limited = latest((record for record in records["shared_prompts"] if record["limit_bytes"]), *_SHAPE, "method")
    rows = [
        [*_shape_words(shape), method, f"{record['limit_bytes'] / 2**30:.0f} GiB", ms(record), gb(record),
         f"{record['ballast_bytes'] / 1e9:.1f} GB", str(record["layers"])]
        for (*shape, method), record in limited.items()
    ]  # fmt: skip
    if not rows:
        return [no_record("shared-prompts --limit 79GiB")]
    return [
        "The longest prompts in one card's memory, without host memory: a step at 97 % of what `plan` gives as the longest. "
        "Layers that were not built are there as ballast, so that memory is real and time is not that of a whole model.",
        markdown_table(
            ["objective", "tokens", "method", "limit", "step", "peak above weights and gradients", "of it ballast", "layers"],
            rows,
        ),
        origin(limited.values()),
    ]


_SHAPE = ("objective", "prompt_tokens", "completion_tokens", "group")


def _shape_words(shape: Any) -> list[str]:
    objective, prompt, completion, group = shape
    return [str(objective), f"{prompt:,} + {group} x {completion:,}"]


def _is_of_the_picture(record: Record) -> bool:
    return bool(record["completion_tokens"] == PICTURED_COMPLETION)


def families(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return times and peaks of experts, images and quantised weights beside checkpointing."""
    cells = latest(records["families"], "case", "seq_len", "limit_bytes", "method")
    shapes = list(dict.fromkeys((case, length, limit) for case, length, limit, _ in cells))
    if not shapes:
        return [no_record("families experts")]
    rows = []
    for case, length, limit in shapes:
        found = [cells.get((case, length, limit, name)) for name in ("checkpointing", "liger", "streamgrad-input", "streamgrad")]
        layers = next(record["layers"] for record in found if record)
        rows.append([
            _CASES[case].format(layers=layers), f"{length:,}", "all" if limit is None else f"{limit / 2**30:.0f} GiB",
            *(cell for record in found for cell in (ms(record), gb(record))),
            *(or_dash(_quotient(_fastest(found[:2]), ours), "{:.2f}x") for ours in found[2:]),
        ])  # fmt: skip
    header = ["model", "tokens", "memory", "checkpointing", "its peak", "Liger, checkpointing", "its peak",
              "streamgrad, inputs kept", "its peak", "streamgrad", "its peak", "gain, inputs kept", "gain"]  # fmt: skip
    return [
        'One sequence, forward and backward, one limit of memory for all methods. "Inputs kept" holds what checkpointing holds; '
        "otherwise streamgrad uses what there is. Gains are over the faster peer of those run. "
        "Hybrids run transformers' own code of the delta rule.",
        markdown_table(header, rows),
        origin(cells.values()),
    ]


def _quotient(above: Record | None, below: Record | None) -> float | None:
    times = [record and record["step_ms"] for record in (above, below)]
    return times[0] / times[1] if times[0] and times[1] else None


def _fastest(found: Sequence[Record | None]) -> Record | None:
    return min((record for record in found if record and record["step_ms"]), key=lambda record: record["step_ms"], default=None)
