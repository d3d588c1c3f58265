"""Layers as users write them: exact, or refused, and with everything kept exact in any case that says so."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import streamgrad
from gradients import assert_same_step, no_float32, run_step
from streamgrad.hf import known_code
from tiny import tiny_model, tokens

LENGTH, CHUNKS, ONE = 24, {"chunk_size": 5}, {"chunk_size": 64, "keep": "input"}
BATCH = {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH), "use_cache": False}


@pytest.fixture(autouse=True)
def _in_float64():
    with no_float32():
        yield


def with_layers(kind: type[nn.Module], **options):
    """A tiny llama whose layers are of this kind, with the weights of the ordinary ones."""
    model = tiny_model("llama", **options)
    for layer in model.model.layers:
        layer.__class__ = kind
    return model


# --- Graphs that are kept, and tensors that are made once ------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS], ids=str)
def test_a_loss_that_a_hook_collects_from_a_later_step_on_is_refused(options):
    """Neither the hook nor a module changes when it begins to collect."""
    model, collected, is_on = streamgrad.enable(tiny_model("llama"), **options), [], []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda mlp, args, out: collected.append(out.square().mean()) if is_on else None)
    model(**BATCH).loss.backward()
    is_on.append(True)
    with pytest.raises(RuntimeError, match="keeps a tensor with its graph when it is called"):
        model(**BATCH).loss.backward()


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS], ids=str)
@pytest.mark.parametrize("place", ["a dict", "the module"])
def test_a_layers_input_that_is_kept_is_refused(options, place):
    """As for a loss on what the layer is given, or for a skip connection to later layers."""
    model, kept = streamgrad.enable(tiny_model("llama"), **options), {}
    norm = model.model.layers[1].input_layernorm
    norm.register_forward_pre_hook(lambda module, args: (vars(module) if place == "the module" else kept).update(x=args[0]))
    with pytest.raises((RuntimeError, ValueError), match="keeps a tensor with its graph when it is called"):
        model(**BATCH).loss.backward()


class MadeOnce(nn.Linear):
    """Rounds its weight once for all calls until the optimizer changes it."""

    made, version = None, None

    def forward(self, x: Tensor) -> Tensor:
        if self.version != self.weight._version:
            rounded = (4 * self.weight).round() / 4
            self.made, self.version = self.weight + (rounded - self.weight).detach(), self.weight._version
        return F.linear(x, self.made, self.bias)


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS, {"keep": "all"}], ids=str)
def test_a_weight_that_is_made_once_for_several_calls_is_exact_or_refused(options):
    def model():
        found = tiny_model("llama")
        for layer in found.model.layers:
            layer.mlp.up_proj.__class__ = MadeOnce
        return found

    streamed = streamgrad.enable(model(), **options)
    if options == {"keep": "all"}:
        assert_same_step(run_step(streamed, BATCH), run_step(model(), BATCH), 1e-9)
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"LlamaDecoderLayer \d reads a trainable tensor of shape .* made once and kept"):
            streamed(**BATCH).loss.backward()
    assert all(parameter.grad is None for parameter in streamed.parameters())


def test_a_frozen_weight_that_is_made_once_is_exact():
    def model():
        found = tiny_model("llama")
        for layer in found.model.layers:
            layer.mlp.up_proj.requires_grad_(False).__class__ = MadeOnce
        return found

    assert_same_step(run_step(streamgrad.enable(model(), **CHUNKS), BATCH), run_step(model(), BATCH), 1e-9)


# --- What a layer does beside computing its output ----------------------------------------------------------------------------


class AddedInBackward(torch.autograd.Function):
    """Returns `x`, and gives a loss of the layer's own its gradient, as models of DeepSeek's do."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


class BalancedRouter(modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **options) -> Tensor:
        out = super().forward(hidden_states, **options)
        load = F.linear(hidden_states.detach(), self.mlp.up_proj.weight).softmax(-1).mean((0, 1))
        return AddedInBackward.apply(out, 0.01 * load.square().sum())


