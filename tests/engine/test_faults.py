"""Steps that are broken off anywhere: gradients, model and memory are as before, the error says where, the next step is exact."""

from __future__ import annotations

import gc
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

import batches
import streamgrad
from faults import FailingAllocation, Hook, live_tensors, state_of
from gradients import assert_same_step, more, run_step
from streamgrad.engine.host_offload import HostStore, PinnedPool, _Item
from streamgrad.head.linear_head import LinearHead
from tiny import tiny_model

OPTIONS = {"chunk_size": 8, "head_chunk_size": 15, "keep": "input"}


@pytest.fixture(scope="module", autouse=True)
def _only_new_objects():
    """Let `live_tensors` see what these tests make, and not look through all modules each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def short_batch(length=12):
    return {name: value[:, :length] for name, value in batches.plain(None).items()}


def enabled(family="llama", **options):
    return streamgrad.enable(tiny_model(family), **OPTIONS | options)


@contextmanager
def nothing_left_of_a_step(model):
    """Check after a step that fails: no parameter has a gradient, nothing is changed or held, and the next step is exact."""
    for _ in range(2):  # the second makes what layers need that have been run again
        expected = run_step(model, short_batch())
        model.zero_grad()
    state, tensors = state_of(model), live_tensors()
    yield
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
    assert state_of(model) == state
    assert live_tensors() == tensors
    again = run_step(model, short_batch())
    assert all(torch.equal(gradient, again.gradients[name]) for name, gradient in expected.gradients.items())


# --- out of memory --------------------------------------------------------------------------------------------------------


def fails_at(model, number):
    """Run a step whose `number`-th allocation fails; return what the error says, or None where there are fewer."""
    try:
        with FailingAllocation(number):
            model(**short_batch()).loss.backward()
    except torch.OutOfMemoryError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("family", "keep", "stride"),
    [
        ("llama", "input", 97),
        ("llama", "attention", 97),
        pytest.param("llama", "input", 1, marks=more),
        pytest.param("llama", "attention", 5, marks=more),
        pytest.param("llama", "all", 3, marks=more),
        pytest.param("gemma3_text", "input", 29, marks=more),
        pytest.param("qwen3_moe", "input", 29, marks=more),
    ],
)
def test_an_allocation_fails(family, keep, stride):
    model, number = enabled(family, keep=keep), 3
    for _ in range(2):  # the second makes what layers need that have been run again
        expected = run_step(model, short_batch())
        model.zero_grad()
    state, tensors, told = state_of(model), live_tensors(), []
    while (error := fails_at(model, number)) is not None:
        told.append(error)
        assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
        assert state_of(model) == state
        assert live_tensors() == tensors
        number += stride
    assert number > 300
    again = run_step(model, short_batch())
    assert all(torch.equal(gradient, again.gradients[name]) for name, gradient in expected.gradients.items())
    layers = {"forward": "ran forward, with 2 x 12 tokens in chunks of 8", "backward": "was run again for backward, with 2 x 12"}
    for part in layers.values() if keep != "all" else []:
        assert any(part in error and "chunk_size=4" in error for error in told), part


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(("calls", "doing"), [(1, "ran forward"), (2, "ran forward"), (3, "was run again"), (4, "was run again")])
def test_the_error_names_the_layer_and_what_takes_less(layer, calls, doing):
    model, seen = enabled(keep="attention"), [None] * calls

    def fail(*args):
        seen.append(None)
        if len(seen) == calls:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with nothing_left_of_a_step(model):
        handle = model.model.layers[layer].mlp.register_forward_hook(fail)
        run_step(model, short_batch())  # in which the layer is tried with its hook
        model.zero_grad()
        seen.clear()
        with pytest.raises(torch.OutOfMemoryError) as caught:
            model(**short_batch()).loss.backward()
        handle.remove()
        message = str(caught.value)
        del caught, handle
        model.model.layers[layer].mlp._forward_hooks.clear()
    assert message.startswith("CUDA out of memory. Memory ran out while LlamaDecoderLayer")
    assert f"LlamaDecoderLayer {layer} {doing}" in message and 'keep="input"' in message and "chunk_size=4" in message


def test_the_error_names_the_head():
    model = enabled()
    with (
        nothing_left_of_a_step(model),
        mock.patch.object(LinearHead, "product", side_effect=torch.OutOfMemoryError("none.")),
        pytest.raises(torch.OutOfMemoryError, match="in the language-modelling head. To use less, pass a smaller head"),
    ):
        model(**short_batch())


def test_the_error_names_the_host():
    """The second of three buffers cannot be had: the first goes back to the pool, which counts what it has."""
    store, allocated = HostStore(), []

    def allocate(self, size_bytes):
        if len(allocated) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory.")
        allocated.append(torch.empty(size_bytes, dtype=torch.uint8))
        return allocated[-1]

    tensors = [torch.ones(4, 4), torch.ones(40, 4), torch.ones(400, 4)]
    with (
        mock.patch.object(PinnedPool, "_allocate", allocate),
        pytest.raises(torch.OutOfMemoryError, match='host memory were needed .* offload="none"') as caught,
    ):
        _Item(store, tensors)
    del caught
    pool = store.pool(torch.device("cpu"))
    assert pool.total_bytes == tensors[0].nbytes
    assert pool.take(tensors[0].nbytes) is allocated[0]


def test_a_forward_pass_without_memory_is_run_once_more_in_smaller_chunks():
    """With keep="auto" the plan is ours to change: half as many tokens a chunk, said in a warning."""
    model = tiny_model("llama")
    batch = batches.plain(model)
    expected = run_step(model, batch)
    streamgrad.enable(model)
    sizes = []

    def fail_if_long(module, args):
        sizes.append(args[0].shape[1])
        if len(sizes) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.model.layers[1].mlp.register_forward_pre_hook(fail_if_long)
    with mock.patch("streamgrad.hf.step_plan.automatic_chunk", lambda batch, sequence: sequence):
        with pytest.warns(RuntimeWarning, match="the forward pass is run once more.*planned for less memory"):
            actual = run_step(model, batch)
        assert_same_step(actual, expected, 1e-6)
        assert sizes[:2] == [23, 11]
        so_far = len(sizes)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_same_step(run_step(model, batch), expected, 1e-6)
        assert sizes[so_far] == 11  # planned so from the start


@pytest.mark.parametrize(("where", "keep"), [("forward", "auto"), ("forward", "input"), ("backward", "input"), ("head", "input")])
@pytest.mark.parametrize("room", ["little", "much"])
@pytest.mark.filterwarnings("ignore:streamgrad. the forward pass is run once more")
def test_the_error_says_what_length_would_fit(where, keep, room):
    """A step that was planned by what it takes says the longest that a smaller budget holds, or that memory is in fragments."""
    model, calls = streamgrad.enable(tiny_model("llama"), keep=keep, memory_budget="1GiB", head_chunk_size=15), []
    planner = model.model._streamgrad.stream.planner
    if room == "little":
        run_step(model, batches.plain(model))
        model.zero_grad()
        streamgrad.disable(model)
        streamgrad.enable(model, keep=keep, memory_budget=int(1.05 * planner.latest.peak_bytes), head_chunk_size=15)

    def fail(*args):
        calls.append(None)
        if where == "forward" or len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    if where == "head":
        failing = mock.patch.object(LinearHead, "product", side_effect=fail)
        calls.append(None)
    else:
        failing = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    told = {"little": r"About (1\d|2[0-2]|[2-9]) tokens a sequence would fit\.", "much": "fits with room to spare"}[room]
    with failing, pytest.raises(torch.OutOfMemoryError, match=told):
        run_step(model, batches.plain(model))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_memory_that_runs_out_again_is_an_error(where):
    """In backward nothing is repeated: gradients are on their way. The next step has the smaller plan."""
    model, calls = tiny_model("llama"), []
    streamgrad.enable(model)

    def fail(module, args):
        calls.append(args[0].shape[1])
        if where == "forward" or len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with mock.patch("streamgrad.hf.step_plan.automatic_chunk", lambda batch, sequence: sequence), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError, match="LlamaDecoderLayer 1 .*"):
            model(**batches.plain(model)).loss.backward()
        assert calls == ([23, 11] if where == "forward" else [23, 23])
        model.model.layers[1].mlp._forward_pre_hooks.clear()
        model(**batches.plain(model)).loss.backward()
    plan = model.model._streamgrad.stream.planner.latest
    assert set(plan.chunk_sizes) == {5 if where == "forward" else 11}


# --- interrupts and errors of the user's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_hook_raises_at_any_chunk(kind, error):
    model, seen = enabled(), []
    mlp = model.model.layers[0].mlp
    for chunk in range(1, 5 if kind == "forward" else 3):

        def fail(*args, chunk=chunk):
            seen.append(None)
            if len(seen) == chunk:
                raise error("of the user's own")

        with nothing_left_of_a_step(model):
            seen.clear()
            (mlp.register_forward_hook if kind == "forward" else mlp.register_full_backward_hook)(fail)
            with pytest.raises(error, match="own"):
                model(**short_batch()).loss.backward()
            (mlp._forward_hooks if kind == "forward" else mlp._backward_hooks).clear()
            mlp._is_full_backward_hook = None


def test_gradients_of_earlier_steps_stay():
    """What was accumulated before is not thrown away with a step that fails; what the step has added cannot be taken out."""
    model = enabled()
    expected = run_step(model, short_batch())
    frozen = model.model.layers[0].mlp.up_proj.weight
    frozen.grad = None

    def fail(*args):
        raise KeyboardInterrupt

    hook = Hook(model.model.layers[0].mlp, fail)
    loss = model(**short_batch()).loss
    hook.on = True
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    for name, parameter in model.named_parameters():
        if parameter is frozen:
            assert parameter.grad is None
        elif "layers.0" in name or "embed_tokens" in name:
            assert torch.equal(parameter.grad, expected.gradients[name]), name
        else:
            assert torch.equal(parameter.grad, 2.0 * expected.gradients[name]), name


def test_a_pass_that_was_found_wrong_leaves_no_gradients():
    model = enabled()
    hook = Hook(model.model.layers[0].mlp, lambda module, args, out: 2.0 * out)
    loss = model(**short_batch()).loss
    hook.on = True
    with pytest.raises(RuntimeError, match="LlamaDecoderLayer 0 computed something else"):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_losses_of_ones_own_are_protected_too():
    model = enabled()
    batch = {"input_ids": short_batch()["input_ids"]}

    def fail(*args):
        raise KeyboardInterrupt

    hook = Hook(model.model.layers[0].mlp, fail)
    loss = model(**batch).logits.square().mean() + model.model(**batch).last_hidden_state.square().mean()
    hook.on = True
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_old_error_does_not_take_later_gradients():
    """The error of a pass that was found wrong holds on to it, and may live longer than the next step."""
    model, errors = enabled(), []
    hook = Hook(model.model.layers[0].mlp, lambda module, args, out: 2 * out)
    loss = model(**short_batch()).loss
    hook.on = True
    try:
        loss.backward()
    except RuntimeError as error:
        errors.append(error)
    hook.on = False
    model(**short_batch()).loss.backward()
    assert errors
    errors.clear()
    assert all(parameter.grad is not None for parameter in model.parameters())
