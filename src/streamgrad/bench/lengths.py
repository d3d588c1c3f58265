"""Device bytes a token, and the longest step that a card holds.

A step at several hundred thousand tokens takes minutes, nearly all of them attention of layers that are alike. So a model may be
cut to a few layers, at its full width and at the full length, with ballast on the device for what is missing: the weights and
gradients of the other layers and, where they stay on the device, what those keep. The record names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from streamgrad.bench.step import StepRecord, measure_steps
from streamgrad.config import StreamConfig
from streamgrad.models.presets import preset_config
from streamgrad.models.support import decoder_layers

# The 80 GB of a card, as a program can use them.
CARD_BYTES = 79 * 2**30


@dataclass(frozen=True)
class Cell:
    """One column of the paper's table of longest sequences (SFT, 80 GB): tokens that its StreamBP reached."""

    model: str
    training: str
    paper_tokens: int


PAPER_CELLS = (
    Cell("qwen3-4b", "full", 200_000),
    Cell("qwen3-4b", "lora", 247_000),
    Cell("qwen3-8b", "full", 72_000),
    Cell("qwen3-8b", "lora", 142_400),
    Cell("qwen3-14b", "lora", 84_600),
    Cell("qwen3-32b", "lora", 16_300),
)


def ballast_of_missing_layers(model: str, *, offload: str) -> Callable[[PreTrainedModel, int], int]:
    """For a model that was cut to fewer layers and keeps inputs: what the missing ones would hold on the device."""

    def ballast(network: PreTrainedModel, length: int) -> int:
        layers = decoder_layers(network.get_decoder())
        missing = preset_config(model).num_hidden_layers - len(layers)
        weights = sum(p.nbytes + (p.nbytes if p.requires_grad else 0) for p in layers[0].parameters())
        inputs = 0 if offload == "host" else length * network.config.hidden_size * network.dtype.itemsize
        return missing * (weights + inputs)

    return ballast


def measure_memory(
    *, model: str, lengths: Sequence[int], methods: Sequence[str], layers: int | None, command: str
) -> Iterator[StepRecord]:
    """Peak bytes at several lengths with inputs in host memory, one step each after one that warms up."""
    config = StreamConfig(keep="input", offload="host")
    yield from measure_steps(
        model=model, lengths=lengths, methods=methods, config=config, runs=1, warm_ups=1, layers=layers, command=command,
        benchmark="memory",
    )  # fmt: skip


def slope_bytes(records: Sequence[StepRecord]) -> float | None:
    """Bytes a token between the shortest and the longest record of one method."""
    done = sorted((record.seq_len, record.peak_bytes) for record in records if record.peak_bytes is not None)
    if len(done) < 2:
        return None
    (shortest, low), (longest, high) = done[0], done[-1]
    return (high - low) / (longest - shortest)


def measure_longest(*, model: str, length: int, command: str) -> Iterator[StepRecord]:
    """One step of the whole model with everything left to auto."""
    yield from measure_steps(
        model=model, lengths=[length], methods=["streamgrad"], config=StreamConfig(), runs=1, warm_ups=0, command=command,
        benchmark="max-length",
    )  # fmt: skip


def measure_cells(
    cells: Sequence[Cell], *, factor: float, offload: str, layers: int | None, card_bytes: int, command: str
) -> Iterator[StepRecord]:
    """One step of each cell at `factor` times the paper's length, under a cap on the process's device memory."""
    if not torch.cuda.is_available():
        raise ValueError("bench max-length measures a GPU, and torch sees none.")
    for cell in cells:
        with _capped(card_bytes):
            yield from measure_steps(
                model=cell.model,
                lengths=[int(factor * cell.paper_tokens)],
                methods=["streamgrad"],
                config=StreamConfig(keep="input", offload=offload),
                runs=1,
                warm_ups=0,
                layers=layers,
                training=cell.training,
                command=command,
                benchmark="max-length",
                ballast=ballast_of_missing_layers(cell.model, offload=offload) if layers else None,
            )


@contextmanager
def _capped(limit_bytes: int) -> Iterator[None]:
    """Within the block, the process may hold at most `limit_bytes` of the device."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
