"""Draws the report's pictures, ours beside the paper's: time, memory, longest sequences, chunk sizes, the linear example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report_by_memory import PEERS, our_points, peer_points
from benchmarks.report_objectives import PICTURED_COMPLETION
from benchmarks.selection import (
    Record,
    Records,
    Series,
    automatic_steps,
    has_faulty_peak,
    is_papers_card,
    latest,
    memory_series,
    paper_longest,
    partition_records,
    token_bytes,
)

_COLORS = {"hf": "tab:gray", "mst": "tab:purple", "liger": "tab:orange", "liger-offload": "tab:orange", "streamgrad": "tab:blue"}
_NAMES = {
    "hf": "transformers, checkpointing",
    "mst": "MsT, checkpointing",
    "liger": "Liger, checkpointing",
    "liger-offload": "Liger, checkpoints on the host",
    "streamgrad": "streamgrad",
}
_PAPER = {"color": "tab:green", "marker": "s", "markersize": 4, "linestyle": "--"}


def draw_plots(records: Records, paper: dict[str, Any], folder: Path) -> list[Path]:
    """Write one PNG a picture that has records into `folder`, without the metadata that would differ from run to run."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in _PICTURES.items():
        figure = draw(records, paper)
        if figure is not None:
            drawn.append(folder / f"{name}.png")
            figure.savefig(drawn[-1], dpi=120, metadata={"Software": None})
    return drawn


def _figure(panels: int = 1, width: float = 6.4, *, stacked: bool = False, columns: int | None = None) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    columns = columns or (1 if stacked else panels)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, (3.4 if stacked else 4.4) * rows), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(panels)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    return figure, axes


def _measured(rows: dict[int, Record], field: str, unit: float) -> tuple[list[float], list[float]]:
    """Return thousands of tokens and a measurement, for the records that have a valid one."""
    faulty = {length for length, record in rows.items() if field == "peak_bytes" and has_faulty_peak(record)}
    lengths = sorted(length for length, record in rows.items() if record[field] is not None and length not in faulty)
    return [length / 1e3 for length in lengths], [rows[length][field] / unit for length in lengths]


def _by_method(cells: dict[tuple[str, int], Record]) -> dict[str, dict[int, Record]]:
    rows: dict[str, dict[int, Record]] = {method: {} for method in _NAMES}
    for (method, length), record in cells.items():
        if method in rows:
            rows[method][length] = record
    return {method: found for method, found in rows.items() if found}


