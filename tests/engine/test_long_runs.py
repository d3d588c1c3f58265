"""Many steps of random lengths: nothing of ours grows. And what a training run relies on: scalers, anomaly mode, seeds."""

from __future__ import annotations

import gc
import random
import warnings

import pytest
import torch

import batches
import streamgrad
from faults import live_tensors, sizes_of_caches
from gradients import more, run_step
from tiny import tiny_model, tokens

OPTIONS = {"chunk_size": 8, "head_chunk_size": 15, "keep": "input"}


@pytest.mark.parametrize("steps", [150, pytest.param(2000, marks=more)])
@pytest.mark.parametrize("options", [OPTIONS, {"memory_budget": "1GiB"}], ids=["given", "planned"])
def test_nothing_grows(steps, options):
    """Once a run has seen its lengths, no cache of ours has more entries and no tensor more is alive, however long it goes on."""
    model = streamgrad.enable(tiny_model("llama", num_hidden_layers=1, attention_dropout=0.1), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    drawn, noted = random.Random(0), []
    gc.freeze()
    try:
        for step in range(steps):
            ids = tokens(drawn.randint(1, 2), drawn.randint(2, 12), seed=step)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del ids
            if step in (2 * steps // 3, steps - 1):
                noted.append((live_tensors(), sizes_of_caches(model)))
    finally:
        gc.unfreeze()
    assert len(noted[0][1]) > 20
    assert noted[1] == noted[0]


# --- numbers that are not finite, seeds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_scaler_skips_what_stock_skips(value):
    """A gradient is not finite where the stock model's is not, and the optimizer takes no step."""
    model, stock = streamgrad.enable(tiny_model("llama"), **OPTIONS), tiny_model("llama")
    for each in (model, stock):
        with torch.no_grad():
            each.model.layers[1].mlp.up_proj.weight[3, 5] = value
        before = [parameter.clone() for parameter in each.parameters()]
        scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(each.parameters(), lr=0.1)
        scaler.scale(each(**batches.plain(each)).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**15
        assert all(torch.equal(old, new) or old.isnan().any() for old, new in zip(before, each.parameters(), strict=True))
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert ours.grad.isfinite().all() == theirs.grad.isfinite().all(), name


def test_anomaly_mode_raises_and_names_the_layer(request):
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: Spoil.apply(out))
    request.addfinalizer(lambda: torch.autograd.set_detect_anomaly(False))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with which torch says where forward was
        torch.autograd.set_detect_anomaly(True)
        with pytest.raises(RuntimeError, match="SpoilBackward' returned nan values") as caught:
            model(**batches.plain(model)).loss.backward()
    assert any("LlamaDecoderLayer 1" in note for note in caught.value.__notes__)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_same_seed_same_bits():
    """Under deterministic algorithms, with dropout in attention and beside it."""
    steps = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(2):
            model = tiny_model("gpt_neox", attention_dropout=0.2, hidden_dropout=0.2)
            streamgrad.enable(model, **OPTIONS)
            torch.manual_seed(7)
            steps.append(run_step(model, batches.plain(model)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(steps[0].loss, steps[1].loss)
    assert all(torch.equal(steps[1].gradients[name], gradient) for name, gradient in steps[0].gradients.items())
