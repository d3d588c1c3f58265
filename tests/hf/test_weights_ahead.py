"""Weights on the host that are fetched a layer ahead, with FSDP2 and one rank. On a CPU the copies are clones."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import streamgrad
from gradients import errors_by_name, no_float32
from streamgrad.hf import step_plan, weights_ahead
from streamgrad.hf.libraries.sharded import fsdp_groups_of
from streamgrad.hf.weights_ahead import _Arrived
from tiny import tiny_model, tokens

LAYERS = 3
WIDE = {"num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}


class Clones:
    """Stands in for copies to a GPU."""

    def __init__(self, device):
        self.held = []

    def begin(self, values):
        self.held = [value.to("cpu", copy=True) for value in values]
        return self.held.copy()

    def wait(self):
        pass

    def free(self):
        self.held = []


@pytest.fixture
def fetched(monkeypatch):
    """Whether each parameter that FSDP2 looked for after it was fetched got what was fetched. Memory need not be pinned."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    used = []
    to = weights_ahead._Arrived.to

    def used_to(self, *args, **kwargs):
        out = to(self, *args, **kwargs)
        used.append(out is self._on_gpu)
        return out

    monkeypatch.setattr(weights_ahead, "_is_fetched", lambda parameter: True)
    monkeypatch.setattr(weights_ahead, "_Copies", Clones)
    monkeypatch.setattr(weights_ahead._Arrived, "to", used_to)
    yield used
    torch.distributed.destroy_process_group()


def parameters_of(layer):
    return [each for group in fsdp_groups_of(layer) for each in group.fsdp_params]


def left_over(model):
    return [
        each for layer in model.model.layers for each in parameters_of(layer) if isinstance(each._sharded_param_data, _Arrived)
    ]


@pytest.fixture
def one_rank_on_a_gpu():
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def build(*, sharded: bool, enabled: bool = True, device: str = "cpu", options=None, **shape):
    model = tiny_model("llama", **{"num_hidden_layers": LAYERS} | shape, dtype=torch.float64).to(device)
    if sharded:
        mesh = init_device_mesh(device, (1,))
        for unit in [*model.model.layers, model]:
            fully_shard(unit, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=device != "cpu"))
    if enabled:
        streamgrad.enable(model, **{"chunk_size": 8, "keep": "input", "offload": "none"} | (options or {}))
    return model


def trained(model, steps, device="cpu"):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        ids = tokens(2, 24, seed=step).to(device)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return gradients_of(model)


def gradients_of(model):
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    local = {name: grad.to_local() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}
    return {name: None if grad is None else grad.cpu() for name, grad in local.items()}


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_steps_are_those_of_plain_backpropagation(fetched, keep):
    with no_float32():
        expected = trained(build(sharded=False, enabled=False), steps=3)
        actual = trained(build(sharded=True, options={"keep": keep}), steps=3)
    assert max(errors_by_name(actual, expected).values()) < 1e-9
    # Every layer but the first in forward, and but the last in backward. Layers that keep all run plain.
    of_layer = len(list(tiny_model("llama").model.layers[0].parameters()))
    assert fetched == [True] * (0 if keep == "all" else 3 * 2 * (LAYERS - 1) * of_layer)


def test_weights_that_change_after_they_were_fetched(fetched):
    """As where a step ends in an error between two layers, and the program goes on with other weights."""
    model, plain = build(sharded=True), build(sharded=False)
    trained(model, steps=1), trained(plain, steps=1)
    fetched.clear()
    waiting = parameters_of(model.model.layers[1])
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


@pytest.mark.parametrize("changes", [lambda ps: torch._foreach_mul_(ps, 1.25), lambda ps: [p.data.mul_(1.25) for p in ps]])
def test_a_hook_that_changes_weights_unseen_before_they_are_gathered(fetched, changes):
    """As an optimizer may that steps each layer just before it is called. Neither way changes a version."""

    def hook(layer, inputs):
        with torch.no_grad():
            changes(list(layer.parameters()))

    def losses(model):
        ids = tokens(2, 24)
        handles = [layer.register_forward_pre_hook(hook, prepend=True) for layer in model.model.layers]
        loss = model(input_ids=ids, labels=ids).loss
        for handle in handles:
            handle.remove()
        return torch.stack([loss, model(input_ids=ids, labels=ids).loss])

    assert torch.allclose(losses(build(sharded=True)), losses(build(sharded=False)), rtol=1e-12)