def _time(records: Records, paper: dict[str, Any]) -> Any:
    figure, (axes,) = _figure(width=7.5)
    for method, rows in _by_method(automatic_steps(records["step"])).items():
        device = next(iter(rows.values()))["device"].removeprefix("NVIDIA ")
        axes.plot(*_measured(rows, "step_ms", 1e3), "o-", color=_COLORS[method], label=f"{_NAMES[method]} ({device})")
    theirs = paper["bp_time_seconds"]
    for name, text, color in (("baseline_checkpoint", "checkpointing", "tab:olive"), ("streambp", "StreamBP", "tab:green")):
        points = [(n / 1e3, s) for n, s in zip(theirs["sequence_length"], theirs[name], strict=True) if s is not None]
        axes.plot(*zip(*points, strict=True), **_PAPER | {"color": color}, label=f"paper: {text} (A800)")
    ticks = [1, 2, 4, 6, 12, 24, 36, 72]
    axes.set(
        xscale="log", yscale="log", xlabel="tokens (thousands)", ylabel="forward + backward (s)", title="Qwen3-4B, one sequence"
    )
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.set_yticks([], minor=True)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _time_by_memory(records: Records, paper: dict[str, Any]) -> Any:
    """Draw, for each length with peers that keep everything or with a budget of ours, all steps and both frontiers."""
    ours, peers = our_points(records), peer_points(records)
    lengths = [length for length in ours if len(ours[length]) + len(peers.get(length, [])) > 3]
    if not lengths:
        return None
    columns = min(3, len(lengths))
    figure, panels = _figure(len(lengths), 4.2, columns=columns)
    colors = {name: f"C{place + 1}" for place, name in enumerate(PEERS.values())}
    for axes, length in zip(panels, lengths, strict=True):
        for point in peers.get(length, []):
            axes.plot(*_place(point), "o", color=colors[point.name], label=point.name)
        axes.plot(*zip(*map(_place, _frontier(peers.get(length, []))), strict=True), "--", color="tab:gray", zorder=0)
        axes.plot(*zip(*map(_place, ours[length]), strict=True), "D", color="tab:blue", label="streamgrad")
        axes.plot(*zip(*map(_place, _frontier(ours[length])), strict=True), "-", color="tab:blue", zorder=0)
        axes.set(title=f"{length:,} tokens", xlabel="peak device memory (GB)", ylabel="forward + backward (ms)")
        axes.set_xscale("log")
        axes.set_xticks([16, 32, 64, 128], ["16", "32", "64", "128"])
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    handles = {text: line for panel in panels for line, text in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    return figure


def _place(point: Any) -> tuple[float, float]:
    return point.record["peak_bytes"] / 1e9, point.record["step_ms"]


def _frontier(points: list[Any]) -> list[Any]:
    """Return the points that no other one beats in both, from the smallest to the fastest."""
    found: list[Any] = []
    for point in sorted(points, key=_place):
        if not found or point.record["step_ms"] < found[-1].record["step_ms"]:
            found.append(point)
    return found


def _memory(records: Records, paper: dict[str, Any]) -> Any:
    figure, (whole, cut) = _figure(2, 4.7)
    for method, rows in _by_method(automatic_steps(records["step"])).items():
        whole.plot(*_measured(rows, "peak_bytes", 1e9), "o-", color=_COLORS[method], label=_NAMES[method])
    whole.set(title="Qwen3-4B, no limit below the card's", xlabel="tokens (thousands)", ylabel="peak device memory (GB)")
    for series, rows in memory_series(records["memory"]).items():
        if not series.is_whole and series.training == "full":
            _draw_series(cut, series, rows, with_cost=True)
    cut.set(title="Qwen3-8B cut to 2 layers, inputs on the host", xlabel="tokens (thousands)", ylabel="peak device memory (GB)")
    for axes in (whole, cut):
        _finish_memory(axes)
    return figure


def _draw_series(axes: Any, series: Series, rows: dict[int, Record], *, with_cost: bool = False) -> None:
    cost = token_bytes(rows) if with_cost else None
    label = _NAMES[series.method] + (", inputs on the host" if series.on_host and not with_cost else "")
    label += "" if cost is None else f": {cost / 1e3:.0f} KB a token"
    style = "o--" if series.on_host and not with_cost else "o-"
    axes.plot(*_measured(rows, "peak_bytes", 1e9), style, color=_COLORS[series.method], label=label)


def _finish_memory(axes: Any) -> None:
    """Start both axes at zero and leave room for the legend."""
    lines = len(axes.get_lines())
    axes.set_xlim(left=0)
    axes.set_ylim(0, (1.1 + 0.07 * lines) * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize=9, loc="upper left")


def _memory_models(records: Records, paper: dict[str, Any]) -> Any:
    """Draw a panel for each whole model. Lines have the same meaning in all panels, so one legend does."""
    found = {series: rows for series, rows in memory_series(records["memory"]).items() if series.is_whole}
    models = sorted({series[:2] for series in found}, key=lambda key: int(key[0].partition("-")[2].rstrip("b")))
    if not models:
        return None
    figure, panels = _figure(len(models), 4.2)
    for axes, (model, training) in zip(panels, models, strict=True):
        for series, rows in found.items():
            if series[:2] == (model, training):
                _draw_series(axes, series, rows)
        size = model.partition("-")[2].upper()
        name = f"Qwen3-{size}, {'LoRA' if training == 'lora' else 'full training'}"
        axes.set(title=name, xlabel="tokens (thousands)", ylabel="peak device memory (GB)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
    labels = {text: line for axes in panels for line, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _partition(records: Records, paper: dict[str, Any]) -> Any:
    found = partition_records(records)
    if not found:
        return None
    figure, (time, memory) = _figure(2, 4.6)
    for (model, length), sizes in found.items():
        label = f"{model.replace('qwen', 'Qwen').replace('b', 'B')}, {length:,} tokens"
        for axes, field, unit in ((time, "step_ms", 1e3), (memory, "peak_bytes", 1e9)):
            places = [size for size, record in sizes.items() if record[field] is not None]
            axes.plot(places, [sizes[size][field] / unit for size in places], "o-", label=label)
    ticks = sorted({size for sizes in found.values() for size in sizes})
    for axes, name in ((time, "forward + backward (s)"), (memory, "peak device memory (GB)")):
        axes.set(xscale="log", xlabel="chunk size (tokens)", ylabel=name)
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30)
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1.2 * axes.get_ylim()[1])
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _max_length(records: Records, paper: dict[str, Any]) -> Any:
    theirs = paper["max_sequence_length_thousands"]
    objectives = {"sft": "SFT, one sequence", "dpo": "DPO, a pair", "grpo": "GRPO, 8 completions"}
    figure, panels = _figure(len(objectives), 8.6, stacked=True)
    large = [record for record in records["max_length"] if is_papers_card(record) and record["step_ms"] is not None]
    for axes, (objective, title) in zip(panels, objectives.items(), strict=True):
        own = [record for record in large if record["objective"] == objective]
        _longest_bars(axes, own, theirs, theirs[objective])
        axes.set(ylabel="tokens (thousands)", title=f"{title}, 80 GB")
    panels[0].legend(frameon=False, fontsize=9, loc="center right")
    figure.supxlabel(
        "ours with fewer layers and ballast for the others; a column without bars has no figure in the paper", size=9
    )
    return figure


def _longest_bars(axes: Any, records: list[Record], theirs: dict[str, Any], lengths: dict[str, list[float | None]]) -> None:
    """Draw a group of bars for each column of the paper's table, with the longest of our steps that ran."""
    ours: dict[bool, dict[int, float]] = {False: {}, True: {}}  # by whether inputs are on the host
    for record in records:
        column = f"{record['model'].removeprefix('qwen3-').upper()} {'LoRA' if record['training'] == 'lora' else 'full'}"
        if paper_longest(record, theirs) is not None:
            heights = ours[bool(record["host_bytes"])]
            place = theirs["columns"].index(column)
            heights[place] = max(heights.get(place, 0.0), record["seq_len"] / 1e3)
    bars: tuple[tuple[str, str, dict[int, float]], ...] = (
        ("paper: checkpointing", "tab:olive", _present(lengths["checkpoint"])),
        ("paper: StreamBP", "tab:green", _present(lengths["streambp"])),
        ("streamgrad, inputs on the device: ran", "tab:blue", ours[False]),
        ("streamgrad, inputs on the host: ran", "tab:cyan", ours[True]),
    )
    width = 0.21
    for shift, (label, color, heights) in enumerate(bars):
        centers = [place + (shift - 1.5) * width for place in heights]
        axes.bar(centers, list(heights.values()), 0.9 * width, color=color, label=label)
        for center, height in zip(centers, heights.values(), strict=True):
            axes.text(center, height, f"{height:.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(theirs["columns"])), ["Qwen3-" + name.replace(" ", "\n") for name in theirs["columns"]])
    axes.set_xlim(-0.6, len(theirs["columns"]) - 0.4)
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])


