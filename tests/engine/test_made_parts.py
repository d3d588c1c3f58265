"""Parts that a layer makes, or puts in the place of others, when it is called: they are looked at as the others are."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from tiny import tiny_model, tokens

CHUNK = 7


class Kept(nn.Module):
    """Keeps a loss of its own, and counts tokens."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        if counts:
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> None:
        if "seen" in self._buffers:
            self.seen += h.shape[1]
        else:
            self.loss = h.square().mean()


@pytest.mark.parametrize(("counts", "reason"), [(False, "keeps a tensor with its graph"), (True, "modified in place")])
def test_parts_that_the_first_call_makes_are_looked_at(counts, reason):
    def note(mlp, args, out):
        if not hasattr(mlp, "kept"):
            mlp.kept = Kept(counts)
        mlp.kept(out)

    model = streamgrad.enable(tiny_model("llama"), chunk_size=CHUNK)
    model.model.layers[0].mlp.register_forward_hook(note)
    with pytest.raises(ValueError, match=reason), torch.set_grad_enabled(not counts):
        model(**batches.plain(None) | {"use_cache": False})


OF_THE_PROGRAM: list[Tensor] = []
# Ways to keep a loss of the program's own, and to find it again.
PLACES = {
    "as it is": (lambda mlp, loss: setattr(mlp, "losses", loss), lambda mlp: mlp.losses),
    "in a list": (lambda mlp, loss: setattr(mlp, "losses", [loss]), lambda mlp: mlp.losses[0]),
    "in a dict": (lambda mlp, loss: setattr(mlp, "losses", {"own": loss}), lambda mlp: mlp.losses["own"]),
    "in lists of a dict": (lambda mlp, loss: setattr(mlp, "losses", {"own": [[loss]]}), lambda mlp: mlp.losses["own"][0][0]),
    "in a deque": (lambda mlp, loss: setattr(mlp, "losses", deque([loss])), lambda mlp: mlp.losses[0]),
    "in an object": (lambda mlp, loss: setattr(mlp, "losses", SimpleNamespace(own=loss)), lambda mlp: mlp.losses.own),
    "in the program": (lambda mlp, loss: OF_THE_PROGRAM.__setitem__(slice(None), [loss]), lambda mlp: OF_THE_PROGRAM[0]),
}


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("place", PLACES)
def test_a_loss_that_is_kept_is_exact_or_refused_in_one_chunk(place, keep):
    put, find = PLACES[place]

    def keeping():
        model = tiny_model("llama")
        model.model.layers[1].mlp.register_forward_hook(lambda mlp, args, out: put(mlp, out.square().mean()))
        return model

    def loss_of(model, batch):
        return model(**batch).loss + find(model.model.layers[1].mlp)

    model, batch = streamgrad.enable(keeping(), keep=keep, chunk_size=64), batches.plain(None)
    if keep != "all":
        for _ in range(2):
            with pytest.raises(ValueError, match="LlamaDecoderLayer 1, or a hook in it, keeps a tensor with its graph"):
                loss_of(model, batch).backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    else:
        with no_float32():
            assert_same_step(run_step(model, batch, forward=loss_of), run_step(keeping(), batch, forward=loss_of), 1e-10)
    OF_THE_PROGRAM.clear()


@pytest.mark.parametrize("place", PLACES)
def test_a_loss_that_is_kept_is_refused_before_a_step_in_chunks(place):
    put, _ = PLACES[place]
    model = streamgrad.enable(tiny_model("llama"), chunk_size=CHUNK)
    model.model.layers[1].mlp.register_forward_hook(lambda mlp, args, out: put(mlp, out.square().mean()))
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1, or a hook in it, keeps a tensor with its graph"):
        model(**batches.plain(None))
    OF_THE_PROGRAM.clear()


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
def test_what_one_layer_hands_to_the_next_through_a_dict_is_refused(chunk_size):
    """As residuals of values do: in backward the later layer would take it for a constant."""
    model, values = tiny_model("llama"), {}
    first, second = (layer.self_attn.v_proj for layer in model.model.layers[:2])
    first.register_forward_hook(lambda module, args, out: values.update(first=out))
    second.register_forward_hook(lambda module, args, out: out + values["first"])
    streamgrad.enable(model, chunk_size=chunk_size)
    reason = "LlamaDecoderLayer 0, or a hook in it, keeps a tensor with its graph|LlamaDecoderLayer 1 reads a trainable tensor"
    with pytest.raises((ValueError, RuntimeError), match=reason):
        run_step(model, batches.plain(None))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("keep", "chunk_size"), [("input", CHUNK), ("input", 64), ("attention", 64), ("all", 64)])
