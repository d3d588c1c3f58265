"""Weights on the host that are fetched a layer ahead, with FSDP2 and one rank. On a CPU the copies are clones."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import streamgrad
from gradients import errors_by_name
from streamgrad.hf import weights_ahead
from streamgrad.hf.sharded import groups_of
from tiny import tiny_model, tokens

LAYERS = 3
WIDE = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}


@pytest.fixture
def fetched(monkeypatch):
    """Whether each parameter that FSDP2 looked for after it was fetched got what was fetched. Memory need not be pinned."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    used = []

    def waiting(layer):
        return [each for group in groups_of(layer) for each in group.fsdp_params]

    class Copies:
        def __init__(self, values, device, *, after):
            self.copies = [value.to("cpu", copy=True) for value in values]

        def arrived(self):
            return self.copies

    to = weights_ahead._Arrived.to

    def used_to(self, *args, **kwargs):
        out = to(self, *args, **kwargs)
        used.append(out is self._on_gpu)
        return out

    monkeypatch.setattr(weights_ahead, "_waiting", waiting)
    monkeypatch.setattr(weights_ahead, "_Copies", Copies)
    monkeypatch.setattr(weights_ahead._Arrived, "to", used_to)
    yield used
    torch.distributed.destroy_process_group()


@pytest.fixture
def one_rank_on_a_gpu():
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(*, sharded: bool, device: str = "cpu", **shape):
    model = tiny_model("llama", **{"num_hidden_layers": LAYERS} | shape, dtype=torch.float64).to(device)
    if sharded:
        mesh = init_device_mesh(device, (1,))
        for unit in [*model.model.layers, model]:
            fully_shard(unit, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu"))
    streamgrad.enable(model, chunk_size=8, keep="input", offload="none")
    return model


def trained(model, steps, device="cpu"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        ids = tokens(2, 24, seed=step).to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {name: (grad.to_local() if isinstance(grad, DTensor) else grad).cpu() for name, grad in gradients.items()}


def test_steps_are_those_of_weights_on_the_device(fetched):
    expected = trained(build(sharded=False), steps=3)
    actual = trained(build(sharded=True), steps=3)
    assert max(errors_by_name(actual, expected).values()) < 1e-12
    # Every layer but the first in forward, and but the last in backward.
    of_layer = len(list(tiny_model("llama").model.layers[0].parameters()))
    assert fetched == [True] * (3 * 2 * (LAYERS - 1) * of_layer)


def test_weights_that_change_after_they_were_fetched(fetched):
    """As where a step ends in an error between two layers, and the program goes on with other weights."""
    model, plain = build(sharded=True), build(sharded=False)
    trained(model, steps=1), trained(plain, steps=1)
    fetched.clear()
    waiting = [each for group in groups_of(model.model.layers[1]) for each in group.fsdp_params]
    for parameter in waiting:
        state = weights_ahead._state(parameter)
        weights_ahead._Arrived.hand_over(parameter, parameter._sharded_param_data.clone(), state)
    with torch.no_grad():
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.mul_(1.25)
    for parameter in waiting:
        (values,) = parameter.all_gather_inputs
        assert torch.equal(values, parameter.sharded_param.to_local().flatten())
    assert fetched == [False] * len(waiting)
    assert max(errors_by_name(trained(model, steps=2), trained(plain, steps=2)).values()) < 1e-12


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_that_are_late_and_a_gpu_that_is(one_rank_on_a_gpu, monkeypatch):
    """The GPU is kept busy before each copy, on the stream that copies and on the one that computes, in turns."""
    expected = trained(build(sharded=False, device="cuda", **WIDE), steps=3, device="cuda")
    copies, calls = weights_ahead._Copies, []

    class Late(copies):
        def __init__(self, values, device, *, after):
            calls.append(len(values))
            with torch.cuda.stream(torch.cuda.current_stream() if len(calls) % 2 else weights_ahead._stream(device)):
                torch.cuda._sleep(20_000_000)
            super().__init__(values, device, after=after)

    monkeypatch.setattr(weights_ahead, "_Copies", Late)
    actual = trained(build(sharded=True, device="cuda", **WIDE), steps=3, device="cuda")
    assert sum(map(bool, calls)) == 3 * 2 * (WIDE["num_hidden_layers"] - 1)
    assert max(errors_by_name(actual, expected).values()) < 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_layer_is_ahead_however_late_the_gpu_is(one_rank_on_a_gpu):
    """The host calls all layers at once; were all their weights copied by then, they would be there all at the same time."""
    model = build(sharded=True, device="cuda", **WIDE)
    of_layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    of_rest = sum(parameter.nbytes for parameter in model.parameters()) - of_layer * WIDE["num_hidden_layers"]
    trained(model, steps=1, device="cuda")
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(2_000_000_000)
    trained(model, steps=1, device="cuda")
    # The running layer's weights, the next one's and a gradient's way to the host, each a layer; and what is not of layers.
    assert torch.cuda.max_memory_allocated() - before < 2 * of_rest + 5 * of_layer < of_layer * WIDE["num_hidden_layers"]
