"""The report's sections on what the paper has no table of: prompts computed once, experts, images and quantised weights."""

from __future__ import annotations

from typing import Any

from benchmarks.selection import Record, Records, latest
from benchmarks.words import gb, markdown_table, ms, no_record, or_dash, origin

_CASES = {
    "experts": "Qwen3-30B-A3B with its balance loss, LoRA on attention",
    "images": "Qwen3-VL-8B's shape, a quarter of the tokens images",
    "qlora-8b": "Qwen3-8B in nf4, LoRA",
    "qlora-32b": "Qwen3-32B in nf4, LoRA",
}


def shared_prompts(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return the times of steps whose rows have one prompt, shared, separate and by a peer."""
    names = ("objective", "prompt_tokens", "completion_tokens", "group")
    cells = latest(records["shared_prompts"], *names, "method")
    shapes = list(dict.fromkeys(cell[:-1] for cell in cells))
    if not shapes:
        return [no_record("shared-prompts")]
    rows = []
    for shape in shapes:
        found = {method: cells.get((*shape, method)) for method in ("liger", "separate", "shared")}
        gains = [_quotient(found[peer], found["shared"]) for peer in ("liger", "separate")]
        objective, prompt, completion, group = shape
        rows.append([
            str(objective), f"{prompt:,} + {group} x {completion:,}",
            *(cell for record in found.values() for cell in (ms(record), gb(record))),
            *(or_dash(gain, "{:.2f}x") for gain in gains),
        ])  # fmt: skip
    header = ["objective", "tokens"]
    header += [cell for name in ("Liger's kernels", "every row by itself", "prompt once") for cell in (name, "above weights")]
    return [
        "Qwen3-4B, all of it trained, medians: forward and backward of the policy over completions of one prompt, and the "
        "reference's forward pass for DPO. The peer is transformers with Liger's kernels; it checkpoints, takes a row at a time "
        "(GRPO) and has streamgrad's head. This is not at equal memory: streamgrad fills the card, shared or not.",
        markdown_table([*header, "against the peer", "against every row"], rows),
        origin(cells.values()),
    ]


def families(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return times and peaks of experts, images and quantised weights beside checkpointing."""
    cells = latest(records["families"], "case", "seq_len", "limit_bytes", "method")
    shapes = list(dict.fromkeys((case, length, limit) for case, length, limit, _ in cells))
    if not shapes:
        return [no_record("families experts")]
    rows = []
    for case, length, limit in shapes:
        theirs, ours = (cells.get((case, length, limit, method)) for method in ("checkpointing", "streamgrad"))
        rows.append([
            _CASES[case], f"{length:,}", "all" if limit is None else f"{limit / 2**30:.0f} GiB", ms(theirs), gb(theirs), ms(ours),
            gb(ours), or_dash(_quotient(theirs, ours), "{:.2f}x"),
        ])  # fmt: skip
    header = ["model", "tokens", "memory", "checkpointing", "its peak", "streamgrad", "its peak", "gain"]
    return [
        "One sequence, forward and backward, one step timed after three others, one limit of memory for both methods. streamgrad "
        "uses what there is, and the peer is transformers without Liger's kernels: neither equal memory nor the fastest peer.",
        markdown_table(header, rows),
        origin(cells.values()),
    ]


def _quotient(above: Record | None, below: Record | None) -> float | None:
    times = [record and record["step_ms"] for record in (above, below)]
    return times[0] / times[1] if times[0] and times[1] else None
