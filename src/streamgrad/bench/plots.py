"""The report's pictures: time, memory, longest sequences and the linear example, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from streamgrad.bench.selection import Record, Records, automatic_steps, has_faulty_peak, latest, paper_longest, slopes

_COLORS = {"hf": "tab:gray", "liger": "tab:orange", "liger-offload": "tab:orange", "streamgrad": "tab:blue"}
_NAMES = {
    "hf": "transformers, checkpointing", "liger": "Liger, checkpointing", "liger-offload": "Liger, checkpoints on the host",
    "streamgrad": "streamgrad",
}  # fmt: skip
_PAPER = {"color": "tab:green", "marker": "s", "markersize": 4, "linestyle": "--"}


def draw_plots(records: Records, paper: dict[str, Any], folder: Path) -> list[Path]:
    """Write one PNG a picture into `folder`, without the metadata that would differ from run to run."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, draw in _PICTURES.items():
        path = folder / f"{name}.png"
        draw(records, paper).savefig(path, dpi=120, metadata={"Software": None})
        drawn.append(path)
    return drawn


def _figure(panels: int = 1, width: float = 6.4) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(width * panels, 4.4), layout="constrained")
    axes = [figure.add_subplot(1, panels, place + 1) for place in range(panels)]
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    return figure, axes


def _measured(rows: dict[int, Record], field: str, unit: float) -> tuple[list[float], list[float]]:
    """Thousands of tokens, and a measurement, of the records that have a valid one."""
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
    ticks = [6, 12, 24, 36, 72]
    axes.set(
        xscale="log", yscale="log", xlabel="tokens (thousands)", ylabel="forward + backward (s)", title="Qwen3-4B, one sequence"
    )
    axes.set_xticks(ticks, map(str, ticks))
    axes.set_xticks([], minor=True)
    axes.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.set_yticks([], minor=True)
    axes.legend(frameon=False, fontsize=9)
    return figure


def _memory(records: Records, paper: dict[str, Any]) -> Any:
    figure, (whole, cut) = _figure(2, 4.7)
    for method, rows in _by_method(automatic_steps(records["step"])).items():
        whole.plot(*_measured(rows, "peak_bytes", 1e9), "o-", color=_COLORS[method], label=_NAMES[method])
    whole.set(title="Qwen3-4B, no limit below the card's", xlabel="tokens (thousands)", ylabel="peak device memory (GB)")
    costs = slopes(records["memory"])
    found = latest(records["memory"], "model", "method", "seq_len")
    for model in dict.fromkeys(model for model, _, _ in found):
        own = {(method, length): record for (name, method, length), record in found.items() if name == model}
        for method, rows in _by_method(own).items():
            cost = f": {costs[model, method] / 1e3:.0f} KB a token" if (model, method) in costs else ""
            label = f"{_NAMES[method]}{cost}"
            cut.plot(*_measured(rows, "peak_bytes", 1e9), "o-", color=_COLORS[method], label=label)
    cut.set(title="Qwen3-8B cut to 2 layers, inputs on the host", xlabel="tokens (thousands)", ylabel="peak device memory (GB)")
    for axes in (whole, cut):
        top = axes.get_ylim()[1]
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.25 * top)
        axes.legend(frameon=False, fontsize=9, loc="upper left")
    return figure


def _max_length(records: Records, paper: dict[str, Any]) -> Any:
    figure, (axes,) = _figure(width=8.6)
    theirs = paper["max_sequence_length_thousands"]
    ours: dict[bool, dict[int, float]] = {False: {}, True: {}}  # by whether inputs are on the host
    places = {round(1e3 * tokens): place for place, tokens in enumerate(theirs["sft"]["streambp"])}
    for record in records["max_length"]:
        longest = paper_longest(record, theirs)
        if longest is not None and record["step_ms"] is not None:
            column = ours[bool(record["host_bytes"])]
            place = places[round(longest)]
            column[place] = max(column.get(place, 0.0), record["seq_len"] / 1e3)
    bars: tuple[tuple[str, str, dict[int, float]], ...] = (
        ("paper: checkpointing", "tab:olive", dict(enumerate(theirs["sft"]["checkpoint"]))),
        ("paper: StreamBP", "tab:green", dict(enumerate(theirs["sft"]["streambp"]))),
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
    axes.set(ylabel="tokens (thousands)", title="SFT, one sequence, 80 GB (ours with fewer layers and ballast for the others)")
    axes.legend(frameon=False, fontsize=9)
    return figure


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
        axes.legend(frameon=False, fontsize=9)
    memory.set(ylabel="memory (GB)", title="Memory")
    time.set(ylabel="time (s)", title="Time")
    for (parts,), record in large.items():
        if record["error"]:
            for axes in (memory, time):
                axes.annotate(f"ours: {record['error']}", (places[parts], 0), (4, 6), textcoords="offset points", fontsize=9)
    return figure


_PICTURES: dict[str, Callable[[Records, dict[str, Any]], Any]] = {
    "time": _time,
    "memory": _memory,
    "max_length": _max_length,
    "linear": _linear,
}
