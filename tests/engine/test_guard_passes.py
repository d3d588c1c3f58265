"""What guards cost a backward pass, and passes that are broken off, inside of each other or in several threads."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from torch import Tensor

import batches
import streamgrad
from faults import Hook
from streamgrad.engine.checks import guards
from streamgrad.engine.checks.guards import AdapterFacts, RerunGuard
from tiny import tiny_model

# Every layer is run again: where memory is plenty, "auto" would keep ordinary graphs.
OPTIONS = {"chunk_size": 7, "head_chunk_size": 5, "keep": "input"}


def enabled(layers=4):
    return streamgrad.enable(tiny_model("llama", num_hidden_layers=layers), **OPTIONS)


def loss_of(model, batch=None):
    return model(**(batch or batches.plain(None))).loss


# --- what they cost ----------------------------------------------------------------------------------------------------


@contextmanager
def counted_reads() -> Iterator[Counter]:
    """Within the block, counts what a program waits for the device with, by name."""
    counts: Counter = Counter()

    def counting(name):
        plain = getattr(Tensor, name)

        def read(self, *args, **kwargs):
            counts[name] += 1
            return plain(self, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__"):
            stack.enter_context(mock.patch.object(Tensor, name, counting(name)))
        yield counts


def test_a_backward_pass_reads_once_for_all_layers():
    models = [enabled(6), enabled(6)]
    for losses in (1, 2):
        loss = sum(map(loss_of, models[:losses]))
        with counted_reads() as counts:
            loss.backward()
        assert counts == {"tolist": 1}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_backward_pass_waits_for_the_device_once():
    model = enabled(6).float().cuda()
    batch = {name: value.cuda() for name, value in batches.plain(None).items()}
    model(**batch).loss.backward()  # makes what is made once
    loss = model(**batch).loss
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        loss.backward()
        torch.cuda.set_sync_debug_mode("default")
    assert sum("called a synchronizing CUDA operation" in str(warning.message) for warning in seen) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:.*stream:UserWarning")  # torch's own, of gradients that come from another one
def test_layers_that_ran_on_another_stream():
    """Their deviations are waited for, whatever stream the pass itself is called on."""
    model = enabled().float().cuda()
    batch = {name: value.cuda() for name, value in batches.plain(None).items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        loss = deviating(model, 3, batch)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="LlamaDecoderLayer 3 computed something else"):
        loss.backward()


def test_a_layer_is_looked_through_twice_in_forward_and_once_in_backward():
    """Before its first chunk and after it, which may have replaced some of its modules.

    With adapters there are a hundred, and walks through them were half of what a streamed layer cost in Python.
    """
    model, walks = enabled(3), []

    class Children(dict):
        def values(self):
            walks.append(self)
            return super().values()

    layer = model.model.layers[1]
    layer.__dict__["_modules"] = Children(layer._modules)
    loss_of(model).backward()  # a trial, which is for the first step, looks through it too
    walks.clear()
    loss = loss_of(model)
    assert len(walks) == 2
    loss.backward()
    assert len(walks) == 4, "once with the whole model, whose gradients are looked at when backward begins"


# --- backward passes beside and inside of each other -------------------------------------------------------------------


def deviating(model, index, batch=None):
    """The loss of a model whose layer `index` will compute something else in backward."""
    hook = Hook(model.model.layers[index].mlp, lambda module, args, out: 2.0 * out, on=True)
    loss = loss_of(model, batch)
    hook.on = False
    return loss


def in_the_middle(model, call):
    """Make the backward of the next forward `call` when the upper half of the layers has run."""

    def once(module, args):
        handle.remove()
        args[0].register_hook(lambda gradient: (call(), None)[1])

    handle = model.model.layers[2].register_forward_pre_hook(once)


@pytest.mark.parametrize("index", [0, 3])
def test_the_error_names_the_layer(index):
    loss = deviating(enabled(), index)
    with pytest.raises(RuntimeError, match=f"LlamaDecoderLayer {index} computed something else"):
        loss.backward()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_of_a_pass_that_was_broken_off(error):
    model = enabled()

    def stop():
        assert len(guards._Outcomes._under_way) == 1
        raise error

    in_the_middle(model, stop)
    loss = deviating(model, 3)
    with pytest.raises(error):
        loss.backward()
    assert not guards._Outcomes._under_way
    loss = loss_of(model)
    with counted_reads() as counts:
        loss.backward()
    assert counts == {"tolist": 1} and not guards._Outcomes._under_way


@pytest.mark.parametrize("wrong", ["outer", "inner", "neither"])
def test_a_pass_inside_of_another(wrong):
    outer, inner, errors = enabled(), enabled(2), []

    def step():
        with torch.enable_grad():
            loss = deviating(inner, 1) if wrong == "inner" else loss_of(inner)
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))

    in_the_middle(outer, step)
    loss = deviating(outer, 3) if wrong == "outer" else loss_of(outer)
    if wrong == "outer":
        with pytest.raises(RuntimeError, match="LlamaDecoderLayer 3 computed something else"):
            loss.backward()
    else:
        loss.backward()
    assert len(errors) == (wrong == "inner") and all("LlamaDecoderLayer 1 computed" in error for error in errors)


def test_passes_in_two_threads():
    """Each is in its middle while the other one is, and only one of them is wrong."""
    meeting, errors = threading.Barrier(2, timeout=900), {}

    def step(name, wrong):
        model = enabled()
        in_the_middle(model, meeting.wait)
        loss = deviating(model, 3) if wrong else loss_of(model)
        try:
            loss.backward()
        except RuntimeError as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=step, args=(name, name == "wrong")) for name in ("right", "wrong")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors.keys() == {"wrong"} and "LlamaDecoderLayer 3 computed something else" in errors["wrong"]


# --- what a library tells of its modules -------------------------------------------------------------------------------


def test_a_switch_that_a_library_tells_of():
    layer, switch = torch.nn.Linear(2, 2), ["on"]
    guard = RerunGuard([layer], list(layer.parameters()), "Linear", AdapterFacts(state=lambda modules: list(switch)))
    guard.check_unchanged([layer])
    switch[:] = ["off"]
    with pytest.raises(RuntimeError, match="Linear was changed between forward and backward"):
        guard.check_unchanged([layer])


def test_a_parameter_whose_version_says_nothing():
    layer = torch.nn.Linear(2, 2)
    told = RerunGuard([layer], list(layer.parameters()), "Linear", AdapterFacts(versionless=lambda modules: [layer.weight]))
    untold = RerunGuard([layer], list(layer.parameters()), "Linear", guards.NO_ADAPTERS)
    with torch.no_grad():
        layer.weight.mul_(1.0)
    told.check_unchanged([layer])
    with pytest.raises(RuntimeError, match="a parameter of Linear was modified in place"):
        untold.check_unchanged([layer])
