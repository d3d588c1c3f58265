"""DeepSpeed ZeRO-1, 2 and 3: the parameters of plain backpropagation, the collectives of gradient checkpointing."""

from __future__ import annotations

import deepspeed
import pytest
from deepspeed.module_inject.layers import LinearLayer

import streamgrad
from engine_worker import CHUNKS, Case, Zero, batches_of, build, check_cases, launch, prepare_deepspeed
from gradients import more
from streamgrad.parallel import make_zero3_leaves

OFFLOADED = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def test_zero_1_and_2(subtests):
    check_cases(
        subtests,
        [
            Case("zero1"),
            Case("zero1", "lora", enable_after=True),
            Case("zero2"),
            Case("zero2", "tied", micro_batches=2),
            Case("zero2", "lora", micro_batches=2, enable_after=True),
            Case("zero2", options=OFFLOADED),
        ],
    )


def test_zero_3(subtests):
    check_cases(
        subtests,
        [
            Case("zero3"),
            Case("zero3", "tied", micro_batches=2),
            Case("zero3", keep="attention", fused=True),
            Case("zero3", "lora", enable_after=True),
        ],
    )


@more
def test_more_of_zero_2(subtests):
    check_cases(subtests, [Case("zero2", chunks=1), Case("zero2", chunks=16), Case("zero2", "lora", chunks=16)])


@more
def test_more_of_zero_3(subtests):
    check_cases(
        subtests,
        [
            *(Case("zero3", chunks=chunks) for chunks in CHUNKS),
            Case("zero3", keep="attention"),
            Case("zero3", "deepseek_v3"),
            Case("zero3", keep="all", fused=True),
            Case("zero3", "lora", fused=True),
            Case("zero3", "lora", chunks=16),
            Case("zero3", options=OFFLOADED | {"offload_param": {"device": "cpu", "pin_memory": False}}),
        ],
    )


def train_without_leaves() -> tuple[str, str]:
    """What is said when leaf modules are missing, and when they come too late."""
    prepare_deepspeed()
    model = streamgrad.enable(build("full"), chunk_size=8)
    engine = Zero(model, Case("zero3"))
    with pytest.raises(RuntimeError) as too_late:
        make_zero3_leaves(model)
    with pytest.raises(ValueError, match="module by module") as missing:
        engine.step(batches_of(0, 0, 1))
    return str(missing.value), str(too_late.value)


def test_zero_3_without_leaf_modules_is_refused():
    (missing, too_late), *_ = launch(train_without_leaves)
    assert "Qwen3DecoderLayer" in missing and "make_zero3_leaves(model) before" in missing
    assert "before deepspeed.initialize" in too_late


def test_leaves_are_the_decoder_layers():
    model = make_zero3_leaves(build("lora"))
    leaves = deepspeed.utils.get_z3_leaf_modules(model)
    assert leaves == list(model.get_base_model().model.layers)


def test_tensor_parallelism_of_deepspeed_is_refused_by_name():
    """AutoTP puts its own linear maps, with a collective in each call, in the place of a layer's."""
    model = build("full")
    layer = model.model.layers[0]
    layer.mlp.up_proj = LinearLayer(layer.mlp.up_proj, mp_group=None, skip_partition=True)
    with pytest.raises(ValueError, match=r"mlp.up_proj is DeepSpeed's LinearLayer: AutoTP .* \(sp_size\)"):
        streamgrad.enable(model, chunk_size=8)(**batches_of(0, 0, 1)[0])