class Decayed(modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **options) -> Tensor:
        return AddedInBackward.apply(super().forward(hidden_states, **options), 0.01 * self.mlp.up_proj.weight.square().sum())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [BalancedRouter, Decayed])
def test_gradients_that_are_made_in_backward_are_refused_in_chunks(kind, dtype):
    """They are far smaller than those of the trial, and in chunks each would be added once a chunk."""
    with pytest.raises(ValueError, match="makes gradients of its own in backward"):
        streamgrad.enable(with_layers(kind, dtype=dtype), **CHUNKS)(**BATCH)
    stock, model = with_layers(kind, dtype=torch.float64), with_layers(kind, dtype=torch.float64)
    assert_same_step(run_step(streamgrad.enable(model, **ONE), BATCH), run_step(stock, BATCH), 1e-9)


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS], ids=str)
def test_a_layer_that_calls_backward_is_refused_and_leaves_no_gradient(options):
    class Local(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **options) -> Tensor:
            with torch.enable_grad():
                self.mlp.up_proj(hidden_states.detach()).square().mean().backward()
            return super().forward(hidden_states, **options)

    model = streamgrad.enable(with_layers(Local), **options)
    with pytest.raises(ValueError, match="its layers call backward in forward"):
        model(**BATCH)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS], ids=str)
def test_hidden_states_that_are_changed_in_place_are_refused(options):
    """With frozen embeddings torch allows it; the input that is kept for backward would be the changed one."""
    model = streamgrad.enable(tiny_model("llama"), **options)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda norm, args: (args[0].add_(0.01),))
    with pytest.raises(ValueError, match="changes in place the hidden states that it is given"):
        model(**BATCH)


# --- Switches that are turned after the first step ----------------------------------------------------------------------------


class Pooled(modeling_llama.LlamaDecoderLayer):
    """Adds a mean over tokens if any of its switches says so."""

    def forward(self, hidden_states: Tensor, pooled=False, condition=None, **options) -> Tensor:
        out = super().forward(hidden_states, **options)
        own = getattr(self, "own", None)
        if pooled or getattr(self.self_attn.config, "pooled", False) or getattr(self, "switches", {}).get("pooled"):
            out = out + 0.3 * hidden_states.mean(1, keepdim=True)
        if condition is not None:
            out = out + condition.mean(1, keepdim=True)
        return out if own is None else out + hidden_states.mean(1, keepdim=True)


TURNED = {
    "argument": lambda model: {"pooled": True},
    "vectors": lambda model: {"condition": torch.ones(2, LENGTH, 24, dtype=torch.float64)},
    "configuration": lambda model: setattr(model.config, "pooled", True),
    "dict": lambda model: [layer.switches.update(pooled=True) for layer in model.model.layers] and None,
    "tensor": lambda model: [setattr(layer, "own", torch.ones(())) for layer in model.model.layers] and None,
}


@pytest.mark.parametrize("turn", TURNED)
def test_a_switch_that_is_turned_later_is_tried_again(turn):
    model = streamgrad.enable(with_layers(Pooled), **CHUNKS)
    for layer in model.model.layers:
        layer.own, layer.switches = None, {"pooled": False}
    run_step(model, BATCH)
    more = TURNED[turn](model) or {}
    with pytest.raises(ValueError, match=r"mixes tokens outside of attention|gives other outputs or gradients"):
        model(**BATCH, **more)


def test_vectors_that_are_zero_in_the_first_step_hide_nothing():
    model = streamgrad.enable(with_layers(Pooled), **CHUNKS)
    with pytest.raises(ValueError, match="gives other outputs or gradients for tokens in chunks"):
        model(**BATCH, condition=torch.zeros(2, LENGTH, 24, dtype=torch.float64))