def _present(values: list[float | None]) -> dict[int, float]:
    return {place: value for place, value in enumerate(values) if value is not None}


def _linear(records: Records, paper: dict[str, Any]) -> Any:
    figure, (memory, time) = _figure(2, 4.6)
    theirs = paper["linear_example"]
    large = latest((r for r in records["linear"] if r["shape"]["rows"] == 1_000_000), "partitions")
    rows = {parts: record for (parts,), record in large.items() if record["step_ms"] is not None}
    places = {parts: place for place, parts in enumerate(theirs["partitions"])}
    devices = ", ".join(dict.fromkeys(record["device"].removeprefix("NVIDIA ") for record in large.values()))
    memory.plot(list(places.values()), theirs["intermediate_gb"], **_PAPER, label="paper: intermediate")
    time.plot(list(places.values()), theirs["seconds"], **_PAPER, label="paper (A800)")
    for axes, field, unit, label in (
        (memory, "peak_bytes", 1e9, "ours: above inputs, gradients included"),
        (time, "step_ms", 1e3, f"ours ({devices})"),
    ):
        heights = [record[field] / unit for record in rows.values()]
        axes.plot([places[parts] for parts in rows], heights, "o-", color="tab:blue", label=label)
        axes.set_xticks(list(places.values()), ["standard" if parts == 1 else str(parts) for parts in places])
        axes.set_xlabel("partitions of the rows of X")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=9, loc="center right")
    memory.set(ylabel="memory (GB)", title="Memory")
    time.set(ylabel="time (s)", title="Time")
    for (parts,), record in large.items():
        if record["error"]:
            for axes in (memory, time):
                axes.annotate(f"ours: {record['error']}", (places[parts], 0), (4, 6), textcoords="offset points", fontsize=9)
    return figure


def _shared_prompts(records: Records, paper: dict[str, Any]) -> Any:
    """Draw how much faster a prompt computed once is, over its length, for groups of several sizes."""
    pictured = [row for row in records["shared_prompts"] if row["completion_tokens"] == PICTURED_COMPLETION and row["step_ms"]]
    cells = latest(pictured, "group", "prompt_tokens", "method")
    if not cells:
        return None
    figure, (axes,) = _figure()
    for group in sorted({group for group, _, _ in cells}):
        prompts = sorted({prompt for size, prompt, _ in cells if size == group})
        pairs = [(cells.get((group, prompt, "separate")), cells.get((group, prompt, "shared"))) for prompt in prompts]
        gains = [every["step_ms"] / once["step_ms"] if every and once else float("nan") for every, once in pairs]
        axes.plot([prompt / PICTURED_COMPLETION for prompt in prompts], gains, "o-", label=f"{group} completions")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="prompt tokens / completion tokens", ylabel="times as fast as every row by itself")
    axes.set_title("A prompt computed once (Qwen3-4B, GRPO, completions of 1,000 tokens)", size=10)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


_PICTURES: dict[str, Callable[[Records, dict[str, Any]], Any]] = {
    "time": _time,
    "time_by_memory": _time_by_memory,
    "memory": _memory,
    "memory_models": _memory_models,
    "max_length": _max_length,
    "partition": _partition,
    "linear": _linear,
    "shared_prompts": _shared_prompts,
}
