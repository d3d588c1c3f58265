"""Models in several threads, a model inside of its own hook, and backward inside of inference mode: exact, or refused by name."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

import batches
import streamgrad
from faults import state_of
from gradients import assert_same_step, run_step
from streamgrad.engine.checks.guards import _Outcomes
from tiny import tiny_config, tiny_model

# Every layer is run again: where memory is plenty, "auto" would keep ordinary graphs.
OPTIONS = {"chunk_size": 7, "head_chunk_size": 5, "keep": "input"}


def in_threads(*jobs):
    """Run each function in a thread of its own; return what they raised, by their place."""
    errors = {}

    def run(index, job):
        try:
            job()
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def assert_whole(model, before):
    assert state_of(model) == before
    assert not _Outcomes._under_way


# --- two models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])  # the second one drops embeddings too, outside of its layers
def test_two_models_with_dropout_in_two_threads(family):
    """What a chunk drops in backward is what it dropped in forward, whatever the other thread draws meanwhile."""
    chances = {"attention_dropout": 0.2} | ({"hidden_dropout": 0.2} if family == "gpt_neox" else {})
    models = [streamgrad.enable(tiny_model(family, seed=seed, **chances), **OPTIONS) for seed in range(2)]
    together, dropped = threading.Barrier(2, timeout=900), []

    def steps(model):
        if family == "gpt_neox":
            own = []
            dropped.append(own)
            last = model.gpt_neox.layers[1].post_mlp_dropout
            last.register_forward_hook(lambda module, args, out: own.append(out.detach() == 0.0))
            run_step(model, batches.plain(model))  # in which layers are tried
            own.clear()

        def job():
            for _ in range(6):
                together.wait()
                run_step(model, batches.plain(model))

        return job

    assert not in_threads(*map(steps, models))
    assert all(parameter.grad.isfinite().all() for model in models for parameter in model.parameters())
    for own in dropped:
        chunks = len(own) // 12  # of a step: six run forward in order, and then backward
        assert chunks == 4
        for first in range(0, len(own), 8):
            assert all(map(torch.equal, own[first : first + 4], reversed(own[first + 4 : first + 8])))


def test_two_models_of_one_configuration_in_two_threads():
    config = tiny_config("llama")
    models = [AutoModelForCausalLM.from_config(config, dtype=torch.float64).train() for _ in range(2)]
    assert models[0].config is models[1].config
    expected = [run_step(model, batches.plain(model)) for model in models]
    before = [state_of(model) for model in models]
    for model in models:
        streamgrad.enable(model, **OPTIONS)
    middle, actual = threading.Barrier(2, timeout=900), {}

    def step(index):
        def job():
            handle = models[index].model.layers[index].register_forward_pre_hook(lambda *_: (middle.wait(), None)[1])
            for _ in range(3):
                actual[index] = run_step(models[index], batches.plain(None))
            handle.remove()

        return job

    assert not in_threads(step(0), step(1))
    for index, model in enumerate(models):
        assert_same_step(actual[index], expected[index], 1e-6)
        assert_whole(streamgrad.disable(model), before[index])


# --- one model ------------------------------------------------------------------------------------------------------------


def held_open(model, where):
    """Let the first step through `model` stop in `where` until the second event is set; the first says that it has."""
    inside, leave, layer = threading.Event(), threading.Event(), model.model.layers[1]

    def stop(*args):
        if not inside.is_set():
            inside.set()
            leave.wait(timeout=900)

    if where == "forward":
        layer.register_forward_pre_hook(stop)
    elif where == "head":
        model.lm_head.register_forward_pre_hook(stop)
    else:
        layer.mlp.register_full_backward_hook(stop)
    return inside, leave


@pytest.mark.parametrize("second", ["step", "evaluation"])
@pytest.mark.parametrize("where", ["forward", "head", "backward"])
def test_one_model_in_two_threads_is_refused(where, second):
    model = tiny_model("llama")
    batch = batches.plain(model)
    expected, before = run_step(model, batch), state_of(model)
    streamgrad.enable(model, **OPTIONS)
    inside, leave = held_open(model, where)
    actual = []

    def first():
        try:
            actual.append(run_step(model, batch))
        finally:
            inside.set()

    def meddling():
        inside.wait(timeout=900)
        try:
            with torch.set_grad_enabled(second == "step"):
                model(**batch)
        finally:
            leave.set()

    errors = in_threads(first, meddling)
    assert list(errors) == [1] and "is being run by another thread" in str(errors[1])
    assert_same_step(actual[0], expected, 1e-6)
    assert_same_step(run_step(model, batch), expected, 1e-6)
    for module in model.modules():
        module._forward_pre_hooks.clear(), module._backward_hooks.clear()
        module._is_full_backward_hook = None
    assert_whole(streamgrad.disable(model), before)


def test_threads_may_evaluate_one_model_together():
    """Neither changes anything: short sequences without gradients run as in the stock model."""
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    meeting, losses = threading.Barrier(2, timeout=900), []
    model.model.layers[1].register_forward_pre_hook(lambda *_: (meeting.wait(), None)[1])

    def evaluate():
        with torch.no_grad():
            losses.append(model(**batches.plain(model)).loss)

    assert not in_threads(evaluate, evaluate)
    assert torch.equal(*losses)


def test_a_copy_may_run_while_the_model_does():
    """Which is what the error advises."""
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    batch, copied, of_copy = batches.plain(model), copy.deepcopy(model), []
    expected = run_step(copied, batch)

    def step_of_copy(*args):
        with torch.enable_grad():
            of_copy.append(run_step(copied, batch))

    model.model.layers[1].mlp.register_forward_hook(step_of_copy)
    assert_same_step(run_step(model, batch), expected, 1e-12)
    assert len(of_copy) >= 8
    assert_same_step(of_copy[-1], expected, 1e-12)


# --- a model inside of itself, inference mode -----------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("where", ["layers.1", "layers.1.mlp", "layers.1 backward", "lm_head"])
def test_a_model_called_in_its_own_hook(where, gradients):
    """Refused while its layers are changed; a hook on a whole layer's gradient runs between layers, and works."""
    model, stock = streamgrad.enable(tiny_model("llama"), **OPTIONS), tiny_model("llama")
    batch, calls = batches.plain(model), []

    def hooked(outer):
        def hook(*args):
            if not calls:
                calls.append(None)
                with torch.set_grad_enabled(gradients):
                    loss = outer(input_ids=batch["input_ids"][:, :12], labels=batch["labels"][:, :12]).loss
                    if gradients:
                        loss.backward()

        module = outer.lm_head if where == "lm_head" else outer.get_submodule(f"model.{where.split()[0]}")
        (module.register_full_backward_hook if "backward" in where else module.register_forward_hook)(hook)
        return outer

    expected = run_step(hooked(stock), batch)
    calls.clear()
    if "backward" in where:
        assert_same_step(run_step(hooked(model), batch), expected, 1e-6)
        return
    with pytest.raises(RuntimeError, match="called from inside of its own streamed forward or backward"):
        run_step(hooked(model), batch)
    stock.zero_grad()
    assert_same_step(run_step(model, batch), run_step(stock, batch), 1e-6)


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_backward_inside_of_inference_mode(keep):
    model = tiny_model("llama")
    batch = batches.plain(model)
    expected = run_step(model, batch)
    streamgrad.enable(model, **OPTIONS | {"keep": keep})
    model.zero_grad()
    loss = model(**batch).loss
    with torch.inference_mode():
        loss.backward()
    actual = type(expected)(loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    assert_same_step(actual, expected, 1e-6)
