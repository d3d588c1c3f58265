"""Measures device bytes a token, and the longest step that a card holds.

A step at several hundred thousand tokens takes minutes, nearly all of them attention of layers that are alike. So a model may be
cut to a few layers, at its full width and at the full length, with ballast on the device for what is missing: the weights and
gradients of the other layers and, where they stay on the device, what those keep. The record names both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.objective import ROWS
from benchmarks.paper import read_paper
from benchmarks.records import EVERYTHING, Session
from benchmarks.step import StepRecord, measure_steps
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config
from streamgrad.hf.discover import decoder_layers

# The 80 and 24 GB of two cards, as a program can use them.
CARDS = {"80GiB": "79GiB", "24GiB": "23.5GiB"}
# The layers of models that are too slow as a whole.
CUT_LAYERS = 2


@dataclass(frozen=True)
class Cell:
    """Names a longest sequence that others have reached, `rows` of them a step. `layers` of the model are built."""

    model: str
    training: str
    objective: str
    tokens: int
    rows: int
    layers: int | None = None


# TRL 1.15 under a cap of 79 GiB. GRPO's is of its scoring alone; ours is a whole step, on one completion.
TRL_CELLS = {
    "sft": Cell("gemma-3-1b", "full", "sft", 107_520, rows=1),
    "dpo": Cell("gemma-3-1b", "full", "dpo", 59_392, rows=2),
    "grpo": Cell("gemma-3-1b", "full", "grpo", 114_688, rows=1),
}


def cells(objective: str, *, model: str | None = None, card: str = "80GiB") -> list[Cell]:
    """Return StreamBP's cells of the paper's table of longest sequences, or those of one model; for gemma-3-1b, TRL's."""
    if objective not in ROWS:
        raise ValueError(f"objective={objective!r} is not a choice. Pass one of {', '.join(ROWS)}.")
    paper = read_paper()
    if card == "24GiB":
        tokens = round(1e3 * paper["rtx3090_24gb_8b_lora_rank32"]["streambp_max_length_thousands"])
        known = [Cell("qwen3-8b", "lora", "sft", tokens, rows=1)]
    elif card == "80GiB":
        table = paper["max_sequence_length_thousands"]
        known = [
            Cell(f"qwen3-{size.lower()}", training.lower(), objective, round(1e3 * length), ROWS[objective], CUT_LAYERS)
            for (size, training), length in zip(map(str.split, table["columns"]), table[objective]["streambp"], strict=True)
            if length is not None
        ]
        known += [TRL_CELLS[objective]] if model == TRL_CELLS[objective].model else []
    else:
        raise ValueError(f"card={card!r} is not a choice. Pass one of {', '.join(CARDS)}.")
    found = [cell for cell in known if cell.objective == objective and model in (None, cell.model)]
    if not found:
        raise ValueError(
            f"there is no longest sequence of {model or 'any model'} with {objective} in {card} to compare with. Known there: "
            + ", ".join(dict.fromkeys(f"{cell.model} with {cell.objective}" for cell in known)) + "."
        )  # fmt: skip
    return found


def ballast_of_missing_layers(
    model: str, *, offload: str = "none", has_copy: bool = False
) -> Callable[[PreTrainedModel, int], int]:
    """Return a function that counts the device bytes of the layers which a cut model lacks, where layers keep their inputs.

    A layer has its weights, and its input until its backward pass, from then on its gradients: the larger of the two counts. With
    `has_copy`, a frozen reference model lacks the same layers.
    """

    def ballast(network: PreTrainedModel, tokens: int) -> int:
        layers = decoder_layers(network.get_decoder())
        missing = preset_config(model).num_hidden_layers - len(layers)
        weights = sum(p.nbytes * (1 + has_copy) for p in layers[0].parameters())
        trained = sum(p.nbytes for p in layers[0].parameters() if p.requires_grad)
        inputs = 0 if offload == "host" else missing * tokens * network.config.hidden_size * network.dtype.itemsize
        return missing * weights + max(inputs, missing * trained)

    return ballast


