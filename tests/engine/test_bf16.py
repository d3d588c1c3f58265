"""16-bit gradients: the error against a float64 truth is at most 1.02 times that of plain bf16 backpropagation.

Both are noise of one size, and the ratio of a single model says little: its standard deviation is 0.3 to 9 per cent, by family.
So errors are pooled over parameters and over as many random models as leave four standard errors between the ratio that was
measured (docs/exactness.md) and 1.02: another processor rounds otherwise, and draws another sample of the same noise.
"""

from __future__ import annotations

import math

import pytest
import torch

import streamgrad
from gradients import more, no_float32, run_step, total_gradient_error
from tiny import FAMILIES, tiny_model, tokens

# Norms of queries and keys have a weight for each channel of a head: with 8 of them, their noise would be most of it.
WIDE_HEADS = {"head_dim": 32}
# Every expert is chosen: which ones are is a jump, and rounding may tip it on either side.
ALL_EXPERTS = {"num_experts_per_tok": 4}
SHAPE = {"hidden_size": 48, "intermediate_size": 96}
CHANGES = {
    "qwen3": WIDE_HEADS, "gemma3_text": WIDE_HEADS, "olmo2": WIDE_HEADS, "qwen3_moe": WIDE_HEADS | ALL_EXPERTS,
    "gpt_oss": ALL_EXPERTS | {"hidden_size": 24, "intermediate_size": 16}, "deepseek_v3": ALL_EXPERTS,
}  # fmt: skip
# How many it takes depends on how much the ratio of one varies. The other families take 6.
MODELS = {"qwen3": 16, "gemma3_text": 12, "olmo2": 12, "qwen3_moe": 12, "gpt_oss": 16, "deepseek_v3": 12}


def ratios(family: str, models: int, length: int, chunk_counts: tuple[int, ...]) -> dict[int, float]:
    """Return the streamed error over plain bf16's, for each number of chunks: root mean squares over the models."""
    squares = dict.fromkeys((0, *chunk_counts), 0.0)  # the entry for 0 chunks is plain backpropagation's
    for seed in range(models):
        options = {"seed": seed} | SHAPE | CHANGES.get(family, {})
        model, exact = (tiny_model(family, dtype=dtype, **options) for dtype in (torch.bfloat16, torch.float64))
        exact.load_state_dict(model.state_dict())  # the truth of the rounded weights
        ids = tokens(1, length, seed=seed)
        batch = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
        with no_float32():
            truth = run_step(exact, batch).gradients
        for chunks in squares:
            if chunks:
                size = math.ceil(length / chunks)
                streamgrad.enable(model, chunk_size=size, head_chunk_size=size)
            squares[chunks] += total_gradient_error(run_step(model, batch).gradients, truth) ** 2
            streamgrad.disable(model)
    assert squares[0] > models * 1e-3**2
    return {chunks: math.sqrt(squares[chunks] / squares[0]) for chunks in chunk_counts}


def check_ratios(found: dict[int, float]) -> None:
    for chunks, ratio in found.items():
        assert ratio <= 1.02, f"{chunks} chunks: {ratio:.4f} times plain bf16"


@pytest.mark.parametrize(
    "family", [family if family in ("qwen2", "phi3", "gemma2") else pytest.param(family, marks=more) for family in FAMILIES]
)
def test_error_at_24_chunks(family):
    check_ratios(ratios(family, MODELS.get(family, 6), 480, (24,)))


@more
def test_error_at_up_to_1000_chunks():
    """One token a chunk: a thousand terms in every sum, in the layers and in the head."""
    check_ratios(ratios("llama", 4, 1000, (8, 64, 1000)))
