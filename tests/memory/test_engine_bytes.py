"""The byte formulas of the engines, and the paper's ZeRO-2 table by formula, as docs/distributed.md shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

import streamgrad
from streamgrad.memory.engines import ENGINES, longest_sequence, rank_bytes

DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"
# The paper's table of the longest sequence, in thousands of tokens, of Qwen3-8B under ZeRO-2 on A800 GPUs of 80 GB.
PAPER = {
    3: (18.6, 92.4), 4: (20.5, 112.0), 5: (22.3, 121.5), 6: (23.1, 128.7), 7: (23.5, 131.4), 8: (23.7, 131.8),
}  # fmt: skip


def zero2_longest(gpus: int) -> int:
    """As `streamgrad plan` has it, without host memory, in what an A800 of 80 GB lets a process have."""
    options = {"keep": "input", "offload": "none", "recompute_layers": 1, "gpu_memory": "79.3GiB"}
    report = streamgrad.estimate("qwen3-8b", engine="zero2", gpus=gpus, **options)
    return report.streamed.longest_tokens


def table() -> str:
    lines = ["| GPUs | checkpointing, paper | StreamBP, paper | streamgrad, computed |", "|---|---|---|---|"]
    for gpus, (checkpointing, streambp) in PAPER.items():
        lines.append(f"| {gpus} | {checkpointing} | {streambp} | {zero2_longest(gpus) / 1000:.1f} |")
    return "\n".join(lines)


def test_the_papers_table_is_in_the_docs_as_computed():
    assert table() in DOCS.read_text()


def test_formulas_at_the_ends():
    sizes = {"parameters": 1000, "trainable": 1000, "unit": 100}
    for engine in ENGINES:
        assert rank_bytes(engine, ranks=1, **sizes).optimizer == 12000
        assert rank_bytes(engine, ranks=4, **sizes).total <= rank_bytes(engine, ranks=2, **sizes).total
    by_engine = [rank_bytes(engine, ranks=8, **sizes).total for engine in ("ddp", "none", "zero1", "zero2", "fsdp2", "zero3")]
    assert by_engine == sorted(by_engine, reverse=True)
    lora = rank_bytes("zero3", ranks=8, parameters=1000, trainable=10, unit=100)
    assert (lora.parameters, lora.gradients, lora.optimizer, lora.working) == (250.0, 2.5, 15.0, 220.0)


@pytest.mark.parametrize("changes", [{"engine": "zero4"}, {"ranks": 0}, {"trainable": 2000}, {"unit": 2000}])
def test_what_makes_no_sense_is_refused(changes):
    arguments = {"engine": "zero2", "parameters": 1000, "trainable": 1000, "unit": 100, "ranks": 2} | changes
    with pytest.raises(ValueError, match=r"Pass one of|more than all of them"):
        rank_bytes(arguments.pop("engine"), **arguments)


def test_longest_sequence():
    assert longest_sequence(lambda tokens: 10 + 2 * tokens, 1010) == 500
    assert longest_sequence(lambda tokens: 10 + 2 * tokens, 1009) == 400
    assert longest_sequence(lambda tokens: 10 + 2 * tokens, 9) == 0


if __name__ == "__main__":
    print(table())
