"""What optimizers in backward cannot do, and who is told so."""

from __future__ import annotations

import copy

import accelerate
import pytest
import torch
from torch import nn

import streamgrad
from streamgrad.hf.updates.in_backward import updates_of
from streamgrad.ops.freed_gradient import held_gradient
from tiny import tiny_model, tokens


def one_step(model, optimizer, seed: int) -> None:
    ids = tokens(2, 23, seed=seed)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()


def streamed(*args, **options):
    return streamgrad.enable(tiny_model(*args, **options), chunk_size=7, head_chunk_size=5)


def values(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_a_second_backward_before_step_is_refused():
    model = streamed("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2)
    ids = tokens(1, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    before = values(model)
    with pytest.raises(RuntimeError, match=r"cannot accumulate gradients.*step\(\) after each backward"):
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(map(torch.equal, before, values(model)))
    assert all(held_gradient(parameter) is None for parameter in model.parameters())
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    model(input_ids=ids, labels=ids).loss.backward()


def freed(factor: float = 1.0, **options):
    """A model and its optimizer between backward and step."""
    model = streamed("qwen3", dtype=torch.float32)
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2, **options)
    ids = tokens(1, 9)
    (factor * model(input_ids=ids, labels=ids).loss).backward()
    return model, optimizer


def scaled_by_hand(parameters) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.data.mul_(0.5)


USES = {
    "by the norm": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "by the norm at once": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True),
    "by a norm that is known": lambda model: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(4.0)),
    "by value": lambda model: nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "the norm alone": lambda model: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "by hand": lambda model: scaled_by_hand(model.parameters()),
    "Accelerate's": lambda model: accelerate.Accelerator(cpu=True).clip_grad_norm_(model.parameters(), 1.0),
}


@pytest.mark.parametrize("use", USES)
def test_a_gradient_that_is_gone_cannot_be_used(use):
    """Clipping would find none, and do nothing."""
    model, optimizer = freed()
    with pytest.raises(RuntimeError, match=r"max_grad_norm to optimizer_in_backward.*on the host.*optimizer\.grad_norm"):
        USES[use](model)
    assert "FreedGradient" in repr(model.model.norm.weight.grad) and optimizer.grad_norm > 0


def test_clipping_by_the_optimizers_own_limit_gives_the_norm():
    model, optimizer = freed(max_grad_norm=2.0)
    assert optimizer.grad_norm > 2.0, "nothing would be clipped"
    for foreach in (None, True):
        norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0, foreach=foreach)
        assert norm.item() == pytest.approx(optimizer.grad_norm.item(), rel=1e-6)
    with pytest.raises(RuntimeError, match="max_grad_norm to optimizer_in_backward"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model, optimizer = freed(float("nan"), max_grad_norm=2.0)
    assert nn.utils.clip_grad_norm_(model.parameters(), 2.0).isnan() and optimizer.grad_norm.isnan()


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_is_refused(fused, unscaled):
    _, optimizer = freed(fused=fused)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"GradScaler.*bf16"):
        (scaler.unscale_ if unscaled else scaler.step)(optimizer)


class _SharedCounter(torch.optim.SGD):
    """Its step size depends on how often it was stepped, whichever parameter had a gradient."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-group["lr"] / group["calls"])


@pytest.mark.parametrize(
    ("kind", "match"),
    [(torch.optim.LBFGS, "closure"), (_SharedCounter, "for that parameter alone"), (torch.optim.SparseAdam, "SparseAdam")],
)
def test_an_optimizer_that_needs_all_gradients_is_refused(kind, match):
    model = streamed("qwen3")
    with pytest.raises(ValueError, match=match):
        streamgrad.optimizer_in_backward(model, kind, lr=1e-2)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_what_else_is_refused():
    model = streamed("qwen3")
    make = streamgrad.optimizer_in_backward
    with pytest.raises(TypeError, match="optimizer_class must be a class"):
        make(model, "adamw", lr=1e-2)
    with pytest.raises(TypeError, match=r"got an object of SGD. .*optimizer_in_backward\(model, SGD, lr=1e-5\)"):
        make(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    with pytest.raises(TypeError, match="made of other optimizers"):
        make(model, type("Offloading", (torch.optim.SGD,), {"param_groups": property(lambda self: [])}), lr=1e-2)
    with pytest.raises(ValueError, match="max_grad_norm=0 must be above 0"):
        make(model, torch.optim.SGD, lr=1e-2, max_grad_norm=0)
    with pytest.raises(ValueError, match="parameters are on cpu, meta"):
        make([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))], torch.optim.SGD, lr=1e-2)
    optimizer = make(model, torch.optim.SGD, lr=1e-2)
    with pytest.raises(ValueError, match=r"already updated in backward.*remove\(\)"):
        make(model, torch.optim.SGD, lr=1e-2)
    other = make([nn.Parameter(torch.ones(2))], torch.optim.SGD, lr=1.0)
    for added, words in (
        (model.model.norm.weight, r"1 of 2 parameters .* by another optimizer"),
        (torch.ones(2, device="meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=words):
            other.add_param_group({"params": [added]})
        assert len(other.param_groups) == 1 and updates_of(model.model.norm.weight) is optimizer
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(optimizer)
    with pytest.raises(ValueError, match="register_step_pre_hook"):
        optimizer.register_step_pre_hook(print)
    leftover = model.model.layers[0].mlp.up_proj.weight
    leftover.grad = torch.ones_like(leftover)
    before = values(model)
    with pytest.raises(RuntimeError, match=r"from before this backward pass.*zero_grad\(\)"):
        one_step(model, optimizer, 0)
    assert all(map(torch.equal, before, values(model)))
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2))]
    with pytest.raises(RuntimeError, match="were replaced in its param_groups"):
        optimizer.step()


def test_a_step_that_fails_on_its_way_says_what_to_do(monkeypatch):
    """Layers that backward has passed are updated; the next backward says so, and after `step` training goes on."""
    model = streamed("qwen3")
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-2)
    first, last = (model.model.layers[index].mlp.up_proj.weight for index in (0, 1))
    handle = first.register_hook(lambda gradient: (_ for _ in ()).throw(torch.OutOfMemoryError("no memory")))
    before = first.detach().clone(), last.detach().clone()
    with pytest.raises(torch.OutOfMemoryError):
        one_step(model, optimizer, 0)
    handle.remove()
    assert torch.equal(first, before[0]) and not torch.equal(last, before[1])
    assert all(held_gradient(parameter) is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="load a checkpoint, or call step"):
        one_step(model, optimizer, 1)
    optimizer.step()
    one_step(model, optimizer, 1)


def test_several_processes_are_refused(monkeypatch):
    model = tiny_model("qwen3")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"under DistributedDataParallel a gradient .* Use an ordinary optimizer"):
            streamgrad.optimizer_in_backward(nn.parallel.DistributedDataParallel(model), torch.optim.SGD, lr=1e-2)
        optimizer = streamgrad.optimizer_in_backward(tiny_model("qwen3"), torch.optim.SGD, lr=1e-2)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(RuntimeError, match="with 2 processes a gradient"):
            streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1e-2)
        with pytest.raises(RuntimeError, match="with 2 processes a gradient"):
            optimizer._update(optimizer.parameters[0])
    finally:
        torch.distributed.destroy_process_group()