@pytest.mark.parametrize("reads_itself", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_a_weight_that_is_made_once_a_step_is_exact_or_refused(place, chunk_size, reads_itself, keep):
    """Forward makes it, and the run again in backward would take it for a constant."""
    put, find = PLACES[place]
    OF_THE_PROGRAM.clear()

    def forward(mlp, linear, hidden):
        try:
            weight = find(mlp)
        except (AttributeError, IndexError):
            weight = None
        if weight is None:
            weight = linear.weight.tanh()
            put(mlp, weight)
        out = nn.functional.linear(hidden, weight)
        return out + linear.weight.sum(dim=1) if reads_itself else out

    def making():
        model = tiny_model("llama")
        mlp = model.model.layers[1].mlp
        mlp.up_proj.forward = partial(forward, mlp, mlp.up_proj)
        put(mlp, None)
        return model

    def again(model):
        put(model.model.layers[1].mlp, None)
        return run_step(model, batches.plain(None))

    model = streamgrad.enable(making(), chunk_size=chunk_size, keep=keep)
    if keep == "all":
        with no_float32():
            assert_same_step(run_step(model, batches.plain(None)), run_step(making(), batches.plain(None)), 1e-10)
        return
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError), match="LlamaDecoderLayer 1 reads a trainable tensor"):
            again(model)
    assert all(parameter.grad is None for parameter in model.parameters())


