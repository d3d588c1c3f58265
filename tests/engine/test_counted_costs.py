"""Costs, counted and not timed: FLOPs, forward calls, attention calls and bytes of live tensors."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import streamgrad
from streamgrad.attention.backends.eager import EagerBackend
from streamgrad.attention.backends.sdpa import SdpaBackend
from streamgrad.memory.live_bytes import LiveBytes
from tiny import tiny_model, tokens

SHAPE = {
    "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24,
    "vocab_size": 1000,
}  # fmt: skip


def model_and_step(length: int, *, batch: int = 1, family: str = "llama", **options):
    model = tiny_model(family, dtype=torch.float32, **(SHAPE | options))
    ids = tokens(batch, length)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # so that a step allocates no parameter gradients that stay
    return model, step


# --- FLOPs -------------------------------------------------------------------------------------------------------------


def flops(step) -> int:
    # The counter knows addmm but not its in-place form.
    in_place = {torch.ops.aten.addmm_: lambda total, left, right, out_shape=None, **_: 2 * left[0] * left[1] * right[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        step()  # in which layers are tried on a few tokens, with the counter's hooks
        of_first = counter.get_total_flops()
        step()
    return counter.get_total_flops() - of_first


def layer_matrices(model) -> dict[str, int]:
    """Weights of one decoder layer, by projection."""
    return {name.split(".")[-2]: p.numel() for name, p in model.model.layers[0].named_parameters() if p.ndim == 2}


@pytest.mark.parametrize("chunk_size", [16, 48, 128])
@pytest.mark.parametrize("keep", ["input", "attention"])
def test_flops_of_a_step(keep, chunk_size):
    """Counted with eager attention, whose products FlopCounterMode sees, against the sum written out.

    2 FLOPs a weight and token; a layer runs forward twice and backward (two products) once. With only the input kept, backward
    first runs q, k and v of all chunks but the last once more, to have their keys. The head makes three products of its
    size. Attention makes two products forward and five backward over the pairs (query, key) of its blocks: every earlier chunk,
    and its own chunk whole.
    """
    length = 128
    model, step = model_and_step(length)
    streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=32, keep=keep, attention="eager")
    weights = layer_matrices(model)
    before_last = 0 if keep == "attention" else (length - 1) // chunk_size * chunk_size
    projected = before_last * (weights["q_proj"] + weights["k_proj"] + weights["v_proj"])
    linear = length * sum(weights.values()) * 4 + projected
    pairs = sum((min(a + chunk_size, length) - a) * min(a + chunk_size, length) for a in range(0, length, chunk_size))
    attention_passes = 2 * (2 if keep == "input" else 1) + 5
    attention = attention_passes * pairs * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    # The last position predicts nothing and is not multiplied.
    head = 3 * (length - 1) * SHAPE["hidden_size"] * SHAPE["vocab_size"]
    # Some versions of transformers make rotary angles by a product, of a few thousand FLOPs.
    assert flops(step) == pytest.approx(2 * (2 * (linear + attention) + head), rel=1e-4)


def test_fewer_flops_than_checkpointing():
    """The same linear layers; attention saves the half that causality hides, up to one chunk a row."""
    model, step = model_and_step(256)
    model.set_attn_implementation("eager")
    model.gradient_checkpointing_enable()
    checkpointing = flops(step)
    model.gradient_checkpointing_disable()
    streamgrad.enable(model, chunk_size=16, keep="attention", attention="eager")
    assert flops(step) < 0.85 * checkpointing


# --- calls -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_forward_calls_per_projection(keep):
    model, step = model_and_step(60)
    streamgrad.enable(model, chunk_size=13, head_chunk_size=10, keep=keep)
    calls = Counter()
    for name, module in model.model.layers[1].named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *_, name=name: calls.update([name.split(".")[-1]]))
    step()  # in which layers are tried on a few tokens
    calls.clear()
    step()
    chunks = 5
    again = {"input": 3 * chunks - 1, "attention": 2 * chunks, "all": 1}[keep]
    once_more = {"input": 2 * chunks, "attention": 2 * chunks, "all": 1}[keep]
    expected = {name: again if name in ("q_proj", "k_proj", "v_proj") else once_more for name in calls}
    assert calls == expected
    assert len(calls) == 7


@pytest.mark.parametrize("kernel", [SdpaBackend, EagerBackend])
@pytest.mark.parametrize(("keep", "forwards"), [("input", 2), ("attention", 1)])
def test_attention_runs_forward_once_a_step_when_it_is_kept(monkeypatch, kernel, keep, forwards):
    model, step = model_and_step(64)
    streamgrad.enable(model, chunk_size=16, keep=keep, attention=kernel.name)
    calls = Counter()
    for name in ("forward", "backward"):
        plain = getattr(kernel, name)

        def counted(self, *args, plain=plain, name=name):
            calls[name] += 1
            return plain(self, *args)

        monkeypatch.setattr(kernel, name, counted)
    step()
    chunks_and_layers = 4 * 2
    assert calls == {"forward": forwards * chunks_and_layers, "backward": chunks_and_layers}


class _Shapes(TorchDispatchMode):
    """The sizes, in elements, of everything any operation makes."""

    def __init__(self):
        super().__init__()
        self.made: Counter = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.made[tuple(leaf.shape)] += 1
        return result


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_nothing_of_sequence_times_wide_is_ever_made(family, keep, padded):
    """No full queries, MLP, logits or (T x T) mask or scores: not in forward, not in backward, not even as a view."""
    length, chunk = 331, 16
    model, _ = model_and_step(length, family=family)
    ids = tokens(1, length)
    mask = torch.ones_like(ids)
    if padded:
        mask[:, -5:] = 0
    streamgrad.enable(model, chunk_size=chunk, head_chunk_size=chunk, keep=keep)
    with _Shapes() as shapes:
        model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss.backward()
    last = length % chunk
    # (heads, queries, keys) scores of one chunk are allowed, or of its real tokens and its padding apart; (T, heads, ...) is not.
    queries = {chunk, last, last - 5, 5} if padded else {chunk, last}
    for shape in shapes.made:
        tokens_in_shape = [size for size in shape if size >= length - 5]
        assert len(tokens_in_shape) <= 1, f"(T x T) tensor {shape}"
        others = [size for size in shape if size not in tokens_in_shape]
        for wide in (SHAPE["intermediate_size"], SHAPE["vocab_size"], SHAPE["num_attention_heads"]):
            if tokens_in_shape and wide in others and not queries & set(others):
                pytest.fail(f"full-length wide tensor {shape}")


# --- bytes -------------------------------------------------------------------------------------------------------------


def peak(length: int, chunk_size: int, *, keep: str) -> int:
    model, step = model_and_step(length)
    streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=4, keep=keep)
    step()  # in which layers are tried on a few tokens
    with LiveBytes() as live:
        step()
    return live.peak_bytes


def test_peak_bytes_a_token_are_the_tensors_that_must_exist():
    """Slope of the peak over T at a fixed chunk, in bytes a token, against the list in docs/how-it-works.md.

    fp32, 2 layers. At the peak, in a layer's backward: the embedding and
    the first layer's output (the kept inputs of two layers), the gradient coming in and the one going out, keys, values, the
    sums of their gradients, one chunk's term of those sums as the kernel returns it, and the rotary cos and sin.
    """
    slope = (peak(1024, 32, keep="input") - peak(512, 32, keep="input")) / 512
    hidden, kv, rotary = (4 * size for size in (SHAPE["hidden_size"], 2 * SHAPE["head_dim"], SHAPE["head_dim"]))
    must_exist = 4 * hidden + 6 * kv + 2 * rotary
    assert slope == pytest.approx(must_exist, rel=0.03)


def test_calls_of_attention_over_parts_of_the_keys_do_not_hold_each_others_terms(monkeypatch):
    """A call's terms are as large as its keys, so those of the call before would be the largest thing beside them."""
    monkeypatch.setattr("streamgrad.attention.streamed.KEYS_AT_ONCE", 16)
    of_keys: list[weakref.ref] = []
    of_queries: list[weakref.ref] = []
    alive = []
    stock = EagerBackend.backward

    def backward(self, *arguments):
        alive.append(tuple(sum(term() is not None for term in terms) for terms in (of_keys, of_queries)))
        dquery, pieces = stock(self, *arguments)
        of_keys.extend(weakref.ref(tensor.untyped_storage()) for piece in pieces for tensor in piece[2:])
        of_queries.append(weakref.ref(dquery.untyped_storage()))
        return dquery, pieces

    monkeypatch.setattr(EagerBackend, "backward", backward)
    model, step = model_and_step(96)
    streamgrad.enable(model, chunk_size=8, attention="eager")
    step()
    assert len(alive) > 2 * 96 // 8
    # The first term of the queries' gradient is the sum so far.
    assert max(keys for keys, _ in alive) == 0 and max(queries for _, queries in alive) == 1


def test_what_a_chunk_adds_does_not_grow_with_t():
    """A larger chunk costs no more at a longer sequence (less, once the peak is where the keys' gradients are summed)."""
    costs = [peak(length, 96, keep="input") - peak(length, 32, keep="input") for length in (384, 768, 1152)]
    assert min(costs) > 0
    assert max(costs) <= 1.02 * costs[0]


def test_far_below_checkpointing():
    model, step = model_and_step(1024)
    model.gradient_checkpointing_enable()
    with LiveBytes() as stock:
        step()
    assert peak(1024, 32, keep="input") < stock.peak_bytes / 4


def test_layers_that_keep_everything_run_once():
    """No FLOP of a layer is made twice: three products a weight, as in plain backpropagation, and attention forward once."""
    model, step = model_and_step(128)
    streamgrad.enable(model, keep="all", head_chunk_size=32, attention="eager")
    linear = 3 * 128 * sum(layer_matrices(model).values())
    attention = (2 + 5) * 128 * 128 * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    head = 3 * 127 * SHAPE["hidden_size"] * SHAPE["vocab_size"]
    assert flops(step) == pytest.approx(2 * (2 * (linear + attention) + head), rel=1e-4)
