"""Sharded checkpoints of streamed models, saved by two ranks and resumed by one."""

from __future__ import annotations

import functools

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import streamgrad
from engine_worker import STEPS, Case, Fsdp2, Reference, Zero, batches_of, build, launch, plain_backprop, prepare_deepspeed
from gradients import more
from streamgrad.parallel import make_zero3_leaves


def sharded() -> Fsdp2:
    return Fsdp2(streamgrad.enable(build("full"), chunk_size=8, head_chunk_size=3), Case("fsdp2"))


def save_shards(folder: str) -> None:
    engine = sharded()
    engine.step(batches_of(dist.get_rank(), 0, 1))
    model, optimizer = get_state_dict(engine.model, engine.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def resume_shards(folder: str) -> dict[str, Tensor]:
    """The steps after the first, with the batches of both ranks."""
    engine = sharded()
    model, optimizer = get_state_dict(engine.model, engine.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(engine.model, engine.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(1, STEPS):
        engine.step([batches_of(rank, step, 1)[0] for rank in (0, 1)])
    return engine.parameters()


def test_shards_of_fsdp2_are_resumed_by_another_number_of_ranks(tmp_path):
    """With the optimizer's momentum: the parameters of plain backpropagation that was never interrupted."""
    launch(save_shards, str(tmp_path))
    Reference.of(functools.partial(plain_backprop, "full", 2, 1)).check(launch(resume_shards, str(tmp_path), world_size=1)[0])


def zero_3() -> Zero:
    prepare_deepspeed()
    return Zero(streamgrad.enable(make_zero3_leaves(build("full")), chunk_size=8), Case("zero3"))


def save_partitions(folder: str) -> None:
    engine = zero_3()
    engine.step(batches_of(dist.get_rank(), 0, 1))
    engine.engine.save_checkpoint(folder)


def resume_partitions(folder: str) -> str:
    with pytest.raises(Exception, match=".") as refused:
        zero_3().engine.load_checkpoint(folder)
    return str(refused.value)


@more
def test_partitions_of_zero_3_are_refused_by_deepspeed(tmp_path):
    """It names both numbers of ranks."""
    launch(save_partitions, str(tmp_path))
    (said,) = launch(resume_partitions, str(tmp_path), world_size=1)
    assert "world size" in said and "2" in said and "1" in said, said
