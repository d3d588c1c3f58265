"""Labels of memory: free while nobody listens, nested, and each thread's own."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch

from streamgrad.ops import memory_label as module
from streamgrad.ops.memory_label import Listener, current_label, labelled, listen, memory_label, relabel, stop_listening


class _Heard(Listener):
    def __init__(self) -> None:
        self.changes: list[tuple[int, str | None]] = []
        self.relabellings: list[tuple[torch.Tensor, str]] = []

    def label_changed(self, label):
        self.changes.append((threading.get_ident(), label))

    def relabelled(self, tensor, label):
        self.relabellings.append((tensor, label))


@pytest.fixture
def heard():
    listener = _Heard()
    listen(listener)
    yield listener
    stop_listening(listener)


# --- Nobody listens -----------------------------------------------------------------------------------------------------------


def test_a_label_that_nobody_hears_is_one_shared_object(monkeypatch):
    monkeypatch.setattr(module, "_Label", None)  # calling it would raise
    assert memory_label("a") is memory_label("b")
    with memory_label("a"), memory_label("b"):
        assert current_label() is None
    assert labelled("a")(current_label)() is None
    relabel("a", torch.zeros(1))


def test_a_label_that_nobody_hears_allocates_nothing():
    def enter() -> None:
        for _ in range(1000):
            with memory_label("a"):
                pass

    enter()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        enter()
        assert sys.getallocatedblocks() - before < 10
    finally:
        gc.enable()


def test_a_label_that_nobody_hears_hides_no_error():
    with pytest.raises(KeyError), memory_label("a"):
        raise KeyError


def test_the_last_listener_switches_labels_off(heard):
    other = _Heard()
    listen(other)
    stop_listening(other)
    with memory_label("a"):
        assert current_label() == "a"
    stop_listening(heard)
    with memory_label("a"):
        assert current_label() is None
    assert [label for _, label in heard.changes] == ["a", None] and not other.changes


# --- Somebody listens ---------------------------------------------------------------------------------------------------------


def test_the_innermost_label_wins(heard):
    seen = []

    @labelled("b")
    def nested(depth: int) -> int:
        seen.append(current_label())
        with memory_label("a"):
            seen.append(current_label())
            if depth:
                nested(depth - 1)
        seen.append(current_label())
        return depth

    with memory_label("a"):
        assert nested(1) == 1
        seen.append(current_label())
    assert seen == ["b", "a", "b", "a", "b", "b", "a"] and current_label() is None
    assert [label for _, label in heard.changes] == ["a", "b", "a", "b", "a", "b", "a", "b", "a", None]


def test_an_error_leaves_the_label(heard):
    with pytest.raises(KeyError), memory_label("a"), memory_label("b"):
        raise KeyError
    assert current_label() is None


def test_a_tensor_may_become_something_else(heard):
    tensors = torch.zeros(2), torch.zeros(3)
    relabel("a", *tensors)
    assert [(tensor is own, label) for (tensor, label), own in zip(heard.relabellings, tensors, strict=True)] == 2 * [(True, "a")]


class _Node(torch.autograd.Function):
    """Runs the backward of the losses in `inner` inside its own, under a label."""

    @staticmethod
    def forward(ctx, x, inner, seen):
        ctx.inner, ctx.seen = inner, seen
        return x * 2

    @staticmethod
    def backward(ctx, dout):
        ctx.seen.append(current_label())
        with memory_label("of the node"):
            for loss in ctx.inner:
                loss.backward()
            ctx.seen.append(current_label())
        ctx.seen.append(current_label())
        return dout * 2, None, None


def nodes() -> tuple[torch.Tensor, list[str | None]]:
    """Return a loss whose backward runs a backward, and where both note their labels."""
    seen: list[str | None] = []
    x = torch.ones(3, requires_grad=True)
    inner = _Node.apply(x, [], seen).sum()
    return _Node.apply(x, [inner], seen).sum(), seen


def test_each_thread_has_its_own_label(heard):
    """Backward in another thread starts without a label, has those that are entered there, and leaves the caller's alone."""
    loss, seen = nodes()
    thread = threading.Thread(target=loss.backward)
    with memory_label("of the caller"):
        thread.start()
        thread.join()
        assert current_label() == "of the caller"
    assert seen == [None, "of the node", "of the node", "of the node", "of the node", None]
    by_thread = {ident: [label for each, label in heard.changes if each == ident] for ident, _ in heard.changes}
    assert by_thread[threading.get_ident()] == ["of the caller", None]
    assert sorted(map(len, by_thread.values())) == [2, 4]


def test_backward_in_the_same_thread_keeps_the_callers_label(heard):
    loss, seen = nodes()
    with memory_label("of the caller"):
        loss.backward()
    assert seen == ["of the caller", "of the node", "of the node", "of the node", "of the node", "of the caller"]
