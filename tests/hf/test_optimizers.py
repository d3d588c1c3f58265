"""Optimizers of others with an enabled model: the parameters of the same optimizer with the stock one, to its own precision."""

from __future__ import annotations

import pytest
import torch

import streamgrad
from gradients import more, relative_error
from offload_without_gpu import offload_without_gpu
from streamgrad.hf.patching import InstalledForward
from tiny import tiny_model, tokens

# A large eps: else AdamW makes of a gradient near 0, whose sign is a matter of rounding, a step as large as of any other.
OPTIONS = {"lr": 1e-2, "eps": 1e-2}
on_cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_cuda)]
HINTS = {
    "bitsandbytes.optim": "pip install 'streamgrad[quantized]'",
    "torchao.optim": "pip install torchao",
    "deepspeed.ops.adam": "pip install deepspeed",
}


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    module, _, kind = name.rpartition(".")
    return getattr(pytest.importorskip(module, reason=f"needs {module.partition('.')[0]}: {HINTS[module]}"), kind)


@pytest.fixture
def eager():
    """torchao compiles its update, for a minute on a CPU; without that it is the same arithmetic."""
    with torch.compiler.set_stance("force_eager"):
        yield


def model_of(*, enabled: bool, device: str = "cpu"):
    """Matrices large enough for states in 8 bits, of which there are some in bitsandbytes from 4,096 numbers on."""
    model = tiny_model("qwen3", dtype=torch.float32, hidden_size=64, intermediate_size=128).to(device)
    return streamgrad.enable(model, chunk_size=7, head_chunk_size=5) if enabled else model


def moved(make, *, enabled: bool, gradients: float = 1.0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Return how far each parameter has gone after some steps of an ordinary loop."""
    model = model_of(enabled=enabled, device=device)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make(model)
    for step in range(3):
        ids = tokens(2, 23, seed=step).to(device)
        (gradients * model(input_ids=ids, labels=ids).loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(relative_error(one[name], other[name]) for name in one)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "bitsandbytes.optim.AdamW8bit",
        "bitsandbytes.optim.PagedAdamW8bit",
        pytest.param("bitsandbytes.optim.PagedAdamW32bit", marks=more),
        "torchao.optim.AdamW8bit",
        "torchao.optim.AdamWFp8",
        pytest.param("torchao.optim.AdamW4bit", marks=more),
        pytest.param("deepspeed.ops.adam.DeepSpeedCPUAdam", marks=more),  # which compiles itself, for some minutes
    ],
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU", "ignore::DeprecationWarning")
@pytest.mark.usefixtures("eager")
def test_parameters_are_those_of_the_stock_model(name, device, monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    kind = optimizer_class(name)
    if kind.__module__.startswith("deepspeed") and device != "cpu":
        pytest.skip("steps parameters on the CPU only")

    def ordinary(model):
        return kind(model.parameters(), **OPTIONS)

    stock, ours = (moved(ordinary, enabled=enabled, device=device) for enabled in (False, True))
    wrong = moved(ordinary, enabled=False, gradients=1.1, device=device)
    # Codes of 8 bits that lie between two values may fall to either, so the measure is what gradients of 110 % make.
    assert 50 * apart(ours, stock) < apart(wrong, stock), f"{apart(ours, stock):.1e}, {apart(wrong, stock):.1e}"
    in_backward = moved(lambda model: streamgrad.optimizer_in_backward(model, kind, **OPTIONS), enabled=True, device=device)
    assert apart(in_backward, ours) == 0.0


def test_options_that_bitsandbytes_has_for_one_parameter(monkeypatch):
    """It finds them by the parameter's place among the others: in backward, where a parameter is stepped alone, as ever."""
    kind = optimizer_class("bitsandbytes.optim.AdamW8bit")
    manager = optimizer_class("bitsandbytes.optim.GlobalOptimManager")
    outcomes = []
    for in_backward in (False, True):
        monkeypatch.setattr(manager, "_instance", None)

        def made(model, in_backward=in_backward):
            parameters = list(model.parameters())
            manager.get_instance().override_config(parameters[0], "lr", 0.5)
            manager.get_instance().register_parameters(parameters)
            return streamgrad.optimizer_in_backward(model, kind, **OPTIONS) if in_backward else kind(parameters, **OPTIONS)

        outcomes.append(moved(made, enabled=True))
    assert apart(outcomes[1], outcomes[0]) == 0.0
    first, *others = (change.abs().max().item() for change in outcomes[0].values())
    assert first > 10 * max(others)


# --- Gradients and states on the host ---------------------------------------------------------------------------------------


@pytest.fixture(params=DEVICES)
def host_optimizer(request, monkeypatch):
    """torchao's optimizer and a device. It asks for a GPU: without one, its copies go from the CPU to the CPU."""
    kind = optimizer_class("torchao.optim.CPUOffloadOptimizer")
    if request.param == "cuda":
        return kind, "cuda"
    offload_without_gpu(monkeypatch)
    return kind, "cpu"


@pytest.mark.parametrize("freed", [False, True])
def test_gradients_that_leave_for_the_host(host_optimizer, freed):
    """The hooks on parameters take each gradient once, when it is whole; if they free it, the next plan counts on that."""

    kind, device = host_optimizer

    def made(model):
        return kind(list(model.parameters()), torch.optim.AdamW, offload_gradients=freed, minimal_size=100, **OPTIONS)

    stock, ours = (moved(made, enabled=enabled, device=device) for enabled in (False, True))
    expected = moved(lambda model: torch.optim.AdamW(model.parameters(), **OPTIONS), enabled=False, device=device)
    assert apart(stock, expected) < 1e-4 and apart(ours, expected) < 1e-4
    model, ids = model_of(enabled=False, device=device), tokens(1, 9).to(device)
    streamgrad.enable(model, memory_budget="1GiB")
    optimizer = made(model)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert InstalledForward.on(model.model).stream.planner.hooks_free is freed
