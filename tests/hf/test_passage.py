"""Losses and log-probabilities that pass an engine's casts: FSDP2 with `output_dtype`, as Accelerate sets it up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import streamgrad
from gradients import total_gradient_error
from streamgrad.trl.scoring import add_streamed_head
from tiny import tiny_model, tokens

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(streamed: bool = True, output_dtype: torch.dtype | None = BF16, *, head_dtype=BF16, scored: bool = False, root=None):
    """A tiny model under FSDP2 in bf16, its head a unit of its own."""
    model = tiny_model("qwen3", dtype=torch.float32, tie_word_embeddings=False)
    if streamed:
        streamgrad.enable(model, chunk_size=8, head_chunk_size=3)
    if scored:
        add_streamed_head(model, None)
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output_dtype)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model.lm_head, mp_policy=MixedPrecisionPolicy(param_dtype=head_dtype, output_dtype=output_dtype))
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=root))


def step(model, **asked):
    """A loss and gradients of a third of it, which no 16 bits hold; with log-probabilities where they are asked for."""
    ids = tokens(2, 32)
    output = model(input_ids=ids, labels=ids, **asked)
    (output.loss / 3).backward()
    scores = output.log_probs.detach() if asked else None
    return output.loss.detach(), scores, {name: value.grad.full_tensor() for name, value in model.named_parameters()}


@pytest.mark.parametrize("scored", [False, True], ids=["loss", "scores"])
def test_the_cast_of_an_engine_rounds_nothing(scored):
    asked = {"fused_lm_head": True} if scored else {}
    loss, scores, gradients = step(sharded(scored=scored), **asked)
    expected = step(sharded(output_dtype=None, scored=scored), **asked)
    assert loss.dtype == torch.float32 and torch.equal(loss, expected[0]) and loss != loss.bfloat16()
    assert scores is None or (scores.dtype == torch.float32 and torch.equal(scores, expected[1]))
    assert all(torch.equal(gradient, expected[2][name]) for name, gradient in gradients.items())


def test_the_policy_of_accelerate():
    """All units cast, the root too: as far from fp32 as the stock model under the same policy."""
    model = tiny_model("qwen3", dtype=torch.float32, tie_word_embeddings=False)
    ids = tokens(2, 32)
    (model(input_ids=ids, labels=ids).loss / 3).backward()
    truth = {name: value.grad for name, value in model.named_parameters()}
    stock, streamed = (total_gradient_error(step(sharded(kind, root=BF16))[2], truth) for kind in (False, True))
    assert 1e-3 < stock < 0.1, "this is not the error of bf16"
    assert streamed < 1.1 * stock


def test_a_cast_that_would_round_the_logits_is_refused():
    with pytest.raises(ValueError, match=r"rounds the logits, which are torch.float32, to torch.bfloat16.* output_dtype"):
        step(sharded(head_dtype=torch.float32))
