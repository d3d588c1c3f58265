"""Optimizers in backward: the parameters of an ordinary loop, and gradients that are freed at once."""

from __future__ import annotations

import copy
import gc
import weakref

import accelerate
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import streamgrad
from gradients import more, no_float32, worst_gradient_error
from lora import with_lora
from streamgrad.hf.updates.in_backward import updates_of
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.ops.freed_gradient import held_gradient
from tiny import tiny_model, tokens

OPTIMIZERS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2}),
    "fused Adam": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
}


def one_step(model, optimizer, seed: int) -> None:
    ids = tokens(2, 23, seed=seed)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def trained(model, make, *, steps: int = 3, schedule: bool = True) -> dict[str, torch.Tensor]:
    """The parameters after some steps of an ordinary loop."""
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step * schedule))
    with no_float32():
        for step in range(steps):
            one_step(model, optimizer, step)
            scheduler.step()
            optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def streamed(*args, **options):
    return streamgrad.enable(tiny_model(*args, **options), chunk_size=7, head_chunk_size=5)


def assert_same(actual, expected, tolerance: float = 1e-12) -> None:
    worst, name = worst_gradient_error(actual, expected)
    assert worst <= tolerance, f"{name}: {worst:.1e}"


# --- The same parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_are_those_of_an_ordinary_loop(name):
    """Tied embeddings have a gradient of two parts; an update after the first alone would give other parameters."""
    kind, options = OPTIMIZERS[name]
    expected = trained(tiny_model("qwen3"), lambda model: kind(model.parameters(), **options))
    assert_same(trained(streamed("qwen3"), lambda model: streamgrad.optimizer_in_backward(model, kind, **options)), expected)


@pytest.mark.parametrize("keep", [pytest.param("attention", marks=more), "all"])
def test_whatever_layers_keep(keep):
    expected = trained(tiny_model("llama"), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = streamgrad.enable(tiny_model("llama"), chunk_size=7, keep=keep)
    assert_same(trained(model, lambda model: streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2)), expected)


def test_a_model_that_is_not_streamed():
    expected = trained(tiny_model("qwen3"), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    model = tiny_model("qwen3")
    model.gradient_checkpointing_enable()
    ours = trained(model, lambda model: streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2))
    assert_same(ours, expected, 0.0)


def test_adapters_and_frozen_parameters():
    """Those that are frozen stay as they were; one that is unfrozen later is updated, if the optimizer has it."""

    def groups(model):
        frozen = [p for p in model.parameters() if not p.requires_grad]
        return [{"params": [p for p in model.parameters() if p.requires_grad]}, {"params": frozen[:3], "weight_decay": 0.5}]

    def thawing(make):
        def made(model):
            optimizer = make(model)
            for parameter in optimizer.param_groups[1]["params"][1:]:
                parameter.requires_grad_()
            return optimizer

        return made

    expected = trained(with_lora(tiny_model("llama")), thawing(lambda model: torch.optim.AdamW(groups(model), lr=1e-2)))
    model = with_lora(streamed("llama"))
    ours = thawing(lambda model: streamgrad.optimizer_in_backward(groups(model), torch.optim.AdamW, lr=1e-2))
    assert_same(trained(model, ours), expected)


def test_groups_and_schedulers():
    """Groups have options of their own, are added later too, and follow a scheduler."""

    def make(model, by):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        optimizer = by([{"params": decayed, "weight_decay": 0.3, "lr": 3e-2}])
        optimizer.add_param_group({"params": [p for p in model.parameters() if p.dim() == 1]})
        return optimizer

    expected = trained(tiny_model("llama"), lambda m: make(m, lambda groups: torch.optim.AdamW(groups, lr=1e-2)))
    ours = trained(
        streamed("llama"),
        lambda m: make(m, lambda groups: streamgrad.optimizer_in_backward(m, torch.optim.AdamW, params=groups, lr=1e-2)),
    )
    assert_same(ours, expected)


