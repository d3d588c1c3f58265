"""16-bit gradients: the error against an fp32 truth is at most 1.02 times that of plain bf16 backpropagation.

Both are noise of one size. Single draws differ by several per cent either way, so errors are pooled over parameters and over
several random models before they are compared.
"""

from __future__ import annotations

import math

import pytest
import torch

import streamgrad
from gradients import more, run_step, total_gradient_error
from tiny import tiny_model, tokens

LENGTH = 1000
SHAPE = {"hidden_size": 48, "intermediate_size": 96}


def pooled_errors(family: str, seeds: range, chunk_counts: tuple[int, ...]) -> dict[int, float]:
    """Root mean square error over the seeds; the entry for 0 chunks is plain backprop's."""
    squares = dict.fromkeys((0, *chunk_counts), 0.0)
    for seed in seeds:
        model = tiny_model(family, dtype=torch.bfloat16, seed=seed, **SHAPE)
        truth_model = tiny_model(family, dtype=torch.float32, seed=seed, **SHAPE)
        truth_model.load_state_dict(model.state_dict())  # the truth of the rounded weights
        ids = tokens(1, LENGTH, seed=seed)
        batch = {"input_ids": ids, "labels": ids.clone()}
        truth = run_step(truth_model, batch).gradients
        for chunks in squares:
            if chunks:
                size = math.ceil(LENGTH / chunks)
                streamgrad.enable(model, chunk_size=size, head_chunk_size=size)
            squares[chunks] += total_gradient_error(run_step(model, batch).gradients, truth) ** 2
            streamgrad.disable(model)
    return {chunks: math.sqrt(total / len(seeds)) for chunks, total in squares.items()}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=more), "qwen3"])
def test_error_at_8_and_64_chunks(family):
    errors = pooled_errors(family, range(8), (8, 64))
    assert errors[0] > 1e-3
    for chunks in (8, 64):
        assert errors[chunks] <= 1.02 * errors[0], f"{chunks} chunks: {errors[chunks] / errors[0]:.4f} times plain bf16"


@more
def test_error_at_1000_chunks():
    """One token a chunk: a thousand terms in every sum, in the layers and in the head."""
    errors = pooled_errors("qwen3", range(4), (1000,))
    assert errors[1000] <= 1.02 * errors[0], f"{errors[1000] / errors[0]:.4f} times plain bf16"
