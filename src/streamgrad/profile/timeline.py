"""Bytes by category over the course of one step, from the births and deaths of its allocations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

# From the bottom of the picture to its top: what stays, what waits for backward, what comes and goes.
CATEGORIES = ("parameters", "gradients", "kept inputs", "keys and values", "activations", "logits", "other")

MEANINGS = {
    "parameters": "weights and buffers, there before the step",
    "gradients": "of parameters: what ends as their .grad, and sums on the way there",
    "kept inputs": "made in forward and alive when backward begins",
    "keys and values": "of one layer for the whole sequence, and their gradients",
    "activations": "what layers make on their way: streamed, of one chunk of one layer",
    "logits": "and what the loss makes of them",
    "other": "hidden states between layers and their gradients, token ids, masks",
}

# What is still there when backward begins was kept for it; these say by themselves what they are.
_NOT_KEPT = ("parameters", "gradients", "keys and values", "logits")


@dataclass(frozen=True)
class Timeline:
    """`parts[category][i]` bytes from `times[i]` on, in `unit`; backward begins at `backward_at`."""

    unit: str
    times: tuple[float, ...]
    parts: dict[str, tuple[int, ...]]
    backward_at: float

    @property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.parts.values(), strict=True)))

    @property
    def peak_index(self) -> int:
        totals = self.totals
        return totals.index(max(totals))

    @property
    def peak_bytes(self) -> int:
        return max(self.totals)

    def at(self, index: int) -> dict[str, int]:
        return {category: values[index] for category, values in self.parts.items()}

    def without(self, category: str) -> Timeline:
        """Return the same step with no bytes of `category`."""
        return replace(self, parts=self.parts | {category: (0,) * len(self.times)})

    def largest_part(self, index: int) -> str:
        """Return the category with the most bytes at that point; among equal ones, the first of `CATEGORIES`."""
        return max(CATEGORIES, key=self.at(index).__getitem__)

    def phase(self, index: int) -> str:
        return "forward" if self.times[index] < self.backward_at else "backward"

    def thinned(self, points: int) -> Timeline:
        """Keep the largest moment of each of `points` equal intervals of time; the peak is always among them."""
        totals, end = self.totals, self.times[-1]
        largest: dict[int, int] = {}
        for index, time in enumerate(self.times):
            place = min(int(time / end * points), points - 1) if end else 0
            if place not in largest or totals[index] > totals[largest[place]]:
                largest[place] = index
        # The last moment as well, or the picture would end early.
        chosen = sorted({*largest.values(), len(self.times) - 1})
        return replace(
            self,
            times=tuple(self.times[index] for index in chosen),
            parts={category: tuple(values[index] for index in chosen) for category, values in self.parts.items()},
        )

    def to_dict(self) -> dict[str, Any]:
        index = self.peak_index
        return {
            "unit": self.unit,
            "backward_at": self.backward_at,
            "peak": {"at": self.times[index], "phase": self.phase(index), "bytes": self.peak_bytes, "parts": self.at(index)},
            "times": list(self.times),
            "parts": {category: list(values) for category, values in self.parts.items()},
        }


class Ledger:
    """Births and deaths in their order. Categories may be corrected until the timeline is made."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._categories: list[str] = []
        self._events: list[tuple[float, int, int]] = []  # time, number of the allocation, 1 or -1
        self._step_at: int | None = None
        self._backward_at: tuple[int, float] | None = None

    def born(self, time: float, size: int, category: str) -> int:
        """Return its number, under which it dies."""
        self._sizes.append(size)
        self._categories.append(category)
        self._events.append((time, len(self._sizes) - 1, 1))
        return len(self._sizes) - 1

    def died(self, time: float, number: int) -> None:
        self._events.append((time, number, -1))

    def recognise(self, number: int, category: str) -> None:
        self._categories[number] = category

    def step_begins(self) -> None:
        """Take what was born so far as standing before the step."""
        self._step_at = len(self._events)

    def backward_begins(self, time: float) -> None:
        self._backward_at = len(self._events), time

    def timeline(self, unit: str) -> Timeline:
        """Return a point for what stood before the step, one for the largest state of each moment, and one for its end."""
        if self._step_at is None or self._backward_at is None:
            raise ValueError("the recorded step has no backward pass: call recorder.backward_begins() between the two passes.")
        categories = self._with_kept(self._step_at, self._backward_at[0])
        now = dict.fromkeys(CATEGORIES, 0)
        for _, number, sign in self._events[: self._step_at]:
            now[categories[number]] += sign * self._sizes[number]
        times, states = [0.0], [tuple(now.values())]
        for time, number, sign in self._events[self._step_at :]:
            now[categories[number]] += sign * self._sizes[number]
            state = tuple(now.values())
            if len(times) > 1 and times[-1] == time:
                states[-1] = max(states[-1], state, key=sum)
            else:
                times.append(time)
                states.append(state)
        # How the step ends is not the largest state of its last moment.
        times.append(times[-1])
        states.append(tuple(now.values()))
        parts = dict(zip(CATEGORIES, zip(*states, strict=True), strict=True))
        return Timeline(unit, tuple(times), parts, self._backward_at[1])

    def _with_kept(self, step_at: int, backward_at: int) -> list[str]:
        made = [number for _, number, sign in self._events[step_at:backward_at] if sign > 0]
        dead = {number for _, number, sign in self._events[:backward_at] if sign < 0}
        categories = list(self._categories)
        for number in made:
            # A negative size is the death of something that was there before.
            if number not in dead and categories[number] not in _NOT_KEPT and self._sizes[number] > 0:
                categories[number] = "kept inputs"
        return categories
