"""Writes the tables of time by memory: every method's step, and beside each of ours the fastest peer within its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.selection import Record, Records, automatic_steps, has_faulty_peak, latest, measured_beside
from benchmarks.words import gb, markdown_table, ms, no_record, or_dash, origin, picture

PEERS = {
    "hf": "transformers, checkpointing",
    "hf-sac": "transformers, selective checkpointing",
    "hf-nockpt": "transformers, all kept",
    "hf-compile": "transformers compiled, checkpointing",
    "hf-compile-nockpt": "transformers compiled, all kept",
    "liger": "Liger kernels, checkpointing",
    "liger-nockpt": "Liger kernels, all kept",
}
WHOLE = "all of the card"
OURS = {"streamgrad": WHOLE, "streamgrad-compile": f"{WHOLE}, compiled"}
# In README.
README_LENGTHS = (1_000, 2_000, 4_000, 6_000, 12_000, 24_000, 36_000, 72_000)
COMMAND = "step --methods streamgrad,streamgrad-compile,liger,liger-nockpt,hf-compile,hf-compile-nockpt,hf-sac"


class Point(NamedTuple):
    """A step in the plane of memory and time. `allowed_bytes` is what it was told to stay within, or what it took."""

    name: str
    record: Record
    allowed_bytes: int

    @property
    def text(self) -> str:
        return f"{ms(self.record)}, {gb(self.record)}"


def our_points(records: Records) -> dict[int, list[Point]]:
    """Return streamgrad's steps of Qwen3-4B by length: with the whole card first, then within a budget, the largest first."""
    found: dict[int, list[Point]] = {}
    for (method, length), record in sorted(automatic_steps(records["step"]).items()):
        if method in OURS and record["step_ms"]:
            found.setdefault(length, []).append(Point(OURS[method], record, record["peak_bytes"]))
    for record in _within_budgets(records):
        budget = record["policy"]["memory_budget"]
        if record["step_ms"]:
            found.setdefault(record["seq_len"], []).append(Point(f"{budget / 1e9:.1f} GB", record, budget))
    return {length: found[length] for length in sorted(found)}


def _within_budgets(records: Records) -> list[Record]:
    """Return the last step at each length and budget; those whose budget was Liger's peak count as one budget."""
    limited = [
        {**record, "_budget": "liger" if "--memory-budget liger" in record["command"] else record["policy"]["memory_budget"]}
        for record in records["step"]
        if (record["model"], record["method"], record["batch"], record["flash"]) == ("qwen3-4b", "streamgrad", 1, "FA2")
        and isinstance(record["policy"].get("memory_budget"), int)
    ]
    found = latest(limited, "seq_len", "_budget").values()
    return sorted(found, key=lambda record: -record["policy"]["memory_budget"])


def peer_points(records: Records) -> dict[int, list[Point]]:
    """Return the peers' steps of Qwen3-4B that ran, by length, the fastest first."""
    found: dict[int, list[Point]] = {}
    for (method, length), record in automatic_steps(records["step"]).items():
        if method in PEERS and record["step_ms"] and not has_faulty_peak(record):
            found.setdefault(length, []).append(Point(PEERS[method], record, record["peak_bytes"]))
    return {length: sorted(points, key=lambda point: point.record["step_ms"]) for length, points in sorted(found.items())}


def _beside_ours(point: Point, records: Records, peers: list[Point]) -> list[Point]:
    """Return the peers' steps to compare one of ours with, the fastest first."""
    found = [measured_beside(records["step"], point.record, peer.record) for peer in peers]
    points = [Point(PEERS[record["method"]], record, record["peak_bytes"]) for record in found if record["step_ms"]]
    return sorted(points, key=lambda each: each.record["step_ms"])


def best_within(points: list[Point], allowed_bytes: float) -> Point | None:
    """Return the fastest of some points, which are sorted by time, that took no more."""
    return next((point for point in points if point.record["peak_bytes"] <= allowed_bytes), None)


def speed_table(records: Records, lengths: Sequence[int] | None = None) -> str:
    """Return each of our points, the fastest peer within the same memory, and the fastest of all; at some lengths, or at all."""
    peers, rows = peer_points(records), []
    keepers = {length for method, length in automatic_steps(records["step"]) if method.endswith("-nockpt")}
    for length, points in our_points(records).items():
        if length not in peers or length not in (lengths or peers):
            continue
        # Where no peer that keeps everything was tried, the fastest is not the fastest that there is.
        among = "" if length in keepers else " (of those that checkpoint)"
        for point in points:
            whole, beside = point.name in OURS.values(), _beside_ours(point, records, peers[length])
            rows.append([
                f"{length:,}", point.name, f"**{ms(point.record)}**, {gb(point.record)}",
                *_beside(point, best_within(beside, point.allowed_bytes), among if whole else ""),
                *(_beside(point, beside[0], among) if whole else ("-", "-")),
            ])  # fmt: skip
    header = [
        "tokens",
        "memory given",
        "streamgrad",
        "fastest peer in no more memory",
        "speed-up",
        "fastest peer of all",
        "speed-up",
    ]
    return markdown_table(header, rows)


def _beside(point: Point, peer: Point | None, among: str) -> tuple[str, str]:
    if peer is None:
        return "none", "-"
    return f"{peer.name}: {peer.text}{among}", or_dash(peer.record["step_ms"] / point.record["step_ms"], "{:.2f}x")


def by_memory(records: Records, paper: dict[str, Any]) -> list[str]:
    """Return the section: our points beside the best of the peers, and all points."""
    ours, peers = our_points(records), peer_points(records)
    if not ours or not peers:
        return [no_record(COMMAND)]
    rows = []
    for length in sorted({*ours, *peers}):
        every = [(f"streamgrad, {point.name}", point) for point in ours.get(length, [])]
        every += [(point.name, point) for point in peers.get(length, [])]
        for name, point in sorted(every, key=lambda pair: -pair[1].record["peak_bytes"]):
            rows.append([f"{length:,}", name, gb(point.record), ms(point.record)])
    failed = [
        [f"{length:,}", PEERS[method], record["error"]]
        for (method, length), record in sorted(automatic_steps(records["step"]).items())
        if method in PEERS and record["step_ms"] is None
    ]
    failed += [
        [
            f"{record['seq_len']:,}",
            f"streamgrad, {record['policy']['memory_budget'] / 1e9:.1f} GB",
            record["error"].split(". ")[0],
        ]
        for record in _within_budgets(records)
        if record["step_ms"] is None
    ]
    shown = [point.record for points in (*ours.values(), *peers.values()) for point in points]
    return [
        "Qwen3-4B, one sequence, forward and backward, medians. A peer that keeps everything is fast where there is memory for "
        "it, one that checkpoints is small; so methods compare at equal memory. Beside each step of streamgrad stands the "
        "fastest step of any peer that took no more memory than streamgrad was given (a budget) or took (all of the card); a "
        "peer's step of the same command where there is one, as hosts and days differ, and else its latest. "
        "Compiled: `torch.compile` on each layer, for all lengths; with streamgrad, `compile_layers=True`. Selective: torch's "
        "policy that keeps products and attention.",
        picture("time_by_memory", "Time against memory, by length"),
        speed_table(records),
        "### Every method's point",
        markdown_table(["tokens", "method", "peak", "step"], rows),
        *(["These did not run:", markdown_table(["tokens", "method", "why"], failed)] if failed else []),
        origin(shown),
    ]
