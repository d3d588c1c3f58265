"""Measures whether the longest sequence that `streamgrad plan` predicts is the longest that runs.

A configuration is run a little below the prediction and a little above it, under a cap on device memory. Where the first step
fits and the second does not, the true longest length lies between, and the prediction is within 5 per cent of it wherever it
lies. Where both fit, or neither does, a third one looks further away.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lengths import capped
from benchmarks.names import command_line
from benchmarks.records import EVERYTHING, Session
from benchmarks.step import StepRecord, measure_steps
from streamgrad.config import StreamConfig, parse_bytes
from streamgrad.hf.estimates.estimate import estimate

# Shares of the prediction. What is between may be as wide as 10 per cent; the closer they are, the more a prediction may change
# and still hold.
BELOW, ABOVE = 0.98, 1.03
FAR_BELOW, FAR_ABOVE = 0.93, 1.08
# No configuration needs as much; the machine must have it.
HOST_MEMORY = "100GiB"
ALLOCATOR = "expandable_segments:True"


@dataclass(frozen=True)
class Configuration:
    """Names a whole model on a card of `gpu_memory`; what is not named here is left to auto."""

    model: str
    training: str
    gpu_memory: str
    offload: str = "none"

    def longest_tokens(self) -> int:
        report = estimate(
            self.model, method=self.training, gpu_memory=self.gpu_memory, host_memory=HOST_MEMORY,
            offload=self.offload, recompute_layers=1, optimizer="none",
        )  # fmt: skip
        return report.streamed.longest_tokens

    def measure(self, session: Session = EVERYTHING) -> Iterator[StepRecord]:
        tokens = self.longest_tokens()
        near = [int(BELOW * tokens), int(ABOVE * tokens)]
        errors = {row["seq_len"]: row["error"] for row in session.rows if row["command"] == self.command}
        for record in self._steps(near, session):
            errors[record.seq_len] = record.error
            yield record
        fits = {errors[length] is None for length in near}
        if len(fits) == 1:
            yield from self._steps([int((FAR_ABOVE if True in fits else FAR_BELOW) * tokens)], session)

    def _steps(self, lengths: list[int], session: Session) -> Iterator[StepRecord]:
        with capped(parse_bytes(self.gpu_memory)):
            yield from measure_steps(
                model=self.model,
                lengths=lengths,
                methods=["streamgrad"],
                config=StreamConfig(offload=self.offload, recompute_layers=1),
                runs=1,
                warm_ups=0,
                training=self.training,
                command=self.command,
                benchmark="predicted",
                session=session,
            )

    @property
    def command(self) -> str:
        return command_line(
            "predicted", model=self.model, training=self.training, offload=self.offload, gpu_memory=self.gpu_memory
        )


# Whole models, in memory that is small enough for steps of seconds.
CONFIGURATIONS = (
    Configuration("qwen3-0.6b", "full", "8GiB"),
    Configuration("qwen3-0.6b", "lora", "6GiB"),
    Configuration("qwen3-1.7b", "full", "16GiB"),
    Configuration("qwen3-1.7b", "lora", "10GiB"),
    Configuration("qwen3-4b", "full", "24GiB"),
    Configuration("qwen3-4b", "lora", "16GiB"),
    Configuration("qwen3-8b", "lora", "24GiB"),
    Configuration("llama-3.1-8b", "lora", "24GiB"),
    Configuration("gemma-3-1b", "full", "8GiB"),
    Configuration("gemma-3-1b", "lora", "6GiB"),
    Configuration("qwen3-1.7b", "full", "8GiB", offload="auto"),
    Configuration("qwen3-1.7b", "lora", "5GiB", offload="auto"),
)


@dataclass(frozen=True)
class Found:
    """Holds the longest step of a configuration that fitted, and the shortest that ran out of memory."""

    configuration: Configuration
    fitted: int | None
    failed: int | None

    def holds(self, predicted: int) -> bool:
        """Return whether a prediction is within 5 per cent of the true longest length, which lies between the two."""
        return self.fitted is not None and self.failed is not None and 0.95 * self.failed <= predicted <= 1.05 * self.fitted


def with_growing_segments(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the records that count: with segments of fixed sizes, as in the first ones, fragments decide what fits."""
    return [record for record in records if ALLOCATOR in record.get("allocator", "")]


def found_in(records: Sequence[dict[str, Any]]) -> list[Found]:
    """Return what rows of predicted.jsonl say, configuration by configuration."""
    known = {configuration.command: configuration for configuration in CONFIGURATIONS}
    found = []
    for command, configuration in known.items():
        own = [record for record in with_growing_segments(records) if record["command"] == command]
        fitted = [record["seq_len"] for record in own if record["error"] is None]
        # A step that failed for another reason says nothing about memory.
        failed = [record["seq_len"] for record in own if record["error"] == "out of memory"]
        if own:
            found.append(Found(configuration, max(fitted, default=None), min(failed, default=None)))
    return found
