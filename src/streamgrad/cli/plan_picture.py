"""A report as a picture: one stacked bar of components for each way to compute the step, and one for host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamgrad.hf.estimates.report import Report
from streamgrad.memory.costs import COMPONENTS

# Below this share of the tallest bar a component's name would not fit beside it.
_LABELLED = 0.03


def draw(report: Report, path: Path) -> None:
    """Write the picture as a PNG, or as whatever the name's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = picture_of(report)
    figure.savefig(path, dpi=150, format=path.suffix.removeprefix(".") or "png")  # by itself it would write another file


def picture_of(report: Report) -> Any:
    """Return the picture as a matplotlib figure."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    streamed, plain = report.streamed, report.checkpointing
    bars = [("streamgrad\non the GPU", streamed.device_bytes), ("checkpointing\non the GPU", plain.device_bytes)]
    if streamed.host_bytes:
        bars.insert(1, ("streamgrad\non the host", streamed.host_bytes))
    colors = {name: colormaps["tab20"](place) for place, name in enumerate(COMPONENTS)}
    figure = Figure(figsize=(2.2 + 2.2 * len(bars), 6.0), layout="constrained")
    axes = figure.add_subplot()
    card_gib = report.gpu_memory / 2**30
    tallest = max(card_gib, *(sum(parts.values()) / 2**30 for _, parts in bars))
    for place, (_, parts) in enumerate(bars):
        bottom = 0.0
        for name in COMPONENTS:
            height = parts.get(name, 0.0) / 2**30
            if not height:
                continue
            axes.bar(place, height, 0.6, bottom, color=colors[name], label=name, edgecolor="white", linewidth=0.5)
            if height > _LABELLED * tallest:
                axes.text(
                    place, bottom + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=8, bbox=_box(colors[name])
                )
            bottom += height
        # Above the line of the GPU, where that would go through it.
        above = card_gib if bottom < card_gib < bottom + 0.07 * tallest else bottom
        axes.text(place, above + 0.015 * tallest, f"{bottom:.1f} GiB", ha="center", va="bottom", weight="bold")
    axes.axhline(card_gib, color="black", linestyle="--", linewidth=1.0)
    card = f" {report.gpu},\n {card_gib:.1f} GiB"
    axes.text(len(bars) - 0.65, card_gib, card, ha="left", va="bottom", fontsize=8)
    axes.set_xticks(range(len(bars)), [name for name, _ in bars])
    axes.set_xlim(-0.5, len(bars) - 0.1)
    axes.set_ylim(0.0, 1.08 * tallest)
    axes.set_ylabel("GiB in the largest phase")
    axes.set_title(report.title.replace(": ", ":\n"), fontsize=10)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    ordered = [name for name in reversed(COMPONENTS) if name in unique]
    figure.legend([unique[name] for name in ordered], ordered, loc="outside right center", frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _box(color: Any) -> dict[str, Any]:
    """Return what a number is written on, or the line of the GPU would strike it through."""
    return {"facecolor": color, "edgecolor": "none", "pad": 1.0}