class Gated(nn.Module):
    """Passes on a part of what a module gives; a loss of the program makes that part small."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.logits = module, nn.Parameter(torch.linspace(-1, 1, 24))

    def forward(self, h: Tensor) -> Tensor:
        self.gates = [self.logits.sigmoid()]
        self.strength = self.logits.exp()
        return self.module(h) * self.gates[0] * self.strength


OPTIONS = [{"chunk_size": CHUNK}, {"chunk_size": CHUNK, "keep": "attention"}, {"chunk_size": 64, "keep": "input"}]


@pytest.mark.parametrize("after_backward", [False, True])
@pytest.mark.parametrize("options", [*OPTIONS, {"chunk_size": CHUNK, "recompute_layers": 2}, {"keep": "all"}], ids=str)
def test_a_weight_that_every_call_leaves_on_a_module_may_be_part_of_a_loss(options, after_backward):
    def gated():
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.mlp = Gated(layer.mlp).double()
        return model

    def loss_of(model, batch):
        def penalty():
            return sum(0.1 * layer.mlp.gates[0].sum() + layer.mlp.strength.mean() for layer in model.model.layers)

        loss = model(**batch).loss
        if not after_backward:
            return loss + penalty()
        loss.backward(retain_graph=True)
        return penalty()

    stock, streamed = gated(), streamgrad.enable(gated(), **options)
    with no_float32():
        for length in (23, 5, 40):
            batch = {"input_ids": tokens(2, length), "labels": tokens(2, length)}
            expected = run_step(stock, batch, forward=loss_of)
            assert_same_step(run_step(streamed, batch, forward=loss_of), expected, 1e-10)
            with torch.no_grad():
                streamed(**batch, use_cache=False)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_the_first_call_alone_keeps_is_refused(options):
    """As a hook does that keeps one activation of each layer."""
    model, kept = streamgrad.enable(tiny_model("llama"), **options), {}
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda mlp, args, out: None if "mlp" in kept else kept.update(mlp=out))
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1, or a hook in it, keeps a tensor with its graph"):
        model(**batches.plain(None))


def test_a_hook_that_is_there_in_forward_alone_is_refused_in_chunks():
    model, kept = streamgrad.enable(tiny_model("llama"), chunk_size=CHUNK), []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda mlp, args, out: kept.append(out))
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1, or a hook in it, keeps a tensor with its graph"):
        model(**batches.plain(None))
    hook.remove()


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
@pytest.mark.parametrize("of", ["weights", "outputs"])
def test_a_loss_of_a_layer_whose_input_needs_no_gradient_is_refused(of, chunk_size):
    model, kept = with_lora(tiny_model("llama")), []
    target = next(module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer").self_attn.q_proj

    def keep(module, args, out):
        kept.append(target.lora_A["default"].weight.square().mean() if of == "weights" else out)

    target.register_forward_hook(keep)
    streamgrad.enable(model, chunk_size=chunk_size)
    with pytest.raises((ValueError, RuntimeError), match="LlamaDecoderLayer 0, or a hook in it, keeps a tensor with its graph"):
        run_step(model, batches.plain(None))


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
def test_what_is_kept_without_its_graph_or_let_go_of_is_no_loss(chunk_size):
    def watched():
        model, kept = tiny_model("llama"), {}
        mlp = model.model.layers[1].mlp
        mlp.register_forward_pre_hook(lambda mlp, args: kept.update(given=args[0]))
        mlp.register_forward_hook(lambda mlp, args, out: out + 0.1 * kept.pop("given").tanh())
        mlp.register_forward_hook(lambda mlp, args, out: kept.update(seen=out.detach()))
        return model

    with no_float32():
        expected = run_step(watched(), batches.plain(None))
        assert_same_step(run_step(streamgrad.enable(watched(), chunk_size=chunk_size), batches.plain(None)), expected, 1e-10)


@pytest.mark.parametrize("length", [23, 48])
def test_what_layers_note_for_each_other_is_that_of_the_sequence(length):
    """In one chunk, where layers are not tried on others."""
    batch = {"input_ids": tokens(1, length), "labels": tokens(1, length)}

    def noting():
        model, noted = tiny_model("llama"), {}
        first, second = (layer.mlp for layer in model.model.layers[:2])
        first.register_forward_hook(lambda mlp, args, out: noted.update(first=out.detach()))
        second.register_forward_hook(lambda mlp, args, out: out + noted["first"])
        return model

    with no_float32():
        expected = run_step(noting(), batch)
        assert_same_step(run_step(streamgrad.enable(noting()), batch), expected, 1e-10)


def test_what_a_module_begins_to_keep_after_the_first_step_is_seen():
    model = streamgrad.enable(tiny_model("llama"), chunk_size=64)
    run_step(model, batches.plain(None))
    mlp = model.model.layers[1].mlp
    plain = mlp.forward

    def keeping(hidden):
        mlp.loss = hidden.square().mean()
        return plain(hidden)

    mlp.forward = keeping
    for _ in range(2):
        with pytest.raises(RuntimeError, match="LlamaDecoderLayer 1, or a hook in it, keeps a tensor with its graph"):
            run_step(model, batches.plain(None))


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
def test_a_graph_of_the_program_on_a_module_is_not_the_layers(chunk_size):
    model = tiny_model("llama")
    with no_float32():
        expected = run_step(model, batches.plain(None))
        model.model.layers[1].mlp.latest = model(**batches.plain(None)).loss
        streamgrad.enable(model, chunk_size=chunk_size)
        assert_same_step(run_step(model, batches.plain(None)), expected, 1e-10)


def test_a_hook_that_comes_later_is_looked_at():
    model, calls, kept = streamgrad.enable(tiny_model("llama"), chunk_size=64), [], []
    mlp = model.model.layers[1].mlp
    mlp.register_forward_hook(lambda mlp, args, out: calls.append(out.shape[1]))
    for _ in range(2):
        run_step(model, batches.plain(None))
    assert calls == [batches.LENGTH] * 4  # no run but forward and backward
    hook = mlp.register_forward_hook(lambda mlp, args, out: kept.append(out))
    with pytest.raises(ValueError, match="LlamaDecoderLayer 1, or a hook in it, keeps a tensor with its graph"):
        run_step(model, batches.plain(None))
    hook.remove()
    run_step(model, batches.plain(None))


@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
def test_observers_that_hold_on_to_nodes_are_no_loss(chunk_size):
    model, batch = tiny_model("llama"), batches.plain(None)
    views = torch.ones(3, requires_grad=True).clone().unbind()
    with torch.no_grad():
        views[0].zero_()  # from now on torch raises where it is asked for its node
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size)
        with FlopCounterMode(display=False):
            assert_same_step(run_step(model, batch), expected, 1e-10)


def through_a_function_that_calls_itself(plain, hidden):
    def halved(times):
        return plain(hidden) if times == 0 else 0.5 * halved(times - 1)

    return halved(2)


def beside_an_exception_that_is_held(plain, hidden):
    error = None
    try:
        raise NotImplementedError(hidden.shape)
    except NotImplementedError as raised:
        error = raised
    return plain(hidden) if error is not None else hidden


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
@pytest.mark.parametrize("way", [through_a_function_that_calls_itself, beside_an_exception_that_is_held])
def test_a_layer_whose_frame_is_in_a_cycle_keeps_nothing(way, chunk_size, threads):
    """Python frees such a frame, and the tensors in it, as soon as it looks for cycles."""

    def cycling():
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.mlp.forward = partial(way, layer.mlp.forward)
        return model

    models = [streamgrad.enable(cycling(), chunk_size=chunk_size) for _ in range(threads)]
    with no_float32(), ThreadPoolExecutor(threads) as pool:
        expected = run_step(cycling(), batches.plain(None))
        for actual in pool.map(lambda model: run_step(model, batches.plain(None)), models):
            assert_same_step(actual, expected, 1e-10)


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("chunk_size", [CHUNK, 64])
def test_a_weight_that_every_call_makes_anew_is_no_loss(chunk_size):
    def normed():
        model = tiny_model("llama", mlp_bias=False)
        for layer in model.model.layers:
            nn.utils.weight_norm(layer.mlp.up_proj)
        return model

    with no_float32():
        expected = run_step(normed(), batches.plain(None))
        model = streamgrad.enable(normed(), chunk_size=chunk_size)
        for _ in range(2):
            assert_same_step(run_step(model, batches.plain(None)), expected, 1e-10)


class Product(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, h: Tensor) -> Tensor:
        return h @ self.weight.mT


def test_a_part_with_the_same_weight_that_the_first_call_puts_in():
    def replace(mlp, args):
        if type(mlp.up_proj) is nn.Linear:
            mlp.up_proj = Product(mlp.up_proj)

    def replacing():
        model = tiny_model("llama", mlp_bias=False)
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(replace)
        return model

    with no_float32():
        expected = run_step(replacing(), batches.plain(None))
        assert_same_step(run_step(streamgrad.enable(replacing(), chunk_size=CHUNK), batches.plain(None)), expected, 1e-10)


def test_a_part_whose_buffer_is_new_in_every_call_is_refused():
    class Calls(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.register_buffer("count", torch.tensor(count))

    model = streamgrad.enable(tiny_model("llama"), chunk_size=CHUNK)
    mlp = model.model.layers[0].mlp
    mlp.calls = Calls(0)
    mlp.register_forward_pre_hook(lambda mlp, _: setattr(mlp, "calls", Calls(int(mlp.calls.count) + 1)))
    with pytest.raises(ValueError, match="change a buffer in forward"), torch.no_grad():
        model(input_ids=tokens(1, 3 * CHUNK), use_cache=False)
