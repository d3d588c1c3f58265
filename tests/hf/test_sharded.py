"""Parameters that FSDP2 has sharded. On a CPU none waits elsewhere than it is used, so one is made by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from streamgrad.hf.libraries.sharded import (
    StatesToCome,
    bytes_on_their_way,
    device_at_work,
    own_bytes,
    waits_on_host,
    whole_gradient_bytes,
)
from streamgrad.hf.status import _optimizer_of
from streamgrad.hf.step_facts import left_bytes

SHAPE, SHARD = torch.Size((8, 3)), torch.Size((4, 3))


@pytest.fixture
def sharded():
    """A half of a parameter on the CPU, by the kind of device on which it is used."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)

    def make(device: str) -> nn.Parameter:
        mesh = DeviceMesh(device, [0], _init_backend=False)
        spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(SHAPE, (3, 1), torch.float32))
        return nn.Parameter(DTensor(torch.ones(SHARD), spec, requires_grad=False))

    yield make
    torch.distributed.destroy_process_group()


def test_a_shard_is_counted_where_its_gradient_stays(sharded):
    plain, shard, on_host = nn.Parameter(torch.ones(SHAPE)), sharded("cpu"), sharded("cuda")
    assert [waits_on_host(each) for each in (plain, shard, on_host)] == [False, False, True]
    assert [own_bytes(each) for each in (plain, shard, on_host)] == [96, 48, 48]
    assert [left_bytes(each, hooks_free=False) for each in (plain, shard, on_host)] == [96, 48, 0]
    on_meta = nn.Parameter(on_host.to("meta"))  # before its weights are loaded
    assert not waits_on_host(on_meta) and device_at_work(on_meta).type == "meta"


def test_gradients_that_are_not_shared_stay_whole(sharded):
    """As in all but the last of several batches in a step; what tensor parallelism has cut is not gathered."""
    model = nn.Sequential(nn.Linear(8, 3, bias=False), nn.Linear(3, 8), nn.ParameterList([sharded("cpu")]))
    assert bytes_on_their_way(model) == 0 and list(map(whole_gradient_bytes, model)) == [None] * 3
    for layer in model[:2]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    model[1].bias.requires_grad_(False)
    assert bytes_on_their_way(model) == 2 * (96 + 32) and list(map(whole_gradient_bytes, model)) == [None] * 3
    for layer in model[:2]:
        layer.set_requires_gradient_sync(False)
    assert list(map(whole_gradient_bytes, model)) == [96, 96, None]
    model[1](model[0](torch.ones(1, 8))).sum().backward()
    assert list(map(whole_gradient_bytes, model)) == [0, 0, None], "there already"
    assert all(parameter.grad is None for parameter in model.parameters())


def test_host_memory_is_left_for_gradients_and_moments(sharded):
    """Until a step has been made: then moments are there and no longer free. Batches whose gradients are added are none."""
    plain, on_host, frozen = nn.Parameter(torch.ones(SHAPE)), sharded("cuda"), sharded("cuda").requires_grad_(False)
    states, parameters = StatesToCome(), [plain, on_host, frozen]

    def host_bytes(*, gradients: bool, backward: bool = True) -> float:
        on_host.grad = on_host.detach().clone() if gradients else None
        hidden = torch.ones(2, requires_grad=True) * 1.0
        count = states.host_bytes(parameters, hidden)
        if backward:
            hidden.sum().backward()
        return count

    assert host_bytes(gradients=False, backward=False) == host_bytes(gradients=False) == 3 * 48
    assert host_bytes(gradients=True) == 2 * 48
    assert host_bytes(gradients=False) == 48 and host_bytes(gradients=True) == 0
    assert states.host_bytes([plain, frozen], torch.ones(2)) == 0


def test_weights_on_the_host_are_told(sharded, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    plain, on_host = nn.Parameter(torch.ones(SHAPE)), sharded("cuda")
    assert [device_at_work(each) for each in (plain, on_host)] == [torch.device("cpu"), torch.device("cuda", 1)]
    stream = SimpleNamespace(planner=SimpleNamespace(optimizer="AdamW"))
    told = [_optimizer_of(nn.ParameterList([plain, each]), stream) for each in (plain, on_host)]
    assert told == ["AdamW", "AdamW, weights on the host"]
