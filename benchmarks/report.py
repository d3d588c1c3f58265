"""Writes `benchmarks/REPORT.md`: every table and figure of the paper, ours from the records beside the paper's own.

Nothing here measures. A number is a record's, the paper's (`paper.json`), or a quotient of the two; what has no record is said to
be not run, and why. The same records give the same text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.figures import draw_plots
from benchmarks.paper import read_paper
from benchmarks.report_by_memory import by_memory
from benchmarks.report_lengths import longest, memory, mini_sequences, partitions, predicted, small_card
from benchmarks.report_objectives import families, shared_prompts
from benchmarks.report_training import runs, train_steps
from benchmarks.selection import Record, Records, automatic_steps, latest, read_records
from benchmarks.words import STEP_METHODS, TIMED_METHODS, gb, markdown_table, ms, no_record, not_run, or_dash, origin, picture

BATCH_TOKENS = 9_000
ENGINE_METHODS = {
    "streamgrad-fsdp2": "FSDP2", "streamgrad-fsdp2-host": "FSDP2, weights on the host", "streamgrad-zero3": "DeepSpeed ZeRO-3",
}  # fmt: skip


def write_report(results: Path, out: Path) -> list[Path]:
    """Write the report and, in `plots` beside it, its pictures. Returns their paths, the report's first."""
    records, paper = read_records(results), read_paper()
    pictures = draw_plots(records, paper, out.parent / "plots")
    out.write_text(render(records, paper))
    return [out, *pictures]


def render(records: Records, paper: dict[str, Any]) -> str:
    """Return the text of the whole report."""
    parts = [
        "# Benchmarks, beside the paper's",
        "Written by `python -m benchmarks report` from the records in [results](results). The paper is "
        f"*{paper['source']}*; its hardware is {paper['hardware']}, ours is named with each table. GB are 10^9 bytes. Peaks are "
        "the allocator's, weights and gradients included. Weights are random, in bf16, and no optimizer runs, unless said "
        "otherwise.",
    ]
    for title, section in SECTIONS:
        parts += [f"## {title}", *section(records, paper)]
    return "\n\n".join(parts) + "\n"


# Sections, in the order of the paper


def _time(records: Records, paper: dict[str, Any]) -> list[str]:
    steps, theirs = automatic_steps(records["step"]), paper["bp_time_seconds"]
    column = {length: place for place, length in enumerate(theirs["sequence_length"])}
    rows = []
    for length in sorted({*column, *(length for _, length in steps)}):
        place = column.get(length)
        cells = [None if place is None else theirs[name][place] for name in ("baseline_checkpoint", "mst", "streambp")]
        ours = {method: steps.get((method, length)) for method in TIMED_METHODS}
        hf, streamed = [(ours[method] or {}).get("step_ms") for method in ("hf", "streamgrad")]
        gains = [a / b if a and b else None for a, b in ((cells[0], cells[2]), (hf, streamed))]
        rows.append([
            f"{length:,}", *(or_dash(cell, "{:.1f} s") for cell in cells), *map(ms, ours.values()),
            *(or_dash(gain, "{:.2f}x") for gain in gains),
        ])  # fmt: skip
    header = ["tokens", "paper: checkpointing", "paper: MsT", "paper: StreamBP"]
    header += [f"ours: {name}" for name in TIMED_METHODS.values()]
    return [
        f"The paper: {theirs['model']}. Ours: Qwen3-4B, one sequence, medians. The last two columns are checkpointing's time "
        "over that of streaming, each on its own hardware.",
        picture("time", "Step time against length"),
        markdown_table([*header, "paper: gain", "ours: gain over transformers"], rows),
        origin(steps.values()),
    ]


