"""Predicts the longest sequence of every cell of the paper's table, with and without host memory, and confirms it by a step.

Predictions are arithmetic and need no GPU. A step at 97 % of one is run with few layers, and ballast for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import streamgrad
from benchmarks.lengths import CARDS, Cell
from benchmarks.train_step import TrainingCase
from streamgrad.config import parse_bytes

SHARE = 0.97
LIMIT = CARDS["80GiB"]
# What a machine with an H200 has here.
HOST = "125GiB"


@dataclass(frozen=True, kw_only=True)
class LongestRecord:
    """Records a prediction: `tokens` is the longest that fits, `confirming` a step at 97 % of it, which takes about `seconds`.

    `layers` of the model are built for that step. With `offload` "none" layers keep nothing in host memory.
    """

    benchmark: str = "longest"
    model: str
    training: str
    objective: str
    offload: str
    limit: str
    host: str
    tokens: int
    confirming: int
    layers: int
    seconds: float
    plan: str
    versions: dict[str, str]
    command: str

    def case(self) -> TrainingCase:
        """Return the step that confirms it."""
        return _case(self.model, self.training, self.objective, self.offload, self.confirming, self.layers)

    def confirmed_by(self, steps: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the last of the recorded steps that confirms it, if one does."""
        asked = {
            "model": self.model, "training": self.training, "objective": self.objective, "seq_len": self.confirming,
            "limit_bytes": parse_bytes(self.limit), "optimizer": "none", "error": None,
        }  # fmt: skip
        return next((row for row in reversed(steps) if asked.items() <= row.items()), None)


def _case(model: str, training: str, objective: str, offload: str, tokens: int, layers: int) -> TrainingCase:
    return TrainingCase(
        model=model, training=training, objective=objective, optimizer="none", tokens=tokens, limit=LIMIT, host=HOST,
        layers=layers, offload=offload,
    )  # fmt: skip


def predict(cells: Sequence[Cell], offload: str, command: str) -> Iterator[LongestRecord]:
    """Yield the prediction of each cell."""
    for cell in cells:
        shape = (cell.model, cell.training, cell.objective, offload)
        tokens = _case(*shape, tokens=1, layers=1).estimator().longest()
        case = _case(*shape, tokens=int(SHARE * tokens), layers=1)
        layers = case.fewest_layers
        yield LongestRecord(
            model=cell.model, training=cell.training, objective=cell.objective, offload=offload, limit=LIMIT, host=HOST,
            tokens=tokens, confirming=case.tokens, layers=layers, seconds=round(layers * case.seconds, 1),
            plan=str(case.outlook.plan), versions={"streamgrad": streamgrad.__version__}, command=command,
        )  # fmt: skip


def predictions_in(rows: Sequence[dict[str, Any]]) -> list[LongestRecord]:
    """Return the last prediction of each cell, those first whose step is the quickest."""
    found = {(row["model"], row["training"], row["objective"], row["offload"]): LongestRecord(**row) for row in rows}
    return sorted(found.values(), key=lambda record: record.seconds)