def test_a_frozen_gate_that_is_filled_later_is_tried_again():
    class Gated(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **options) -> Tensor:
            return super().forward(hidden_states, **options) + self.gate * hidden_states.mean(1, keepdim=True)

    model = with_layers(Gated)
    for layer in model.model.layers:
        layer.gate = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)
    run_step(streamgrad.enable(model, **CHUNKS), BATCH)
    torch.nn.init.ones_(model.model.layers[1].gate)
    with pytest.raises(ValueError, match="mixes tokens outside of attention"):
        model(**BATCH)


def test_random_tokens_without_finite_outputs_do_not_hide_what_real_ones_show():
    class OfRoots(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **options) -> Tensor:
            return super().forward(hidden_states, **options) + hidden_states.sqrt().mean(1, keepdim=True)

    model = with_layers(OfRoots, num_hidden_layers=1)
    model.model.embed_tokens.weight.data.abs_().add_(0.1)
    with pytest.raises(ValueError, match="mixes tokens outside of attention"):
        streamgrad.enable(model, **CHUNKS)(**BATCH)


# --- Attention of their own -------------------------------------------------------------------------------------------------


def copied(function):
    """Return the function as it would be in this file: its instructions, with this file's `repeat_kv` and `nn`."""
    return types.FunctionType(function.__code__, globals(), argdefs=(0.0,))


repeat_kv = types.FunctionType(modeling_llama.repeat_kv.__code__, globals())


