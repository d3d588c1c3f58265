"""`benchmarks/REPORT.md`: every table and figure of the paper, ours from the records beside the paper's own.

Nothing here measures. A number is a record's, the paper's (`paper.json`), or a quotient of the two; what has no record is said to
be not run, and why. The same records give the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from streamgrad.bench.paper import read_paper
from streamgrad.bench.plots import draw_plots
from streamgrad.bench.selection import (
    FAULT,
    Record,
    Records,
    automatic_steps,
    card_bytes,
    has_faulty_peak,
    latest,
    paper_longest,
    read_records,
    slopes,
)
from streamgrad.models.presets import preset_config

REPORT = Path("benchmarks/REPORT.md")
STEP_METHODS = {
    "hf": "transformers, checkpointing",
    "liger": "Liger kernels, checkpointing",
    "streamgrad": "streamgrad",
}


def write_report(results: Path, out: Path) -> list[Path]:
    """Write the report and, in `plots` beside it, its pictures. Returns their paths, the report's first."""
    records, paper = read_records(results), read_paper()
    pictures = draw_plots(records, paper, out.parent / "plots")
    out.write_text(render(records, paper))
    return [out, *pictures]


def render(records: Records, paper: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        "# Benchmarks, beside the paper's",
        "Written by `python -m streamgrad bench report` from the records in [results](results). The paper is "
        f"*{paper['source']}*; its hardware is {paper['hardware']}, ours is named with each table. GB are 10^9 bytes. Peaks are "
        "the allocator's, weights and gradients included. Weights are random, in bf16, and no optimizer runs, unless said "
        "otherwise.",
    ]
    for title, section in SECTIONS:
        parts += [f"## {title}", *section(records, paper)]
    return "\n\n".join(parts) + "\n"


# Words


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def origin(records: Iterable[Record]) -> str:
    """Hardware, versions and commands of what a table shows."""
    rows = list(records)
    devices = dict.fromkeys(
        f"{row['device']} ({', '.join(f'{name} {version}' for name, version in row['versions'].items() if name != 'streamgrad')})"
        for row in rows
    )
    commands = dict.fromkeys(row["command"] for row in rows)
    return f"*{'; '.join(devices)}.* Made by " + ", ".join(f"`{command}`" for command in commands) + "."


def not_run(reason: str) -> str:
    return f"**Not run:** {reason}."


def picture(name: str, text: str) -> str:
    return f"![{text}](plots/{name}.png)"


def _ms(record: Record | None) -> str:
    if record is None:
        return "not run"
    return record["error"] if record["step_ms"] is None else f"{record['step_ms']:,.0f} ms"


def _gb(record: Record | None) -> str:
    if record is None:
        return "not run"
    if record["peak_bytes"] is None:
        return record["error"]
    return f"{record['peak_bytes'] / 1e9:.1f} GB" + (" (not valid)" if has_faulty_peak(record) else "")


def _fault_note(records: Iterable[Record]) -> list[str]:
    """Said under a table that shows a peak which is known to be wrong."""
    return [f"A peak marked as not valid is too large: {FAULT}."] if any(map(has_faulty_peak, records)) else []


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


# Sections, in the order of the paper


def speed_table(records: Records) -> str:
    """README's: milliseconds by length and method."""
    steps = automatic_steps(records["step"])
    rows = []
    for length in sorted({length for _, length in steps}):
        by_method = {method: steps.get((method, length)) for method in STEP_METHODS}
        ours, liger = by_method["streamgrad"], by_method["liger"]
        rows.append([
            f"{length:,}", _ms(by_method["hf"]), _ms(liger), f"**{_ms(ours)}**",
            f"{liger['step_ms'] / ours['step_ms']:.2f}x" if ours and liger and ours["step_ms"] and liger["step_ms"] else "-",
        ])  # fmt: skip
    return markdown_table(["tokens", *STEP_METHODS.values(), "against Liger"], rows)