def test_clipping_by_the_norm_of_the_step_before():
    """The first step is not clipped; every later one is scaled by torch's own rule, with the last step's norm."""
    limit, model, norms = 0.5, tiny_model("qwen3"), []
    expected_optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with no_float32():
        for step in range(4):
            ids = tokens(2, 23, seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            if step:
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norms[-2])
            expected_optimizer.step()
            expected_optimizer.zero_grad()
        expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
        ours = streamed("qwen3")
        optimizer = streamgrad.optimizer_in_backward(ours, torch.optim.SGD, lr=1e-2, max_grad_norm=limit)
        for step in range(4):
            one_step(ours, optimizer, step)
            assert optimizer.grad_norm.item() == pytest.approx(norms[step].item(), rel=1e-10)
    assert min(norms) > 2 * limit, "nothing was clipped"
    assert_same({name: parameter.detach() for name, parameter in ours.named_parameters()}, expected)


@pytest.mark.parametrize("clipped", [False, True])
def test_resumed_bit_for_bit(clipped, tmp_path):
    """From a checkpoint on disk; the norm that the next step is clipped by is part of it."""
    options = {"lr": 1e-2} | ({"max_grad_norm": 0.5} if clipped else {})
    model = streamed("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, **options)
    for step in range(2):
        one_step(model, optimizer, step)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    one_step(model, optimizer, 2)
    resumed = streamed("qwen3", seed=5)
    again = streamgrad.optimizer_in_backward(resumed, torch.optim.AdamW, **options)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    again.load_state_dict(checkpoint["optimizer"])
    one_step(resumed, again, 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, resumed.get_parameter(name)), name


def test_a_checkpoint_of_an_ordinary_optimizer_is_loaded():
    model = streamed("qwen3")
    ordinary = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one_step(model, ordinary, 0)
    ordinary.zero_grad()
    twin = copy.deepcopy(model)
    optimizer = streamgrad.optimizer_in_backward(twin, torch.optim.AdamW, lr=5.0)
    optimizer.load_state_dict(copy.deepcopy(ordinary.state_dict()))  # whose tensors torch would share
    assert optimizer.state_dict().keys() == ordinary.state_dict().keys()
    one_step(model, ordinary, 1)
    one_step(twin, optimizer, 1)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)), name


def test_an_ordinary_optimizer_to_look_at():
    """A closure, gradients set by hand, step hooks, and the end of updates in backward."""
    model = streamed("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1.0)
    assert isinstance(optimizer, torch.optim.SGD) and "lr: 1.0" in repr(optimizer)
    ids, steps = tokens(1, 9), []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    def closure():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    before = model.model.norm.weight.detach().clone()
    assert optimizer.step(closure).item() > 0 and len(steps) == 1
    assert not torch.equal(model.model.norm.weight, before)
    before = model.model.norm.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.model.norm.weight, before)
    model.model.norm.weight.grad = torch.ones_like(before)
    optimizer.step()
    assert torch.equal(model.model.norm.weight, before - 1.0)
    optimizer.zero_grad()
    assert model.model.norm.weight.grad is None
    optimizer.remove()
    closure()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert updates_of(model.model.norm.weight) is None


@pytest.mark.parametrize("at", ["once", "backward", "step"])
def test_what_is_dropped_is_freed(at):
    """With its optimizer: after a step, between backward and step as by an interrupt, and unused."""
    model, ids = streamed("qwen3"), tokens(1, 9)
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2)
    if at != "once":
        model(input_ids=ids, labels=ids).loss.backward()
    if at == "step":
        optimizer.step()
    kept = [optimizer, model, *model.parameters(), *(each for p in model.parameters() for each in optimizer.state_tensors(p))]
    gone = [weakref.ref(each) for each in kept]
    del kept, optimizer
    gc.collect()
    assert updates_of(model.model.norm.weight) is gone[0]() is not None  # updates go on while the model is there
    del model
    gc.collect()
    assert not [each for each in gone if each() is not None]