def _batches(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs = paper["bp_time_per_sample_by_batch"]
    names = {"baseline_checkpoint": "checkpointing", "mst": "MsT", "streambp": "StreamBP"}
    rows = [[f"paper: {text}", *(or_dash(cell, "{:.2f} s") for cell in theirs[name])] for name, text in names.items()]
    by_batch = {batch: automatic_steps(records["step"], batch=batch) for batch in theirs["batch"]}
    cells = {
        method: [steps.get((method, BATCH_TOKENS)) for steps in by_batch.values()] for method in TIMED_METHODS
    }  # fmt: skip
    for method, text in TIMED_METHODS.items():
        rows.append([f"ours: {text}", *map(_seconds_a_sample, cells[method])])
    measured = [record for found in cells.values() for record in found if record]
    return [
        f"{theirs['model']}, seconds a sample.",
        markdown_table(["batch", *map(str, theirs["batch"])], rows),
        origin(measured) if measured else no_record(f"step --seq {BATCH_TOKENS} --batch 1,2,4,16"),
        "The paper's column for one sequence is not its own time at 9,000 tokens in the table above, but that at 12,000.",
    ]


def _seconds_a_sample(record: Record | None) -> str:
    return ms(record) if record is None or record["step_ms"] is None else f"{record['step_ms'] / 1e3 / record['batch']:.3f} s"


def _linear(records: Records, paper: dict[str, Any]) -> list[str]:
    theirs, said = paper["linear_example"], [f"{paper['linear_example']['shape']}."]
    of_paper = [record for record in records["linear"] if record["shape"]["rows"] == 1_000_000]
    others = [record for record in records["linear"] if record not in of_paper]
    large, small = (
        {parts: record for (*_, parts), record in latest(found, "device", "dtype", "partitions").items()}
        for found in (of_paper, others)
    )
    rows = [
        [
            "standard" if parts == 1 else f"{parts} partitions", f"{theirs['intermediate_gb'][place]} GB",
            f"{1e3 * theirs['seconds'][place]:,.0f} ms", gb(large.get(parts)), ms(large.get(parts)),
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
            ["standard" if parts == 1 else f"{parts} partitions", f"{record['peak_bytes'] / 1e6:.1f} MB", ms(record)]
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
        return [*said, no_record("precision")]
    for record in found.values():
        shape = record["shape"]
        said.append(
            f"{record['model']} on {record['device']}: {shape['models']} small random copies of {shape['layers']} layers, "
            f"{shape['tokens']} tokens in chunks of {shape['chunk_size']}. Streamed {record['dtype']} errors are "
            f"{record['ratio']:.3f} times plain ones, pooled over all parameters."
        )
    return [*said, origin(found.values())]


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
        return [no_record("head")]
    found = latest(records["head"], "device", "objective", "method")
    rows = [
        [objective, method, ms(record), "-" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 1e9:.2f} GB"]
        for (_, objective, method), record in found.items()
    ]
    return [markdown_table(["objective", "method", "step", "above inputs and gradients"], rows), origin(found.values())]


def _engines(records: Records, paper: dict[str, Any]) -> list[str]:
    found = latest(
        ({**record, "keep": record["policy"].get("keep")} for record in records["step"]),
        "method", "model", "seq_len", "keep", "accumulates", "flash",
    )  # fmt: skip
    rows, used = [], []
    for (method, *cell), record in found.items():
        plain = found.get(("streamgrad", *cell))
        if method not in ENGINE_METHODS or plain is None or not plain["step_ms"] or not record["step_ms"]:
            continue
        times, bytes_more = record["step_ms"] / plain["step_ms"], record["peak_bytes"] - plain["peak_bytes"]
        added = ", added to gradients" if record["accumulates"] else ""
        shape = [f"{record['model']}, {record['seq_len']:,} tokens{added}", ENGINE_METHODS[method]]
        rows.append([*shape, ms(plain), ms(record), f"{times:.3f}x", gb(plain), gb(record), f"{bytes_more / 1e9:.1f} GB"])
        used += [plain, record]
    if not rows:
        return [no_record("step --methods streamgrad,streamgrad-fsdp2,streamgrad-zero3")]
    header = ["step", "engine", "without", "under it", "time", "without", "under it", "more"]
    return [
        "One process is the only rank, so nothing is gained by sharding: what is left is what the engine costs. FSDP2 holds "
        "units that it has gathered beside their shards (at 16,000 tokens embeddings and head too, which were no units of their "
        "own). DeepSpeed holds gradients from its start on, so that a step is best compared with one that adds to gradients of "
        "another; its optimizer holds a copy of the weights that it steps, here in bf16 (16.4 GB for Qwen3-8B), at 16,000 tokens "
        "in fp32.",
        markdown_table(header, rows),
        origin(used),
    ]


def _flash(records: Records, paper: dict[str, Any]) -> list[str]:
    usual, newer = (automatic_steps(records["step"], flash=name) for name in ("FA2", "FA4"))
    rows = []
    for length in sorted({length for _, length in newer}):
        cells = [steps.get((method, length)) for method in STEP_METHODS for steps in (usual, newer)]
        rows.append([f"{length:,}", *map(ms, cells)])
    if not rows:
        return [no_record("step --flash FA4")]
    header = [f"{text}{what}" for text in STEP_METHODS.values() for what in ("", ", FA4")]
    return [
        'Qwen3-4B, one sequence, medians; FA4 after `torch.nn.attention.activate_flash_attention_impl("FA4")`, and for the peers '
        "with torch's scaled_dot_product_attention kept from taking cuDNN.",
        markdown_table(["tokens", *header], rows),
        origin(newer.values()),
    ]


SECTIONS: tuple[tuple[str, Callable[[Records, dict[str, Any]], list[str]]], ...] = (
    ("Memory against length", memory),
    ("Time against length", _time),
    ("Time by memory", by_memory),
    ("Batch sizes", _batches),
    ("Longest sequence by objective", longest),
    ("Mini-sequences (MsT)", mini_sequences),
    ("Partition sizes", partitions),
    ("ZeRO-2", _zero2),
    ("Linear example", _linear),
    ("Gradient precision", _precision),
    ("A card of 24 GB", small_card),
    ("Longest sequences, predicted and found", predicted),
    ("Beyond the paper: steps with an optimizer", train_steps),
    ("Beyond the paper: runs on sequences of different lengths", runs),
    ("Beyond the paper: the head alone", _head),
    ("Beyond the paper: FlashAttention-4", _flash),
    ("Beyond the paper: engines with one rank", _engines),
    ("Beyond the paper: prompts computed once", shared_prompts),
    ("Beyond the paper: experts, images, quantised weights", families),
)