def off_by_one(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Softmax with one more in the denominator, as some give their models."""
    key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
    scores = F.pad(query @ key.mT * scaling + attention_mask, (0, 1))
    return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("options", [CHUNKS, ONE], ids=str)
def test_a_hook_that_scales_a_gradient_inside_of_a_layer(options):
    """Where it asks whether there is a graph, it runs in backward; else the error says why there is none."""

    def model(*, asks):
        def scaled(module, args, out):
            if out.requires_grad or not asks:
                out.register_hook(lambda gradient: 0.3 * gradient)

        found = tiny_model("llama")
        found.model.layers[1].mlp.register_forward_hook(scaled)
        return found

    ours, expected = streamgrad.enable(model(asks=True), **options), run_step(model(asks=True), BATCH)
    for _ in range(3):
        assert_same_step(run_step(ours, BATCH), expected, 1e-10)
    ours = streamgrad.enable(model(asks=False), **options)
    if options == ONE:
        run_step(ours, BATCH)  # the first step has a graph, and is watched
    with pytest.raises(RuntimeError, match="cannot register a hook") as raised:
        run_step(ours, BATCH)
    assert "LlamaDecoderLayer 1 runs forward without a graph" in " ".join(raised.value.__notes__)


def plain_and_in_a_transform(way):
    """Return a kind of layer that uses its MLP as ever, and then its norm and its MLP inside a transform of torch.func."""
    ways = {
        "grad": lambda function, x: torch.func.grad(lambda x: function(x).square().sum())(x),
        "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1],
        "vmap": lambda function, x: torch.vmap(function)(x),
    }

    class Layer(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            out = super().forward(hidden_states, **kwargs)
            return out + 0.1 * ways[way](lambda x: self.mlp(self.post_attention_layernorm(x)), out)

    return Layer


@pytest.mark.parametrize(
    "options", [CHUNKS, CHUNKS | {"fused_kernels": "on"}, ONE, {"keep": "all", "fused_kernels": "on"}], ids=str
)
@pytest.mark.parametrize("way", ["grad", "jvp", "vmap"])
def test_modules_inside_of_transforms(way, options):
    """Products whose values are put off, and fused parts, know backward alone; from the second step on there are some."""
    model, expected = streamgrad.enable(with_layers(kind := plain_and_in_a_transform(way)), **options), with_layers(kind)
    stock = run_step(expected, BATCH)
    for _ in range(3):
        assert_same_step(run_step(model, BATCH), stock, 1e-10)


class GatedByToken(modeling_llama.LlamaDecoderLayer):
    """Adds attention where a gate is open, and leaves it out where all tokens that it is called with have closed ones."""

    beside_mlp = False

    def forward(self, hidden_states, **kwargs):
        normed = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=normed, **kwargs)
        is_open = hidden_states.detach()[:, :, :1] > self.threshold
        if is_open.any():
            hidden_states = hidden_states + is_open * attended
        # The MLP beside attention shares its norm, and so part of a chunk's graph.
        return hidden_states + self.mlp(normed if self.beside_mlp else self.post_attention_layernorm(hidden_states))


@pytest.mark.parametrize("beside_mlp", [False, True])
@pytest.mark.parametrize("options", [{}, ONE, CHUNKS, CHUNKS | {"keep": "attention"}, {"keep": "all"}], ids=str)
def test_a_chunk_that_does_not_use_its_own_attention(options, beside_mlp):
    """Queries of later chunks owe gradients to its keys and values all the same."""

    def model():
        found = with_layers(GatedByToken)
        for layer in found.model.layers:
            layer.threshold, layer.beside_mlp = 0.0, beside_mlp
        with torch.no_grad():  # closed for the tokens 1 and 2
            found.model.embed_tokens.weight[1:3, 0], found.model.embed_tokens.weight[3:, 0] = -100.0, 100.0
        return found

    batch = {"input_ids": tokens(2, LENGTH), "labels": tokens(2, LENGTH), "use_cache": False}
    batch["input_ids"][:, 2:11] = torch.tensor([1, 2, 1, 1, 2, 2, 2, 1, 2])
    batch["input_ids"][:, [0, 1, *range(11, LENGTH)]] = 3 + batch["input_ids"][:, [0, 1, *range(11, LENGTH)]] % 50
    ours, expected = model(), run_step(model(), batch)
    streamgrad.enable(ours, **options)
    for _ in range(3):
        assert_same_step(run_step(ours, batch), expected, 1e-10)


class OwnFile(modeling_llama.LlamaAttention):
    """Attention as in a file of the model's own, which has an eager function of its own too."""

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **options):
        projections = self.q_proj, self.k_proj, self.v_proj
        query, key, value = (each(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projections)
        query, key = modeling_llama.apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return self.o_proj(self.attended(attend, query, key, value, attention_mask).flatten(2)), None

    def attended(self, attend, *operands):
        return attend(self, *operands, scaling=self.scaling)[0]


class ByPosition(OwnFile):
    def attended(self, attend, *operands):
        return attend(self, *operands, 0.0, self.scaling)[0]


eager_attention_forward = copied(modeling_llama.eager_attention_forward)


def with_attention(kind, implementation):
    model = tiny_model("llama", attn_implementation=implementation)
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


@pytest.mark.parametrize("original", [modeling_llama.eager_attention_forward, known_code._sliced_eager_attention])
def test_a_copy_of_eager_attention_is_exact(original, monkeypatch):
    monkeypatch.setitem(globals(), "eager_attention_forward", copied(original))
    stock, model = (with_attention(OwnFile, "eager") for _ in range(2))
    assert_same_step(run_step(streamgrad.enable(model, **CHUNKS), BATCH), run_step(stock, BATCH), 1e-9)


@pytest.mark.parametrize("options", [ONE, CHUNKS, {"keep": "all"}], ids=str)
def test_eager_attention_of_the_models_own_is_refused(options, monkeypatch):
    monkeypatch.setitem(globals(), "eager_attention_forward", off_by_one)
    with pytest.raises(ValueError, match=r"'eager', has a function of .*test_layers_of_users in place of transformers' own"):
        streamgrad.enable(with_attention(OwnFile, "eager"), **options)


def another_file(source):
    """Return what a file consists of that has this source."""
    names = {"OwnFile": OwnFile, "functools": functools, "__name__": "another_file"}
    exec(source, names)
    return names


LOGGED = """
def logged(forward):
    @functools.wraps(forward)
    def call(*args, **given):
        return forward(*args, **given)
    return call
"""


def decorated(layer):
    forward = another_file(LOGGED)["logged"](OwnFile.forward)
    layer.self_attn.__class__ = type("Decorated", (OwnFile,), {"forward": forward})


def of_the_module(layer):
    layer.self_attn.forward = types.MethodType(OwnFile.forward, layer.self_attn)


def inherited(layer):
    source = "class Inherited(OwnFile):\n    def forward(self, *args, **given): return super().forward(*args, **given)"
    layer.self_attn.__class__ = another_file(source)["Inherited"]


def by_another_name(layer):
    names = another_file("")
    names.update(globals(), in_two_steps=off_by_one)
    code = OwnFile.forward.__code__
    code = code.replace(co_names=tuple("in_two_steps" if name == "eager_attention_forward" else name for name in code.co_names))
    del names["eager_attention_forward"]
    layer.self_attn.__class__ = type("Renamed", (OwnFile,), {"forward": types.FunctionType(code, names, argdefs=(None,) * 3)})


@pytest.mark.parametrize("way", [decorated, of_the_module, inherited, by_another_name])
def test_eager_attention_of_the_models_own_is_found(way, monkeypatch):
    model = tiny_model("llama", attn_implementation="eager")
    for layer in model.model.layers:
        way(layer)
    monkeypatch.setitem(globals(), "eager_attention_forward", off_by_one)
    if way is by_another_name:
        monkeypatch.setattr(OwnFile, "forward", modeling_llama.LlamaAttention.forward)
    with pytest.raises(ValueError, match=r"'eager', has a function of .*test_layers_of_users in place of transformers' own"):
        streamgrad.enable(model, **CHUNKS)


def test_a_copy_of_eager_attention_with_other_defaults_is_refused(monkeypatch):
    function = modeling_llama.eager_attention_forward
    monkeypatch.setitem(globals(), "eager_attention_forward", types.FunctionType(function.__code__, globals(), argdefs=(0.5,)))
    with pytest.raises(ValueError, match=r"'eager', has a function of .*test_layers_of_users in place of transformers' own"):
        streamgrad.enable(with_attention(OwnFile, "eager"), **CHUNKS)


@pytest.mark.parametrize("place", ["this file", "transformers"])
def test_eager_attention_that_repeats_keys_in_its_own_way_is_refused(place, monkeypatch):
    def reversed_heads(hidden_states, n_rep):
        return modeling_llama.repeat_kv(hidden_states.flip(1), n_rep)

    model = with_attention(OwnFile if place == "this file" else modeling_llama.LlamaAttention, "eager")
    streamgrad.enable(model, **CHUNKS)(**BATCH)
    monkeypatch.setitem(globals() if place == "this file" else vars(modeling_llama), "repeat_kv", reversed_heads)
    with pytest.raises(ValueError, match=r"'eager', has a function of .*test_layers_of_users in place of transformers' own"):
        streamgrad.enable(streamgrad.disable(model), **CHUNKS)(**BATCH)


@pytest.mark.parametrize("options", [ONE, CHUNKS], ids=str)
def test_attention_that_is_called_by_position_is_refused(options):
    with pytest.raises(ValueError, match="called with scaling or dropout by position"):
        streamgrad.enable(with_attention(ByPosition, "sdpa"), **options)(**BATCH)


@pytest.mark.parametrize("options", [{"keep": "all"}, ONE, CHUNKS], ids=str)
def test_eager_attention_without_a_mask_is_refused(options):
    """SDPA takes no mask for a causal one; eager attention lets all tokens see each other, as in models of diffusion."""

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        hidden_states, positions = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])[None]
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, attention_mask=None, position_embeddings=self.rotary_emb(hidden_states, positions)
            )
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))

    model = tiny_model("llama", attn_implementation="eager")
    model.model.forward = types.MethodType(forward, model.model)
    with pytest.raises(ValueError, match="given no attention mask, and eager attention then lets each token see those after it"):
        streamgrad.enable(model, **options)(**BATCH)


