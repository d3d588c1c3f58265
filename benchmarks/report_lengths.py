"""Writes the report's sections on memory: against length, by objective, by method, by chunk size, and in a small card."""

from __future__ import annotations

from typing import Any

from benchmarks.lengths import TRL_CELLS
from benchmarks.longest import predictions_in
from benchmarks.predicted import found_in, with_growing_segments
from benchmarks.selection import (
    Record,
    Records,
    Series,
    automatic_steps,
    card_bytes,
    is_papers_card,
    is_small_card,
    latest,
    memory_series,
    paper_longest,
    partition_records,
    steps_within_liger,
    token_bytes,
)
from benchmarks.words import STEP_METHODS, fault_note, gb, markdown_table, ms, no_record, or_dash, origin, picture
from streamgrad.hf.configs import preset_config

_LENGTH_COLUMNS = ["inputs kept", "layers built", "peak", "of it ballast", "cap"]


def memory(records: Records, paper: dict[str, Any]) -> list[str]:
    steps = automatic_steps(records["step"])
    low, high = paper["bp_memory_max_length_ratio"]["over_checkpoint"]
    said = [
        f"The paper's figure is for Qwen3-8B, 14B and 32B (LoRA) in 80 GB: there StreamBP holds sequences {low} to {high} times "
        "as long as checkpointing does. First ours of Qwen3-4B, where streamgrad takes the memory that is there to save time, so "
        "its peak is a choice, and of a model cut to two layers, which shows what a token costs once layer inputs are in host "
        "memory.",
        picture("memory", "Peak memory against length"),
    ]
    rows = []
    for length in sorted({length for _, length in steps}):
        ours = steps.get(("streamgrad", length))
        plan = ours["policy"].get("plan", "-") if ours else "-"
        rows.append([f"{length:,}", *(gb(steps.get((method, length))) for method in STEP_METHODS), plan.split("; about")[0]])
    said += [markdown_table(["tokens", *STEP_METHODS.values(), "streamgrad's plan"], rows), *fault_note(steps.values())]
    said += [origin(steps.values()), *_within_liger(records)]
    series = memory_series(records["memory"])
    cut = {each: found for each, found in series.items() if not each.is_whole}
    whole = {each: found for each, found in series.items() if each.is_whole}
    said += ["### Bytes a token", *_series_tables(cut), "### Whole models"]
    if not whole:
        return [*said, no_record("memory --model qwen3-14b --training lora --offload none")]
    return [*said, picture("memory_models", "Peak memory of whole models against length"), *_series_tables(whole)]


def _within_liger(records: Records) -> list[str]:
    """Return the section on steps whose budget was what Liger took."""
    pairs = steps_within_liger(records["step"])
    if not pairs:
        return []
    rows = []
    for length, (record, liger) in pairs.items():
        plan = record["policy"]["plan"].split("; about")[0]
        ours = f"{ms(record)}, {gb(record)}" if record["step_ms"] else record["error"].split(" (")[0]
        rows.append([f"{length:,}", f"{ms(liger)}, {gb(liger)}", ours, plan])
    return [
        "### Within the memory that Liger takes",
        markdown_table(["tokens", "Liger", "streamgrad, with that as its budget", "plan"], rows),
        origin(record for pair in pairs.values() for record in pair),
    ]


def _series_tables(series: dict[Series, dict[int, Record]]) -> list[str]:
    """Return tables of peaks by length and, between the shortest and the longest, by token."""
    lines = []
    for each, found in series.items():
        cost = token_bytes(found)
        for length, record in found.items():
            lines.append([
                f"{each.model} {each.training}", str(each.layers), f"{length:,}", each.name, gb(record),
                f"{record['host_bytes'] / 1e9:.1f} GB", or_dash(cost and cost / 1e3, "{:.1f} KB"),
            ])  # fmt: skip
    shown = [record for found in series.values() for record in found.values()]
    return [
        markdown_table(
            ["model", "layers built", "tokens", "method", "peak", "pinned by streamgrad", "device bytes a token"], lines
        ),
        "Device bytes a token are the difference between the valid peaks at the longest and the shortest length, over that of "
        "the lengths.",
        *fault_note(shown),
        origin(shown),
    ]