def test_nothing_is_left_where_lower_layers_need_no_gradient(fetched):
    found = []
    with no_float32():
        for sharded in (True, False):
            model, ids = build(sharded=sharded, enabled=sharded), tokens(2, 24)
            model.model.layers[0].requires_grad_(False)
            model.model.embed_tokens.requires_grad_(False)
            model(input_ids=ids, labels=ids).loss.backward()
            found.append(gradients_of(model))
            assert not left_over(model)
    assert fetched and max(errors_by_name(*found).values()) < 1e-10


def test_nothing_is_left_where_a_call_ends_early(fetched):
    made = []

    class Noted(Clones):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    model = build(sharded=True)
    model.config.num_hidden_layers = LAYERS - 1  # transformers runs so many
    with mock.patch.object(weights_ahead, "_Copies", Noted):
        loss = model(input_ids=tokens(2, 24), labels=tokens(2, 24)).loss
    assert loss.requires_grad and not left_over(model) and made and not any(copies.held for copies in made)


def test_what_a_failed_backward_has_left_is_dropped(fetched):
    model, plain, ids = build(sharded=True), build(sharded=False), tokens(2, 24)
    loss = model(input_ids=ids, labels=ids).loss
    parameter = model.model.layers[1].mlp.down_proj.weight
    handle = parameter.register_post_accumulate_grad_hook(lambda parameter: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    waiting = parameters_of(model.model.layers[0])
    assert left_over(model) == waiting
    with torch.no_grad():
        torch._foreach_mul_([each.sharded_param.to_local() for each in waiting], 1.25)
        torch._foreach_mul_(list(plain.model.layers[0].parameters()), 1.25)
    weights_ahead.WeightsAhead(model.model.layers)
    assert not left_over(model)
    for each, expected in zip(waiting, plain.model.layers[0].parameters(), strict=True):
        assert torch.equal(each.all_gather_inputs[0], expected.flatten())


def test_memory_that_is_short_leaves_copies_to_fsdp2(fetched):
    class Short(Clones):
        def begin(self, values):
            return []

    with mock.patch.object(weights_ahead, "_Copies", Short):
        actual = trained(build(sharded=True), steps=2)
    assert max(errors_by_name(actual, trained(build(sharded=False), steps=2)).values()) < 1e-12 and not fetched


def test_what_is_fetched_is_no_cost_of_the_layer_that_is_measured(fetched):
    found = []
    measured = step_plan.measured_costs
    for is_fetched in (True, False):
        with (
            mock.patch.object(step_plan, "measured_costs", lambda *args, **kw: found.append(measured(*args, **kw)) or found[-1]),
            mock.patch.object(weights_ahead, "_is_fetched", lambda parameter, is_fetched=is_fetched: is_fetched),
        ):
            trained(build(sharded=True, options={"keep": "auto", "memory_budget": "1GiB"}), steps=1)
    assert found[0] == found[1] and len(found) == 2


def test_only_pinned_memory_of_a_cuda_device_is_fetched():
    def parameter(**changes):
        said = {
            "offload_to_cpu": True,
            "pin_memory": True,
            "device": torch.device("cuda"),
            "_sharded_local_tensor": torch.ones(1),
        }
        return SimpleNamespace(**said | changes)

    assert weights_ahead._is_fetched(parameter())
    for changes in (
        {"device": torch.device("cpu")},
        {"pin_memory": False},
        {"offload_to_cpu": False},
        {"_sharded_local_tensor": SimpleNamespace(fsdp_pre_all_gather=None)},
    ):
        assert not weights_ahead._is_fetched(parameter(**changes))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_that_are_late_and_a_gpu_that_is(one_rank_on_a_gpu, monkeypatch):
    """The GPU is kept busy before each copy, on the stream that copies and on the one that computes, in turns."""
    expected = trained(build(sharded=False, device="cuda", **WIDE), steps=3, device="cuda")
    calls = []

    class Late(weights_ahead._Copies):
        def begin(self, values):
            calls.append(len(values))
            with torch.cuda.stream(torch.cuda.current_stream() if len(calls) % 2 else self._stream):
                torch.cuda._sleep(20_000_000)
            return super().begin(values)

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
