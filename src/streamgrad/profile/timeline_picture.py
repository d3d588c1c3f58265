"""Timelines as pictures: stacked areas side by side on one scale of bytes, as a PNG and as a page with hover and zoom."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from streamgrad.profile.advice import as_bytes
from streamgrad.profile.timeline import CATEGORIES, MEANINGS, Timeline

# Distinct also for eyes that do not tell red from green (after Okabe and Ito), and in grey where areas touch.
COLORS = dict(zip(CATEGORIES, ("#5b6470", "#a8b0ba", "#0072b2", "#009e73", "#e69f00", "#cc3311", "#cc79a7"), strict=True))

AXES = {"operations": "torch operations", "ms": "time (ms)"}

_LAST_MOMENT = 1.01
# More points than a screen has pixels show nothing more.
_POINTS = 1600


def draw(timelines: Mapping[str, Timeline], title: str, path: Path) -> None:
    """Write the timelines as a PNG, or in the format that the name's ending says."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(6.0 * len(timelines), 5.4), layout="constrained")
    panels = figure.subplots(1, len(timelines), sharey=True, squeeze=False)[0]
    highest = max(timeline.peak_bytes for timeline in timelines.values())
    unit, scale = next((name, size) for name, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1)) if highest >= size)
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        shown = timeline.thinned(_POINTS)
        # The last moment has no width of its own, and may be the highest.
        times = [*shown.times, shown.times[-1] * _LAST_MOMENT]
        areas = [[value / scale for value in (*shown.parts[category], shown.parts[category][-1])] for category in CATEGORIES]
        colors = [COLORS[category] for category in CATEGORIES]
        axes.stackplot(times, areas, colors=colors, labels=CATEGORIES, step="post", linewidth=0)
        _mark(axes, shown, scale, highest)
        axes.set(title=f"{name}: peak {as_bytes(timeline.peak_bytes)}", xlabel=AXES[timeline.unit])
        axes.set_xlim(0, times[-1])
        axes.set_ylim(0, 1.12 * highest / scale)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
    panels[0].set_ylabel(f"live bytes ({unit})")
    figure.suptitle(title, fontsize=10, color="dimgray")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _mark(axes: Any, shown: Timeline, scale: float, highest: int) -> None:
    """Mark the peak, and draw the line between the passes with their names above everything."""
    index = shown.peak_index
    axes.plot(shown.times[index], shown.peak_bytes / scale, marker="v", color="black", clip_on=False, markersize=6)
    axes.axvline(shown.backward_at, color="black", linestyle="--", linewidth=0.9)
    for place, name, side in ((shown.backward_at, "forward ", "right"), (shown.backward_at, " backward", "left")):
        axes.text(place, 1.07 * highest / scale, name, ha=side, va="center", fontsize=9)


def write_page(timelines: Mapping[str, Timeline], title: str, words: Mapping[str, Sequence[str]], path: Path) -> None:
    """Write the timelines as one HTML file that needs nothing else: no library, no font, no network."""
    data = {
        "categories": [{"name": name, "color": COLORS[name], "meaning": MEANINGS[name]} for name in CATEGORIES],
        "runs": [
            {"name": name, "axis": AXES[timeline.unit], "words": list(words[name]), **timeline.thinned(_POINTS).to_dict()}
            for name, timeline in timelines.items()
        ],
    }
    page = (resources.files("streamgrad.profile") / "page.html").read_text(encoding="utf-8")
    # "</script>" inside the data would end it.
    page = page.replace("__TITLE__", html.escape(title)).replace("__DATA__", json.dumps(data).replace("</", "<\\/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
