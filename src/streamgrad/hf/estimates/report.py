"""What `estimate` returns: bytes by component, time and the longest sequence, as a dataclass that prints as a table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from streamgrad.memory.costs import COMPONENTS, Parts
from streamgrad.memory.planner import Plan
from streamgrad.memory.seconds import Seconds


@dataclass(frozen=True)
class Outlook:
    """One way to compute the step: bytes by component in its largest phase, and its time."""

    name: str
    device_bytes: Parts
    host_bytes: Parts
    phase: str
    fits: bool
    seconds: Seconds
    longest_tokens: int
    plan: Plan | None = None

    @property
    def peak_bytes(self) -> float:
        return sum(self.device_bytes.values())

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON, with totals and the plan in words."""
        said = {"plan": None if self.plan is None else str(self.plan), "peak_bytes": self.peak_bytes}
        return dataclasses.asdict(self) | said | {"seconds": vars(self.seconds) | {"total": self.seconds.total}}


@dataclass(frozen=True)
class Report:
    """What `estimate` returns; `print(report)` shows it as a table.

    All bytes are those of one rank. `batch` and `seq_len` are those of the `sp` ranks that share a sequence.
    """

    model: str
    method: str
    quantization: str
    objective: str
    optimizer: str
    weights: str
    engine: str
    gpus: int
    gpus_per_node: int
    sp: int
    ring: int
    batch: int
    seq_len: int
    gpu: str
    gpu_memory: int
    host_memory: int
    dtype: str
    keep: str
    offload: str
    recompute_layers: int | str
    streamed: Outlook
    checkpointing: Outlook
    assumptions: tuple[str, ...]

    @property
    def setup(self) -> str:
        """Return in words what is trained, and how."""
        many = f", {self.gpus} GPUs with {self.engine}" if self.gpus > 1 else ""
        many += f", {self.sp} to a sequence" if self.sp > 1 else ""
        many += f" in rings of {self.ring}" if self.ring > 1 else ""
        words = {"none": "no optimizer", "in-backward": "adamw in backward", "host": "adamw on the host"}
        optimizer = words.get(self.optimizer, self.optimizer) + (", weights on the host" if self.weights == "host" else "")
        method = self.method if self.quantization == "none" else f"{self.method} on {self.quantization}"
        return f"{self.model}, {method}, {self.objective}, {optimizer}{many}"

    @property
    def title(self) -> str:
        """Return in words what is planned."""
        return f"{self.setup}: {self.batch} x {self.seq_len:,} tokens"

    @property
    def tokens_a_second(self) -> float:
        """Return the tokens that all GPUs train on in a second of a streamed step, which is at most what they reach."""
        return self.gpus // self.sp * self.batch * self.seq_len / self.streamed.seconds.total

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        own = {"tokens_a_second": self.tokens_a_second}
        return dataclasses.asdict(self) | own | {name: getattr(self, name).to_dict() for name in ("streamed", "checkpointing")}

    def sections(self) -> list[list[tuple[str, str, str, str]]]:
        """Return the rows of its table: a component, or a total; streamed on the GPU and on the host; and checkpointing."""
        streamed, plain = self.streamed, self.checkpointing
        columns = (streamed.device_bytes, streamed.host_bytes, plain.device_bytes)
        counts = {name: [column.get(name, 0.0) for column in columns] for name in COMPONENTS}
        components = [_row(name, *map(gib, row)) for name, row in counts.items() if any(row)]
        totals = [
            _row("in all", *(gib(sum(column.values())) for column in columns)),
            _row("largest phase", streamed.phase, "", plain.phase),
            _row(f"fits {gib(self.gpu_memory)} ({self.gpu})", yes(streamed.fits), "", yes(plain.fits)),
            _row("longest sequence", f"{streamed.longest_tokens:,}", "", f"{plain.longest_tokens:,}"),
            _row("step, at least", f"{streamed.seconds.total:,.1f} s", "", f"{plain.seconds.total:,.1f} s"),
        ]
        if self.sp > 1:
            waits = streamed.seconds.exchanges, plain.seconds.exchanges
            totals.append(_row("of it, exchanges", f"{waits[0]:,.1f} s", "", f"{waits[1]:,.1f} s"))
        if self.ring > 1:
            totals.append(_row("of it, the ring", f"{streamed.seconds.ring:,.1f} s", "", f"{plain.seconds.ring:,.1f} s"))
        if self.gpus > 1:
            totals.append(_row("tokens a second, at most", f"{self.tokens_a_second:,.0f}", "", ""))
        return [components, totals]

    def __str__(self) -> str:
        rows = [row for section in self.sections() for row in section]
        table = [("", *COLUMNS), *rows]
        widths = [max(len(row[place]) for row in table) for place in range(4)]
        lines = ["  ".join([row[0].ljust(widths[0]), *(row[n].rjust(widths[n]) for n in (1, 2, 3))]).rstrip() for row in table]
        name = "Plan" if self.streamed.fits else "Smallest plan"
        return "\n".join([f"{self.title}, in the largest phase", *lines, f"{name}: {self.streamed.plan}"])


COLUMNS = ("streamgrad, GPU", "streamgrad, host", "checkpointing, GPU")


def _row(name: str, first: str, second: str, third: str) -> tuple[str, str, str, str]:
    return name, first, second, third


def gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB" if count else "-"


def yes(fits: bool) -> str:
    return "yes" if fits else "no"
