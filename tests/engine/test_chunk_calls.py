"""What a chunk costs in Python: calls a chunk and layer beyond those of the layer's own forward, counted and not timed.

And what a plain step costs, in which nothing runs in chunks.
"""

from __future__ import annotations

import gc
import sys

import pytest
import torch

import streamgrad
from streamgrad.engine import unread
from tiny import tiny_model, tokens

LAYERS, CHUNK = 2, 8


def calls_of(function):
    """The number of functions, of Python and of C, that `function` calls, and what it returns."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()  # models of other tests, whose ends call functions
    gc.disable()
    sys.setprofile(note)
    try:
        returned = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count, returned


def step_calls(model, length):
    """The calls of a forward and of a backward pass, once everything is there that is made once."""
    ids = tokens(1, length)

    def loss_of():
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    for _ in range(2):
        loss_of().backward()
    forward, loss = calls_of(loss_of)
    return torch.tensor([forward, calls_of(loss.backward)[0]])


# In calls of a stock layer's forward, which a chunk's backward runs again. They were 3.4 and 9.5 ("input"), 3.4 and 6.4
# ("attention"), before contexts were entered once for all chunks, and kernels and pieces of masks found once for all layers.
@pytest.mark.parametrize(("keep", "forward", "backward"), [("input", 2.02, 5.62), ("attention", 2.08, 4.16)])
def test_python_calls_of_a_chunk(keep, forward, backward, monkeypatch):
    monkeypatch.setitem(unread._FEWEST_TOKENS, "cpu", CHUNK + 1)  # as for short chunks on a GPU
    stock = [step_calls(tiny_model("qwen3", dtype=torch.float32, num_hidden_layers=n), CHUNK) for n in (LAYERS, LAYERS + 1)]
    model = tiny_model("qwen3", dtype=torch.float32, num_hidden_layers=LAYERS)
    streamgrad.enable(model, chunk_size=CHUNK, head_chunk_size=16 * CHUNK, keep=keep)
    few, many = (step_calls(model, chunks * CHUNK) for chunks in (4, 12))
    of_chunk, of_layer = (many - few) / (8 * LAYERS), (stock[1] - stock[0])[0]
    ratios = (of_chunk / of_layer).tolist()
    assert ratios[0] <= forward and ratios[1] <= backward, ratios


def test_python_calls_of_a_plain_step():
    """A layer costs the calls of a stock layer, and a step those of a few layers besides, most of them around the head."""
    stock, plain = [], []
    for layers in (4, 12):
        model = tiny_model("qwen3", dtype=torch.float32, num_hidden_layers=layers)
        stock.append(step_calls(model, CHUNK))
        streamgrad.enable(model, keep="all")
        plain.append(step_calls(model, CHUNK))
    of_layer = [((many - few) / 8).tolist() for few, many in (stock, plain)]
    assert of_layer[1][0] <= 1.1 * of_layer[0][0], of_layer
    assert (plain[0] - stock[0])[0] <= 9 * of_layer[0][0], (plain, stock)
