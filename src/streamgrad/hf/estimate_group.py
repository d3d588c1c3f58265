"""`estimate_group`: what a step on several completions of a prompt holds and takes, if it is computed once or in every row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from streamgrad.hf.estimate import Options, Outlook, check_count, common_assumptions, step_of, streamed_outlook
from streamgrad.memory.phases import SharedPrompts, Workload

# Completions of a prompt: a pair, and TRL's default.
GROUPS = {"dpo": 2, "grpo": 8}


@dataclass(frozen=True)
class GroupReport:
    """What `estimate_group` returns; `longest_tokens` of its outlooks are those of the longest prompt that fits."""

    title: str
    gpu_memory: int
    prompt_tokens: int
    completion_tokens: int
    group: int
    shared_tokens: int
    separate_tokens: int
    shared: Outlook
    separate: Outlook
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return dataclasses.asdict(self) | {name: getattr(self, name).to_dict() for name in ("shared", "separate")}


def estimate_group(model: str, *, prompt: int, completion: int, group: int | None, options: Options) -> GroupReport:
    """Return the streamed step on `options.batch` prompts with a group of completions each, whose rows share them or do not."""
    for name, count in (("prompt_tokens", prompt), ("completion_tokens", completion), ("group", group)):
        check_count(name, count)
    if options.objective not in GROUPS:
        raise ValueError(
            f"prompt_tokens={prompt} is for objectives with several completions of a prompt ({', '.join(GROUPS)}), got "
            f"objective={options.objective!r}. Pass one of them, or seq_len in place of prompt_tokens and completion_tokens."
        )
    size = group or GROUPS[options.objective]
    if options.objective == "dpo" and size != 2:
        raise ValueError(
            f"group={size} completions of a prompt, but dpo compares two. Leave group out, or pass objective='grpo'."
        )
    groups, load = options.batch, step_of(model, options)
    scored = groups * size * completion
    separate = replace(load, rows=groups * size, sequence=prompt + completion, scored=scored)
    fields = {field.name: getattr(load, field.name) for field in dataclasses.fields(Workload)}
    row = {"rows": 1, "sequence": groups * (prompt + size * completion), "scored": scored}
    shared = SharedPrompts(**fields | row, groups=groups, group=size, completion=completion)
    longest_shared = options.card.longest(shared) // groups - size * completion
    longest_separate = options.card.longest(separate) - completion
    return GroupReport(
        title=f"{model}, {options.method}, {options.objective}: {groups} x ({prompt:,} + {size} x {completion:,}) tokens",
        gpu_memory=int(options.card.device_bytes),
        prompt_tokens=prompt,
        completion_tokens=completion,
        group=size,
        shared_tokens=shared.tokens,
        separate_tokens=separate.tokens,
        shared=streamed_outlook(shared, options, max(0, longest_shared)),
        separate=streamed_outlook(separate, options, max(0, longest_separate)),
        assumptions=tuple(common_assumptions(options)),
    )