def longest(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs = paper["max_sequence_length_thousands"]
    rows = []
    for objective in ("sft", "grpo", "dpo"):
        for name, text in (("no_checkpoint", "no checkpointing"), ("checkpoint", "checkpointing"), ("streambp", "StreamBP")):
            rows.append([objective.upper(), text, *(or_dash(cell, "{:.1f}") for cell in theirs[objective][name])])
    said = [
        "The paper's table, in thousands of tokens on one A800 of 80 GB; a DPO step has two sequences, a GRPO step eight:",
        markdown_table(["objective", "method", *theirs["columns"]], rows),
        "Ours are steps of a given length that ran, under the cap on the process's device memory that is named. They are not "
        "the longest that would run. Where fewer layers were built than the model has, they have its full width and length, and "
        "ballast on the device stands for the weights, gradients and kept inputs of the others: the memory is real, the time "
        "is not. The reference pass of DPO and GRPO is part of the step: by a frozen copy on the device in full training (with "
        "ballast for its missing layers too), with the adapters switched off in LoRA. No optimizer state is held.",
        picture("max_length", "Longest sequences"),
    ]
    large = [record for record in records["max_length"] if is_papers_card(record)]
    found = latest(large, "objective", "model", "training", "seq_len", "layers", "batch")
    of_paper = [record for record in found.values() if record["model"].startswith("qwen3")]
    for objective in ("sft", "grpo", "dpo"):
        own = [record for record in of_paper if record["objective"] == objective]
        said.append(f"### {objective.upper()}")
        if own:
            lines = [_length_row(record, paper_longest(record, theirs)) for record in own]
            said += [markdown_table(["model", "tokens", "of the paper's StreamBP", *_LENGTH_COLUMNS], lines), origin(own)]
        else:
            said.append(no_record(f"max-length --objective {objective}"))
    uncapped = [record for record in records["max_length"] if card_bytes(record) is None]
    said += ["### The longest that fit", *_longest_predicted(records, theirs)]
    return [*said, "### Past TRL's own lengths", *_past_trl(list(found.values())), "### A whole card", *_whole_card(uncapped)]


def _longest_predicted(records: Records, theirs: dict[str, Any]) -> list[str]:
    """Return the table of predicted maxima, each with the step that confirms it, if one ran."""
    rows, used = [], []
    for prediction in sorted(predictions_in(records["longest"]), key=lambda each: (each.objective, each.offload, each.model)):
        step = prediction.confirmed_by(records["train_step"])
        length = paper_longest(vars(prediction), theirs)
        rows.append([
            prediction.objective.upper(), f"{prediction.model} {prediction.training}",
            "none" if prediction.offload == "none" else prediction.host.replace("GiB", " GiB"), f"{prediction.tokens:,}",
            or_dash(prediction.tokens / length if length else None, "{:.1f}x"), prediction.plan.partition(";")[0],
            "predicted only" if step is None else f"{step['seq_len']:,}: {gb(step)}, {step['layers']} layers built",
        ])  # fmt: skip
        used += [] if step is None else [step]
    if not rows:
        return [no_record("longest")]
    header = ["objective", "model", "host memory", "longest, predicted", "of the paper's", "plan", "a step at 97 %"]
    return [
        "What the planner gives as the longest sequence of a step in 79 GiB, without host memory and with it, where layers keep "
        "the input of every n-th (`recompute_layers`). Predictions are confirmed by a step at 97 % of them: of the last layer "
        "or, where its input is recomputed, of the last two, with ballast on the device and on the host for what the whole "
        "model's step is predicted to hold more.",
        markdown_table(header, rows),
        *([origin(used)] if used else []),
        "Predictions: "
        + ", ".join(f"`{command}`" for command in dict.fromkeys(row["command"] for row in records["longest"]))
        + ".",
    ]


def _whole_card(records: list[Record]) -> list[str]:
    """Return the section on steps without a cap."""
    if not records:
        return [no_record("max-length --model qwen3-8b --seq 400000")]
    rows = [
        [
            f"{record['model']} {record['training']}", f"{record['seq_len']:,}", record["device"], gb(record),
            f"{record['host_bytes'] / 1e9:.1f} GB", ms(record), record["policy"]["plan"].partition("; about")[0],
        ]
        for record in latest(records, "model", "training", "seq_len").values()
    ]  # fmt: skip
    return [markdown_table(["model", "tokens", "card", "peak", "host", "step", "plan"], rows), origin(records)]


def _past_trl(records: list[Record]) -> list[str]:
    lengths = ", ".join(f"{cell.tokens:,} ({cell.objective.upper()})" for cell in TRL_CELLS.values())
    said = [
        f"TRL 1.15 reaches {lengths} tokens with gemma-3-1b under a cap of 79 GiB, GRPO's by scoring alone. Ours are whole "
        "steps, GRPO's on one completion."
    ]
    own = [record for record in records if record["model"] == TRL_CELLS["sft"].model]
    if not own:
        return [*said, no_record("max-length --model gemma-3-1b")]
    lines = []
    for record in own:
        name = record["objective"]
        lines.append([name.upper(), *_length_row(record, TRL_CELLS[name].tokens), ms(record)])
    return [*said, markdown_table(["objective", "model", "tokens", "of TRL's", *_LENGTH_COLUMNS, "step"], lines), origin(own)]


def _length_row(record: Record, theirs: float | None) -> list[str]:
    cap, tokens = card_bytes(record), f"{record['seq_len']:,}"
    return [
        f"{record['model']} {record['training']}",
        tokens if record["batch"] == 1 else f"{record['batch']} x {tokens}",
        or_dash(record["seq_len"] / theirs if theirs else None, "{:.2f}x"),
        "on the host" if record["host_bytes"] else "on the device",
        f"{record['layers']} of {preset_config(record['model']).num_hidden_layers}",
        gb(record),
        f"{record['ballast_bytes'] / 1e9:.1f} GB",
        f"{cap / 2**30:g} GiB" if cap else "none",
    ]


def mini_sequences(records: Records, paper: dict[str, Any]) -> list[str]:
    said = [
        "The paper plots the memory of MsT, which computes MLP and head in mini-sequences, beside StreamBP's (Qwen3-8B, LoRA): "
        f"StreamBP holds sequences about {paper['mst_memory']['max_length_ratio']} times as long. Ours of MsT is written from "
        "its description, with the sizes of its authors' code (MLP in pieces of 4,096 tokens, head in 16). Its times are in the "
        "tables of time against length and of batch sizes."
    ]
    series = memory_series(records["memory"])
    compared = {each: found for each, found in series.items() if each.method in ("mst", "streamgrad") and each.is_whole}
    compared = {each: found for each, found in compared.items() if any(o[:3] == each[:3] and o.method == "mst" for o in compared)}
    if not compared:
        return [*said, no_record("memory --training lora --methods mst,streamgrad", of=" of memory")]
    return [*said, *_series_tables(compared)]


def partitions(records: Records, paper: dict[str, Any]) -> list[str]:
    said = [
        "The paper fixes the partition of layers to 1,000, 2,000, 5,000 tokens and a third of the sequence (Qwen3-8B, a figure)."
    ]
    found = partition_records(records)
    if not found:
        return [*said, no_record("partition")]
    lines = [
        [model, f"{length:,}", f"{size:,}", ms(record), gb(record)]
        for (model, length), sizes in found.items()
        for size, record in sizes.items()
    ]
    used = [record for sizes in found.values() for record in sizes.values()]
    return [
        *said,
        "In ours layers keep their inputs, on the device.",
        picture("partition", "Time and memory against chunk size"),
        markdown_table(["model", "tokens", "chunk", "step", "peak"], lines),
        origin(used),
    ]


def predicted(records: Records, paper: dict[str, Any]) -> list[str]:
    said = [
        "`streamgrad plan` predicts the longest sequence that fits a card. Each of these was run below its prediction and above "
        "it, whole, under the cap that is named, with an allocator whose segments can grow; where the first fits and the second "
        "does not, the true length lies between."
    ]
    found = found_in(records["predicted"])
    if not found:
        return [*said, no_record("predicted")]
    lines = []
    for each in found:
        own = each.configuration
        between = [or_dash(tokens, "{:,} tokens") for tokens in (each.fitted, each.failed)]
        predicted_tokens = f"{own.longest_tokens():,} tokens"
        lines.append([f"{own.model} {own.training}", own.offload, own.gpu_memory, predicted_tokens, *between])
    header = ["model", "offload", "cap", "predicted", "fitted", "did not fit"]
    return [*said, markdown_table(header, lines), origin(with_growing_segments(records["predicted"]))]


def small_card(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs = paper["rtx3090_24gb_8b_lora_rank32"]
    tokens = 1e3 * theirs["streambp_max_length_thousands"]
    said = [
        f"The paper's StreamBP reaches {tokens:,.0f} tokens on an RTX 3090 with Qwen3-8B and LoRA of rank 32, "
        f"{theirs['ratio_over_checkpoint']} times as many as checkpointing."
    ]
    cells = [record for record in records["max_length"] if is_small_card(record) and record["model"] == "qwen3-8b"]
    if not cells:
        return [*said, no_record("max-length --card 24GiB", of=" under a cap of 24 GiB or less")]
    lines = [_length_row(record, tokens) for record in latest(cells, "training", "seq_len", "layers").values()]
    return [*said, markdown_table(["model", "tokens", "of the paper's", *_LENGTH_COLUMNS], lines), origin(cells)]