def test_a_torchscript_module_is_refused_at_once():
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0.9 * x

    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn = torch.jit.script(Scaled())
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer\.mlp\.act_fn is a TorchScript module"):
        streamgrad.enable(model)


# --- What used to be refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS], ids=str)
def test_arguments_that_layers_do_not_read_are_passed_on(options):
    """Tokenizers and collators add columns; the stock model ignores those that it does not know."""
    batch = BATCH | {"token_type_ids": torch.ones(2, LENGTH, dtype=torch.long), "sample_weight": torch.rand(2)}
    stock, model = tiny_model("llama"), streamgrad.enable(tiny_model("llama"), **options)
    assert_same_step(run_step(model, batch), run_step(stock, batch), 1e-9)


def test_an_argument_that_a_layer_reads_and_nobody_can_cut_is_refused():
    class Typed(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, token_type_ids=None, **options) -> Tensor:
            return super().forward(hidden_states * (1 + token_type_ids[..., None]), **options)

    model = streamgrad.enable(with_layers(Typed), **CHUNKS)
    with pytest.raises(ValueError, match=r"its layers read token_type_ids of shape \(2, 24\), and how to cut it"):
        model(**BATCH, token_type_ids=torch.ones(2, LENGTH, dtype=torch.long))


@pytest.mark.parametrize("given", [torch.ones(2, LENGTH), [torch.ones(2, LENGTH)], {"a": torch.ones(2, LENGTH)}])
def test_an_argument_that_a_layer_reads_if_it_is_of_its_kind_is_refused(given):
    """What stands for it in a chunk must not be passed over: the stock model reads it."""

    class OfAKind(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, scales=None, **options) -> Tensor:
            if isinstance(scales, type(given)):
                (scales,) = [scales] if isinstance(scales, Tensor) else scales.values() if isinstance(scales, dict) else scales
                hidden_states = hidden_states * (1 + scales[..., None])
            return super().forward(hidden_states, **options)

    model = streamgrad.enable(with_layers(OfAKind), **CHUNKS)
    with pytest.raises(ValueError, match=r"its layers read scales of shape \(2, 24\), and how to cut it"):
        model(**BATCH, scales=given)