def _memory(records: Records, paper: dict[str, Any]) -> list[str]:
    steps = automatic_steps(records["step"])
    low, high = paper["bp_memory_max_length_ratio"]["over_checkpoint"]
    said = [
        f"The paper's figure is for Qwen3-8B, 14B and 32B (LoRA) in 80 GB: there StreamBP holds sequences {low} to {high} times "
        "as long as checkpointing does. Ours is Qwen3-4B, where streamgrad takes the memory that is there to save time, so its "
        "peak is a choice, and a model cut to two layers, which shows what a token costs once layer inputs are in host memory.",
        picture("memory", "Peak memory against length"),
    ]
    rows = []
    for length in sorted({length for _, length in steps}):
        ours = steps.get(("streamgrad", length))
        plan = ours["policy"].get("plan", "-") if ours else "-"
        rows.append([f"{length:,}", *(_gb(steps.get((method, length))) for method in STEP_METHODS), plan.split("; about")[0]])
    said += [markdown_table(["tokens", *STEP_METHODS.values(), "streamgrad's plan"], rows), *_fault_note(steps.values())]
    said += [origin(steps.values()), *_within_liger(records)]
    cut = latest(records["memory"], "model", "method", "layers", "seq_len")
    costs = slopes(records["memory"])
    table = [
        [model, str(layers), f"{length:,}", method, _gb(record), f"{record['host_bytes'] / 1e9:.1f} GB", cost]
        for (model, method, layers, length), record in sorted(cut.items(), key=lambda item: (item[0][0], item[0][3], item[0][1]))
        for cost in [f"{costs[model, method] / 1e3:.1f} KB" if (model, method) in costs else "-"]
    ]
    said += [
        "### Bytes a token",
        markdown_table(
            ["model", "layers built", "tokens", "method", "peak", "pinned by streamgrad", "device bytes a token"], table
        ),
        "Device bytes a token are the difference between the valid peaks at the longest and the shortest length, over that of "
        "the lengths.",
        *_fault_note(cut.values()),
        origin(cut.values()),
        not_run("whole models of 8B, 14B and 32B against length; the table of longest sequences below has their cells"),
    ]
    return said


def _within_liger(records: Records) -> list[str]:
    """Steps whose budget was what Liger took."""
    within = [record for record in records["step"] if "--memory-budget liger" in record["command"]]
    if not within:
        return []
    steps, rows = automatic_steps(records["step"]), []
    for (length,), record in sorted(latest(within, "seq_len").items()):
        liger = steps.get(("liger", length))
        plan = record["policy"]["plan"].split("; about")[0]
        rows.append([f"{length:,}", f"{_ms(liger)}, {_gb(liger)}", f"{_ms(record)}, {_gb(record)}", plan])
    return [
        "### Within the memory that Liger takes",
        markdown_table(["tokens", "Liger", "streamgrad, with that as its budget", "plan"], rows),
        origin(within),
    ]


def _time(records: Records, paper: dict[str, Any]) -> list[str]:
    steps, theirs = automatic_steps(records["step"]), paper["bp_time_seconds"]
    column = {length: place for place, length in enumerate(theirs["sequence_length"])}
    rows = []
    for length in sorted({*column, *(length for _, length in steps)}):
        place = column.get(length)
        cells = [None if place is None else theirs[name][place] for name in ("baseline_checkpoint", "mst", "streambp")]
        ours = [steps.get((method, length)) for method in STEP_METHODS]
        hf, _, streamed = [record and record["step_ms"] for record in ours]
        gains = [a / b if a and b else None for a, b in ((cells[0], cells[2]), (hf, streamed))]
        rows.append([
            f"{length:,}", *(_or_dash(cell, "{:.1f} s") for cell in cells), *map(_ms, ours),
            *(_or_dash(gain, "{:.2f}x") for gain in gains),
        ])  # fmt: skip
    header = ["tokens", "paper: checkpointing", "paper: MsT", "paper: StreamBP"]
    header += [f"ours: {name}" for name in STEP_METHODS.values()]
    return [
        f"The paper: {theirs['model']}. Ours: Qwen3-4B, one sequence, medians. The last two columns are checkpointing's time "
        "over that of streaming, each on its own hardware.",
        picture("time", "Step time against length"),
        markdown_table([*header, "paper: gain", "ours: gain over transformers"], rows),
        "The same, as in README:",
        speed_table(records),
        origin(steps.values()),
    ]