def test_parameters_are_saved_without_their_optimizer(tmp_path):
    model = streamed("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2)
    torch.save(dict(model.named_parameters()), tmp_path / "parameters.pt")
    loaded = torch.load(tmp_path / "parameters.pt", weights_only=True)
    assert_same(loaded, dict(model.named_parameters()), 0.0)
    assert updates_of(loaded["model.norm.weight"]) is None and updates_of(model.model.norm.weight) is optimizer


def test_a_copy_of_a_parameter_has_no_optimizer():
    model = tiny_model("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1e-2)
    for copied in (copy.copy(model.model.norm.weight), copy.deepcopy(model).model.norm.weight):
        assert updates_of(copied) is None
        copied.sum().backward()
        assert torch.equal(copied.grad, torch.ones_like(copied))
    optimizer.remove()
    optimizer.remove()


def test_parameters_that_a_conversion_has_swapped(monkeypatch):
    """torch then has moved hook and attributes to the old tensor: `step` applies the gradients, which stay."""
    model = tiny_model("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1e-2)
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model.to(torch.float32)
    before = model.model.norm.weight.detach().clone()
    one_step(model, optimizer, 0)
    assert before.dtype == torch.float32 and not torch.equal(model.model.norm.weight, before)
    optimizer.remove()


# --- Gradients are freed ----------------------------------------------------------------------------------------------------


def test_no_more_gradients_than_one_layers():
    """Counted: at its peak an ordinary step also holds the gradients of the layers that backward has passed."""
    peaks, layers = [], 5
    ids = tokens(1, 4)
    for in_backward in (False, True):
        model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=layers, hidden_size=64, intermediate_size=256)
        streamgrad.enable(model, chunk_size=4, keep="input")
        if in_backward:
            streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1e-3)
        with LiveBytes() as live:
            model(input_ids=ids, labels=ids).loss.backward()
        assert all((held_gradient(parameter) is None) == in_backward for parameter in model.parameters())
        peaks.append(live.peak_bytes)
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert peaks[1] < 1.5 * layer, "more than a layer's gradients and its activations"
    assert peaks[0] > layers * layer


class _Looking(torch.optim.SGD):
    """Counts the parameters that its steps come by, and the gradients that it finds."""

    def step(self, closure=None):
        for group in self.param_groups:
            self.looked = getattr(self, "looked", 0) + len(group["params"])
            found = [parameter for parameter in group["params"] if held_gradient(parameter) is not None]
            self.found = [*getattr(self, "found", []), *found]
            for parameter in found:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def test_an_update_looks_at_its_own_parameter():
    """But for the first of a step: else the cost would grow with the square of the parameters. Each is updated once."""
    model = streamed("qwen3")
    named = [{"params": [p for p in model.parameters() if (p.dim() > 1) is matrices]} for matrices in (True, False)]
    optimizer = streamgrad.optimizer_in_backward(model, _Looking, params=named, lr=1e-3)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    for step in range(2):
        one_step(model, optimizer, step)
    count = sum(map(len, groups))
    assert optimizer.looked == 2 * (2 * count - 1) and len(optimizer.found) == 2 * count
    assert set(map(id, optimizer.found[:count])) == set(map(id, optimizer.parameters))
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [list(map(id, group)) for group in groups]


# --- Weights and states on the host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled_first", [True, False])
def test_weights_that_accelerate_offloads_are_refused_by_name(enabled_first):
    """The stock model would train nothing: its forward and backward run, and no parameter has a gradient."""
    model, ids = tiny_model("llama"), tokens(1, 9)
    if enabled_first:
        streamgrad.enable(model, chunk_size=4)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"cpu_offload.*without a gradient.*CPUOffloadPolicy"):
        streamgrad.enable(model, chunk_size=4)(input_ids=ids, labels=ids)


def test_fsdp2_with_weights_on_the_host():
    """On one rank: weights, gradients and states are on the host, and the parameters become those of an ordinary loop."""
    expected = trained(tiny_model("llama"), lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model, mesh = streamed("llama"), init_device_mesh("cpu", (1,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        ours = trained(model, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
        assert_same({name: parameter.full_tensor() for name, parameter in ours.items()}, expected)
        with pytest.raises(ValueError, match="under FSDP.* a gradient"):
            streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2)
    finally:
        torch.distributed.destroy_process_group()
