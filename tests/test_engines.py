"""DDP and FSDP2 see ordinary layers: the parameters of plain backpropagation, the collectives of gradient checkpointing."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from engine_worker import CHUNKS, Case, check_cases, launch, plain_backprop, run_cases
from gradients import total_gradient_error


def test_ddp(subtests):
    check_cases(
        subtests,
        [
            *(Case("ddp", chunks=chunks) for chunks in CHUNKS),
            Case("ddp", "tied", enable_after=True),
            Case("ddp", "lora", micro_batches=2),
            Case("ddp", "lora", options={"static_graph": True}),
            Case("ddp", enable_after=True, options={"static_graph": True}),
            Case("ddp", options={"find_unused_parameters": True}),
            Case("ddp", "tied", micro_batches=2, options={"gradient_as_bucket_view": True}),
        ],
    )


def test_fsdp2(subtests):
    check_cases(
        subtests,
        [
            *(Case("fsdp2", chunks=chunks) for chunks in CHUNKS),
            Case("fsdp2", "tied", micro_batches=2, enable_after=True),
            Case("fsdp2", "lora", micro_batches=2),
            Case("fsdp2", "lora", enable_after=True, options={"reshard_after_forward": False}),
            Case("fsdp2", options={"reshard_after_forward": False}),
            Case("fsdp2", keep="attention", options={"head_too": True}),
            Case("fsdp2", options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        ],
    )


def test_four_ranks(subtests):
    check_cases(subtests, [Case("ddp", "tied"), Case("fsdp2", chunks=16), Case("zero2", "lora")], world_size=4)


def test_fsdp2_in_bf16():
    """With FSDP2's mixed precision, the distance from fp32 training is at most that of checkpointing under the same policy."""
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    cases = [Case("fsdp2", chunks=chunks, options=options) for chunks in (None, 4, 16)]
    truth = plain_backprop("full", world_size=2, micro_batches=1)
    stock, *streamed = launch(run_cases, cases)[0]
    allowed = total_gradient_error(stock.parameters, truth)
    assert 1e-4 < allowed < 1e-2, "this is not the error of bf16"
    for outcome in streamed:
        assert total_gradient_error(outcome.parameters, truth) < 1.1 * allowed
        assert outcome.traffic() == stock.traffic()