def _batches(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs = paper["bp_time_per_sample_by_batch"]
    names = {"baseline_checkpoint": "checkpointing", "mst": "MsT", "streambp": "StreamBP"}
    rows = [[f"paper: {text}", *(_or_dash(cell, "{:.2f} s") for cell in theirs[name])] for name, text in names.items()]
    return [
        f"{theirs['model']}, seconds a sample.",
        markdown_table(["batch", *map(str, theirs["batch"])], [*rows, ["streamgrad", *["not run"] * len(theirs["batch"])]]),
        not_run("`bench step` measures one sequence; it has no batch yet"),
        "The paper's column for one sequence is not its own time at 9,000 tokens in the table above, but that at 12,000.",
    ]


def _longest(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs = paper["max_sequence_length_thousands"]
    rows = []
    for objective in ("sft", "grpo", "dpo"):
        for name, text in (("no_checkpoint", "no checkpointing"), ("checkpoint", "checkpointing"), ("streambp", "StreamBP")):
            rows.append([objective.upper(), text, *(_or_dash(cell, "{:.1f}") for cell in theirs[objective][name])])
    said = [
        "The paper's table, in thousands of tokens on one A800 of 80 GB:",
        markdown_table(["objective", "method", *theirs["columns"]], rows),
        "Ours are SFT steps of a given length that ran, under the cap on the process's device memory that is named. They are not "
        "the longest that would run. Where fewer layers were built than the model has, they have its full width and length, and "
        "ballast on the device stands for the weights, gradients and kept inputs of the others: the memory is real, the time "
        "is not.",
        picture("max_length", "Longest sequences"),
    ]
    cells = latest(records["max_length"], "model", "training", "seq_len", "layers")
    shown = [_length_row(record, theirs) for record in cells.values()]
    said += [
        markdown_table(
            ["model", "tokens", "of the paper's StreamBP", "inputs kept", "layers built", "peak", "of it ballast", "cap"], shown
        ),
        origin(cells.values()),
        not_run("DPO and GRPO; `bench max-length` makes SFT steps. The paper's optimizer state is not held in ours either"),
    ]
    return said


def _length_row(record: Record, table: dict[str, Any]) -> list[str]:
    theirs, cap = paper_longest(record, table), card_bytes(record)
    return [
        f"{record['model']} {record['training']}",
        f"{record['seq_len']:,}",
        _or_dash(record["seq_len"] / theirs if theirs else None, "{:.2f}x"),
        "on the host" if record["host_bytes"] else "on the device",
        f"{record['layers']} of {preset_config(record['model']).num_hidden_layers}",
        _gb(record),
        f"{record['ballast_bytes'] / 1e9:.1f} GB",
        f"{cap / 2**30:g} GiB" if cap else "none",
    ]


def _mini_sequences(records: Records, paper: dict[str, Any]) -> list[str]:
    return [
        "The paper plots the memory of MsT, which computes MLP and head in mini-sequences, beside StreamBP's (Qwen3-8B, LoRA): "
        f"StreamBP holds sequences about {paper['mst_memory']['max_length_ratio']} times as long. MsT's times are in the table "
        "of time against length.",
        not_run("no implementation of mini-sequences is among the methods of `bench step`; Liger's fused head is the peer there"),
    ]


def _partitions(records: Records, paper: dict[str, Any]) -> list[str]:
    fixed = [r for r in records["step"] if isinstance(r["policy"].get("chunk_size"), int)]
    groups: dict[tuple[Any, ...], dict[int, Record]] = {}
    for record in fixed:
        policy = record["policy"]
        group = groups.setdefault((record["model"], record["seq_len"], policy["keep"], policy["offload"]), {})
        group[policy["chunk_size"]] = record
    compared = {key: group for key, group in sorted(groups.items()) if len(group) > 1}
    said = [
        "The paper fixes the partition of layers to 1,000, 2,000, 5,000 tokens and a third of the sequence (Qwen3-8B, a figure)."
    ]
    if not compared:
        return [*said, not_run("the records have no two chunk sizes of one model, length and policy (`bench step --chunk-size`)")]
    rows = [
        [model, f"{length:,}", f"{keep}, {offload}", f"{size:,}", _ms(record), _gb(record)]
        for (model, length, keep, offload), group in compared.items()
        for size, record in sorted(group.items())
    ]
    used = [record for group in compared.values() for record in group.values()]
    return [*said, markdown_table(["model", "tokens", "keep, offload", "chunk", "step", "peak"], rows), origin(used)]


def _linear(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs, said = paper["linear_example"], [f"{paper['linear_example']['shape']}."]
    found = latest(records["linear"], "device", "dtype", "partitions")
    large = {parts: record for (_, _, parts), record in found.items() if record["shape"]["rows"] == 1_000_000}
    small = {parts: record for (_, _, parts), record in found.items() if record["shape"]["rows"] != 1_000_000}
    rows = [
        [
            "standard" if parts == 1 else f"{parts} partitions", f"{theirs['intermediate_gb'][place]} GB",
            f"{1e3 * theirs['seconds'][place]:,.0f} ms", _gb(large.get(parts)), _ms(large.get(parts)),
        ]
        for place, parts in enumerate(theirs["partitions"])
    ]  # fmt: skip
    header = ["method", "paper: intermediate memory", "paper: time", "ours: above inputs, gradients included", "ours: time"]
    said += [picture("linear", "The linear example"), markdown_table(header, rows), origin(large.values())]
    said.append(
        "In 16 bits X and Y take 32.8 GB each at this shape, more than the paper's intermediate memory of standard "
        "backpropagation: its memory column cannot be for the shape it states, so only the trend compares. Ours includes the two "
        "weight gradients."
    )
    if small:
        shape = next(iter(small.values()))["shape"]
        rows = [
            ["standard" if parts == 1 else f"{parts} partitions", f"{record['peak_bytes'] / 1e6:.1f} MB", _ms(record)]
            for parts, record in small.items()
        ]
        said.append(f"At {shape['rows']:,} x {shape['width']}, where it can be tried without a GPU:")
        said += [markdown_table(["method", "above inputs", "time"], rows), origin(small.values())]
    return said


def _precision(records: Records, paper: dict[str, Any]) -> list[str]:
    kinds = ("base16", "stream16", "stream32")
    header = ["modules", *(f"{kind}, absolute" for kind in kinds), *(f"{kind}, relative" for kind in kinds)]
    rows = [
        [f"paper: {group}", *(f"{row['abs'][k]:.2e}" for k in kinds), *(f"{row['rel_percent'][k]:.2f}%" for k in kinds)]
        for group, row in paper["gradient_error"].items()
    ]
    said = [
        "Errors of gradients against plain backpropagation in fp32. The paper's relative error is the mean of each element's "
        "own; ours is that of the whole group, the norm of g - g32 over that of g32, averaged over random models (root mean "
        "square), which elements near zero do not decide. Absolute errors are means over elements and depend on "
        "the size of the model.",
    ]
    found = latest(records["precision"], "model", "device")
    for record in found.values():
        rows += [
            [
                f"{record['model']}: {group}",
                *(f"{row[k]['absolute']:.2e}" for k in kinds),
                *(f"{100 * row[k]['relative']:.2g}%" for k in kinds),
            ]
            for group, row in record["table"].items()
        ]
    said.append(markdown_table(header, rows))
    if not found:
        return [*said, not_run("there is no record (`bench precision`)")]
    for record in found.values():
        shape = record["shape"]
        said.append(
            f"{record['model']} on {record['device']}: {shape['models']} small random copies of {shape['layers']} layers, "
            f"{shape['tokens']} tokens in chunks of {shape['chunk_size']}. Streamed {record['dtype']} errors are "
            f"{record['ratio']:.3f} times plain ones, pooled over all parameters."
        )
    return [*said, origin(found.values())]


def _small_card(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs = paper["rtx3090_24gb_8b_lora_rank32"]
    said = [
        f"The paper's StreamBP reaches {theirs['streambp_max_length_thousands']},000 tokens on an RTX 3090 with Qwen3-8B and "
        f"LoRA of rank 32, {theirs['ratio_over_checkpoint']} times as many as checkpointing."
    ]
    limit = 24 * 2**30
    cells = [r for r in records["max_length"] if (card_bytes(r) or limit + 1) <= limit and r["model"] == "qwen3-8b"]
    if not cells:
        return [*said, not_run("there is no record under a cap of 24 GiB or less (`bench max-length --gpu-memory 24GiB`)")]
    rows = [
        _length_row(record, paper["max_sequence_length_thousands"]) for record in latest(cells, "training", "seq_len").values()
    ]
    header = ["model", "tokens", "of the paper's in 80 GB", "inputs kept", "layers built", "peak", "of it ballast", "cap"]
    return [*said, markdown_table(header, rows), origin(cells)]


def _zero2(records: Records, paper: dict[str, Any]) -> list[str]:
    lengths, times = paper["zero2_max_sequence_length_thousands"], paper["zero2_time_per_sample_seconds"]
    methods = {"checkpoint": "paper: checkpointing", "streambp": "paper: StreamBP"}
    return [
        "Longest sequence in thousands of tokens, Qwen3-8B, by number of GPUs:",
        markdown_table(
            ["GPUs", *map(str, lengths["gpus"])], [[text, *map(str, lengths[name])] for name, text in methods.items()]
        ),
        "Seconds a sample, by length:",
        markdown_table(
            ["tokens", *(f"{length:,}" for length in times["sequence_length"])],
            [[text, *map(str, times[name])] for name, text in methods.items()],
        ),
        not_run(
            "it takes several GPUs; [distributed](../docs/distributed.md) has what the formulas give for the first table, "
            "and what is tested on CPU"
        ),
    ]


def _head(records: Records, paper: dict[str, Any]) -> list[str]:
    if not records["head"]:
        return [not_run("there is no record (`bench head`)")]
    found = latest(records["head"], "device", "objective", "method")
    rows = [
        [objective, method, _ms(record), "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 1e9:.2f} GB"]
        for (_, objective, method), record in found.items()
    ]
    return [markdown_table(["objective", "method", "step", "above inputs and gradients"], rows), origin(found.values())]


SECTIONS: tuple[tuple[str, Callable[[Records, dict[str, Any]], list[str]]], ...] = (
    ("Memory against length", _memory),
    ("Time against length", _time),
    ("Batch sizes", _batches),
    ("Longest sequence by objective", _longest),
    ("Mini-sequences (MsT)", _mini_sequences),
    ("Partition sizes", _partitions),
    ("ZeRO-2", _zero2),
    ("Linear example", _linear),
    ("Gradient precision", _precision),
    ("A card of 24 GB", _small_card),
    ("Beyond the paper: the head alone", _head),
)