def test_rotary_angles_in_a_dict():
    """As of layers with a window and of others, of which each takes its own."""

    class OfOneKind(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, position_embeddings=None, **options) -> Tensor:
            return super().forward(hidden_states, position_embeddings=position_embeddings["full"], **options)

    def model():
        found = with_layers(OfOneKind)
        found.model.rotary_emb.register_forward_hook(lambda module, args, angles: {"full": angles})
        return found

    assert_same_step(run_step(streamgrad.enable(model(), **CHUNKS), BATCH), run_step(model(), BATCH), 1e-9)


class Around(modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **options) -> Tensor:
        return 0.9 * super().forward(hidden_states, **options)


@pytest.mark.parametrize("options", [{}, ONE, CHUNKS], ids=str)
def test_a_layer_around_another_that_hands_on_all_it_gets(options):
    stock, model = with_layers(Around), streamgrad.enable(with_layers(Around), **options)
    assert_same_step(run_step(model, BATCH), run_step(stock, BATCH), 1e-9)


def test_a_layer_around_another_that_loses_the_cache_is_refused():
    class Lost(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: Tensor, **options) -> Tensor:
            return super().forward(hidden_states, **options | {"past_key_values": None})

    with pytest.raises(ValueError, match=r"never called past_key_values\.update"):
        streamgrad.enable(with_layers(Lost), **CHUNKS)(**BATCH)


@pytest.mark.parametrize("kind", [LoHaConfig, LoKrConfig])
@pytest.mark.parametrize("dropout", [0.0, 0.01, 0.5])
def test_adapters_that_draw_for_a_dropout_of_zero(kind, dropout):
    def model():
        torch.manual_seed(0)
        found = get_peft_model(tiny_model("llama"), kind(r=3, target_modules=["q_proj", "up_proj"], module_dropout=dropout))
        return found.double().train()

    streamed = streamgrad.enable(model(), **CHUNKS)
    if dropout:
        with pytest.raises(ValueError, match="draws random numbers for the whole call"):
            streamed(**BATCH)
    else:
        assert_same_step(run_step(streamed, BATCH), run_step(model(), BATCH), 1e-9)