def measure_memory(
    *,
    model: str,
    lengths: Sequence[int],
    methods: Sequence[str],
    command: str,
    layers: int | None = None,
    training: str = "full",
    offload: str = "host",
    chunk_size: int | str = "auto",
    session: Session = EVERYTHING,
) -> Iterator[StepRecord]:
    """Yield peak bytes at several lengths where layers keep their inputs alone, one step each after one that warms up.

    `chunk_size` "auto" takes chunks that are fast where there is memory for them, and so not the smallest.
    """
    if training not in ("full", "lora"):
        raise ValueError(f"training={training!r} is not a choice. Pass full or lora.")
    config = StreamConfig(keep="input", offload=offload, chunk_size=chunk_size)
    yield from measure_steps(
        model=model, lengths=lengths, methods=methods, config=config, runs=1, warm_ups=1,
        layers=layers, training=training, command=command, benchmark="memory", session=session,
    )  # fmt: skip


def measure_partitions(
    *, model: str, length: int, chunk_sizes: Sequence[int], runs: int, command: str, session: Session = EVERYTHING
) -> Iterator[StepRecord]:
    """Yield time and memory of a step by chunk size. As in the paper, layers keep their inputs, on the device."""
    for chunk_size in chunk_sizes:
        config = StreamConfig(keep="input", offload="none", chunk_size=chunk_size)
        yield from measure_steps(
            model=model, lengths=[length], methods=["streamgrad"], config=config, runs=runs, warm_ups=1, command=command,
            benchmark="partition", session=session,
        )  # fmt: skip


def slope_bytes(records: Sequence[Any]) -> float | None:
    """Return bytes a token between the shortest and the longest of some records of steps."""
    done = sorted((record.seq_len, record.peak_bytes) for record in records if record.peak_bytes is not None)
    if len(done) < 2:
        return None
    (shortest, low), (longest, high) = done[0], done[-1]
    return (high - low) / (longest - shortest)


def measure_longest(*, model: str, length: int, command: str, session: Session = EVERYTHING) -> Iterator[StepRecord]:
    """Yield one step of the whole model with everything left to auto."""
    yield from measure_steps(
        model=model, lengths=[length], methods=["streamgrad"], config=StreamConfig(), runs=1, warm_ups=0, command=command,
        benchmark="max-length", session=session,
    )  # fmt: skip


def measure_cells(
    chosen: Sequence[Cell], *, factor: float, offload: str, card_bytes: int, command: str, session: Session = EVERYTHING
) -> Iterator[StepRecord]:
    """Yield one step of each cell at `factor` times its length, under a cap on the process's device memory."""
    if not 0 < factor < math.inf:
        raise ValueError(f"factor={factor:g} gives no length. Pass a finite number above 0.")
    if not torch.cuda.is_available():
        raise ValueError("the max-length benchmark measures a GPU, and torch sees none. Run it on a machine with one.")
    for cell in chosen:
        has_copy = cell.objective != "sft" and cell.training == "full"
        ballast = ballast_of_missing_layers(cell.model, offload=offload, has_copy=has_copy)
        with capped(card_bytes):
            yield from measure_steps(
                model=cell.model,
                lengths=[int(factor * cell.tokens)],
                methods=["streamgrad"],
                config=StreamConfig(keep="input", offload=offload),
                runs=1,
                warm_ups=0,
                layers=cell.layers,
                training=cell.training,
                objective=cell.objective,
                batches=[cell.rows],
                command=command,
                benchmark="max-length",
                ballast=ballast,
                session=session,
            )


@contextmanager
def capped(limit_bytes: int) -> Iterator[None]:
    """Let the process hold at most `limit_bytes` of the device within the block."""
    if not torch.cuda.is_available():
        raise ValueError("the memory of a GPU is to be capped, and torch sees none. Run this on a machine with one.")
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
