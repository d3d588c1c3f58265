"""A report as a picture: one stacked bar of components for each way to compute the step, and one for host memory."""

from __future__ import annotations

from pathlib import Path

from streamgrad.hf.estimate import Report
from streamgrad.memory.costs import COMPONENTS

# Below this share of the tallest bar a component's name would not fit beside it.
_LABELLED = 0.03


def draw(report: Report, path: Path) -> None:
    """Write the picture as a PNG, or as whatever the name's ending says."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    streamed, plain = report.streamed, report.checkpointing
    bars = [("streamgrad\non the GPU", streamed.device_bytes), ("checkpointing\non the GPU", plain.device_bytes)]
    if streamed.host_bytes:
        bars.insert(1, ("streamgrad\non the host", streamed.host_bytes))
    colors = {name: colormaps["tab20"](place) for place, name in enumerate(COMPONENTS)}
    figure = Figure(figsize=(2.2 + 2.2 * len(bars), 6.0), layout="constrained")
    axes = figure.add_subplot()
    tallest = max(sum(parts.values()) for _, parts in bars) / 2**30
    for place, (_, parts) in enumerate(bars):
        bottom = 0.0
        for name in COMPONENTS:
            height = parts.get(name, 0.0) / 2**30
            if not height:
                continue
            axes.bar(place, height, 0.6, bottom, color=colors[name], label=name, edgecolor="white", linewidth=0.5)
            if height > _LABELLED * tallest:
                axes.text(place, bottom + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8)
            bottom += height
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # or the line of the GPU would cross it
        axes.text(place, bottom + 0.015 * tallest, f"{bottom:.1f} GiB", ha="center", va="bottom", weight="bold", bbox=box)
    axes.axhline(report.gpu_memory / 2**30, color="black", linestyle="--", linewidth=1.0)
    axes.text(len(bars) - 0.6, report.gpu_memory / 2**30, " the GPU", ha="left", va="bottom", fontsize=8)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(-0.5, len(bars) - 0.1)
    axes.set_ylim(0.0, 1.08 * max(tallest, report.gpu_memory / 2**30))
    axes.set_ylabel("GiB in the largest phase")
    axes.set_title(report.title.replace(": ", ":\n"), fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ordered = [name for name in reversed(COMPONENTS) if name in unique]
    figure.legend([unique[name] for name in ordered], ordered, loc="outside right center", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, format=path.suffix.removeprefix(".") or "png")  # by itself it would write another file
