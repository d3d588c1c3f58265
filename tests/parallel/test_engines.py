"""DDP and FSDP2 see ordinary layers: the parameters of plain backpropagation, the collectives of gradient checkpointing."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import streamgrad
from engine_worker import CHUNKS, Case, Reference, batches_of, build, check_cases, launch, plain_backprop, run_cases
from families import LAYERS_TAKE_STATES_UP
from gradients import more, total_gradient_error

# Latent attention with experts, and layers with states.
OTHER_KINDS = ["deepseek_v3", *(["granitemoehybrid"] if LAYERS_TAKE_STATES_UP else [])]


def test_ddp(subtests):
    check_cases(
        subtests,
        [
            Case("ddp"),
            Case("ddp", "tied", enable_after=True),
            Case("ddp", "lora", micro_batches=2),
            Case("ddp", "lora", options={"static_graph": True}),
            Case("ddp", enable_after=True, options={"static_graph": True}),
            Case("ddp", options={"find_unused_parameters": True}),
            Case("ddp", keep="attention", fused=True),
            Case("ddp", "tied", micro_batches=2, options={"gradient_as_bucket_view": True}),
            *(Case("ddp", family) for family in OTHER_KINDS),
        ],
    )


def test_fsdp2(subtests):
    check_cases(
        subtests,
        [
            Case("fsdp2"),
            Case("fsdp2", "tied", micro_batches=2, enable_after=True),
            Case("fsdp2", "lora", micro_batches=2),
            Case("fsdp2", "lora", enable_after=True, options={"reshard_after_forward": False}),
            Case("fsdp2", options={"reshard_after_forward": False}),
            Case("fsdp2", fused=True),
            Case("fsdp2", keep="all", fused=True),
            Case("fsdp2", "lora", fused=True),
            Case("fsdp2", keep="attention", options={"head_too": True}),
            Case("fsdp2", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
            *(Case("fsdp2", family) for family in OTHER_KINDS),
        ],
    )


@more
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_one_chunk_and_many(subtests, engine):
    check_cases(subtests, [Case(engine, chunks=chunks) for chunks in CHUNKS])


def shard_badly() -> list[str]:
    """What is said to FSDP inside a layer, in its second and in its first version."""
    messages = []
    for wrap in (
        lambda layers: [fully_shard(layer.mlp) for layer in layers],
        lambda layers: layers.__setitem__(0, FullyShardedDataParallel(layers[0], device_id=torch.device("cpu"))),
    ):
        model = streamgrad.enable(build("full"), chunk_size=8)
        wrap(model.model.layers)
        with pytest.raises(ValueError, match="cannot be streamed") as refused:
            model(**batches_of(0, 0, 1)[0])
        messages.append(str(refused.value))
    return messages


def test_sharding_inside_a_layer_is_refused():
    inside, first_version = launch(shard_badly)[0]
    assert "apply it to Qwen3DecoderLayer as a whole" in inside
    assert "use FSDP2" in first_version


@more
def test_hsdp():
    """Two replicas of two shards each: the parameters of plain backpropagation, the collectives of checkpointing."""
    cases = [Case("fsdp2", chunks=chunks, options={"hsdp": True}) for chunks in (None, 4)]
    reference = Reference.of(functools.partial(plain_backprop, "full", 4, 1))
    for stock, streamed in launch(run_cases, cases, world_size=4):
        reference.check(streamed.parameters)
        assert streamed.traffic() == stock.traffic()


@more
def test_four_ranks(subtests):
    check_cases(subtests, [Case("ddp", "tied"), Case("fsdp2", chunks=16), Case("zero2", "lora")], world_size=4)


def test_fsdp2_in_bf16():
    """With FSDP2's mixed precision, the distance from fp32 training is at most that of checkpointing under the same policy."""
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    cases = [Case("fsdp2", chunks=chunks, options=options) for chunks in (None, 4, 16)]
    truth = plain_backprop("full", 2, 1, torch.float32)
    stock, *streamed = launch(run_cases, cases)[0]
    allowed = total_gradient_error(stock.parameters, truth)
    assert 1e-4 < allowed < 1e-2, "this is not the error of bf16"
    for outcome in streamed:
        assert total_gradient_error(outcome.parameters, truth) < 1.1 * allowed
        assert outcome.traffic() == stock.traffic()
