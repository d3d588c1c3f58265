"""Layers that choose by values are known, and run forward chunk by chunk, as they are run again."""

from __future__ import annotations

import pytest
import torch

from streamgrad.engine.value_choices import ValueChoices
from streamgrad.hf.discover import decoder_layers
from stretches import CHUNK, calls_in_step
from tiny import tiny_model


@pytest.mark.parametrize(
    ("function", "chooses"),
    [
        (lambda x: x.topk(2), True), (lambda x: x[x > 0], True), (lambda x: x.argmax(), True), (lambda x: x.argsort(), True),
        (lambda x: x / x.abs().amax(), True), (lambda x: torch.where(x > 0.5, x, -x), True), (lambda x: x * x.sign(), True),
        (lambda x: x if x.mean() else -x, True), (lambda x: x.mean().item(), True), (lambda x: x >= 0.5, True),
        (lambda x: (4 * x).long(), True), (lambda x: x.bool(), True), (lambda x: x.unique(), True),
        (lambda x: torch._int_mm(x.to(torch.int8), x.to(torch.int8)), True),
        (lambda x: x.softmax(-1) @ x, False), (lambda x: x[:, [0, 1]].relu(), False), (lambda x: x.clamp(min=0.0), False),
        (lambda x: x.masked_fill(torch.arange(32) > 3, 0.0), False), (lambda x: x.double().bfloat16().round(), False),
    ],
)  # fmt: skip
def test_what_chooses_by_values(function, chooses):
    with ValueChoices() as choices:
        function(torch.randn(32, 32))
    assert choices.made == chooses


@pytest.mark.parametrize(("family", "chooses"), [("qwen3", False), ("qwen3_moe", True), ("gpt_oss", True), ("deepseek_v3", True)])
def test_layers_that_choose_run_chunk_by_chunk(family, chooses):
    """A router's product rounds in another way over several chunks: the re-run could send a token to another expert."""
    model = tiny_model(family, dtype=torch.float32)
    calls, _ = calls_in_step(model, 6 * CHUNK, 3, layer=-1)
    assert (max(calls) == CHUNK) == chooses


def test_a_choice_of_a_hook_is_seen_when_it_comes():
    """In one layer of many that are alike otherwise, and after a step without."""
    model = tiny_model("qwen3", dtype=torch.float32)
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=1)[0]) == 3 * CHUNK
    mlp = decoder_layers(model.get_decoder())[1].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: torch.where(output > 0.1, output, 0.0))
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=1)[0]) == CHUNK
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=0)[0]) == 3 * CHUNK
    handle.remove()
    assert max(calls_in_step(model, 6 * CHUNK, 3, layer=1)[0]) == 3 * CHUNK
