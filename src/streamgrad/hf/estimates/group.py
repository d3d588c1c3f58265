"""`estimate_group`: what a step on several completions of a prompt holds and takes, if it is computed once or in every row."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from streamgrad.hf.estimates.assumptions import common_assumptions
from streamgrad.hf.estimates.estimate import estimator_of
from streamgrad.hf.estimates.options import Options, check_count
from streamgrad.hf.estimates.report import Outlook
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
    if options.sp > 1:
        raise ValueError(
            f"sp={options.sp} with prompt_tokens={prompt}: groups of completions are planned for sp=1. Pass seq_len."
        )
    estimator = estimator_of(model, options)
    groups, load, card = options.batch, estimator.load(1), options.card(estimator.state)
    scored = groups * size * completion
    separate = replace(load, rows=groups * size, sequence=prompt + completion, scored=scored)
    fields = {field.name: getattr(load, field.name) for field in dataclasses.fields(Workload)}
    row = {"rows": 1, "sequence": groups * (prompt + size * completion), "scored": scored}
    shared = SharedPrompts(**fields | row, groups=groups, group=size, completion=completion)
    longest_shared = card.longest(shared) // groups - size * completion
    longest_separate = card.longest(separate) - completion
    return GroupReport(
        title=f"{model}, {options.method}, {options.objective}: {groups} x ({prompt:,} + {size} x {completion:,}) tokens",
        gpu_memory=options.machine.gpu_bytes,
        prompt_tokens=prompt,
        completion_tokens=completion,
        group=size,
        shared_tokens=shared.tokens,
        separate_tokens=separate.tokens,
        shared=estimator.streamed(shared, max(0, longest_shared)),
        separate=estimator.streamed(separate, max(0, longest_separate)),
        assumptions=tuple(common_assumptions(options)),
    )
