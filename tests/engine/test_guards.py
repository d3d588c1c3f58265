"""What happens between forward and backward: a re-run that would compute something else is refused, never differentiated."""

from __future__ import annotations

import copy
import functools
import pickle
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import functional_call
from transformers.models.llama.modeling_llama import LlamaMLP

import batches
import streamgrad
from families import LAYERS_TAKE_STATES_UP, small_model
from faults import Hook
from gradients import assert_same_step, more, no_float32, run_step
from lora import with_lora
from streamgrad.hf.patching import InstalledForward
from tiny import FAMILIES, tiny_model, tokens

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}


def two_adapters():
    model = with_lora(tiny_model("llama"))
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    model.set_adapter("default")
    return streamgrad.enable(model, **OPTIONS)


def test_switching_the_adapter():
    model = two_adapters()
    loss = model(**batches.plain(None)).loss
    model.set_adapter("second")
    with pytest.raises(RuntimeError, match="frozen in forward is trainable in backward"):
        loss.backward()


def test_an_adapter_disabled_only_in_forward():
    model = with_lora(tiny_model("llama"))
    streamgrad.enable(model, **OPTIONS)
    embeds = torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
    with model.disable_adapter():
        loss = model(inputs_embeds=embeds, labels=tokens(1, 9)).loss
    with pytest.raises(RuntimeError, match="trainable in backward|computed something else"):
        loss.backward()


def test_a_reference_pass_with_disabled_adapters_in_between_is_fine():
    """DPO and GRPO: policy forward, reference forward without adapters, policy backward."""
    batch = batches.plain(None)

    def with_reference(model, batch):
        loss = model(**batch).loss
        with torch.no_grad(), model.disable_adapter():
            model(**batch)
        return loss

    with no_float32():
        expected = run_step(with_lora(tiny_model("llama")), batch)
        model = streamgrad.enable(with_lora(tiny_model("llama")), **OPTIONS)
        assert_same_step(run_step(model, batch, forward=with_reference), expected, 1e-10)


@pytest.mark.parametrize("change", ["data", "unfreeze", "assign", "frozen weight in place"])
def test_changes_of_the_model(change):
    model = tiny_model("gpt_neox", hidden_dropout=0.3)
    layer = model.gpt_neox.layers[0]
    weight = layer.mlp.dense_h_to_4h.weight
    if change in ("unfreeze", "frozen weight in place"):
        weight.requires_grad_(False)
    streamgrad.enable(model, **OPTIONS)
    loss = model(**batches.plain(None)).loss
    if change == "data":
        weight.data = 3.0 * weight.data
    elif change == "unfreeze":
        weight.requires_grad_(True)
    elif change == "assign":
        model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)
    else:
        with torch.no_grad():
            weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="between forward and backward|computed something else|trainable in backward"):
        loss.backward()


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
def test_a_hook_that_acts_in_forward_alone_where_attention_is_kept(projection):
    """The attention output that was kept is that with the hook, and so is the layer's when it is run again."""
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS, keep="attention")
    hook = Hook(getattr(model.model.layers[1].self_attn, projection), lambda module, args, out: 1.1 * out, on=True)
    loss = model(**batches.plain(None)).loss
    hook.on = False
    with pytest.raises(RuntimeError, match="LlamaDecoderLayer 1 computed something else"):
        loss.backward()


def test_a_hook_on_one_token_that_acts_in_forward_alone():
    """Later tokens of the layer do not depend on what its MLP gives for this one."""

    def double_second(module, args, out):
        return torch.cat([out[:, :1], 2.0 * out[:, 1:2], out[:, 2:]], dim=1)

    model = streamgrad.enable(tiny_model("llama"))
    hook = Hook(model.model.layers[1].mlp, double_second, on=True)
    loss = model(**batches.plain(None)).loss
    hook.on = False
    with pytest.raises(RuntimeError, match="LlamaDecoderLayer 1 computed something else"):
        loss.backward()


def test_a_frozen_parameter_that_takes_the_place_of_one_that_is_gone():
    """It may have the other's id, and is too much like it for its outcome to tell."""
    model = tiny_model("llama")
    projection = model.model.layers[0].mlp.up_proj
    values = projection.weight.detach().clone()
    projection.weight = nn.Parameter(values, requires_grad=False)
    streamgrad.enable(model, **OPTIONS)
    loss = model(**batches.plain(None)).loss
    values = 1.0002 * values
    place = id(projection._parameters.pop("weight"))
    others = [nn.Parameter(values, requires_grad=False) for _ in range(1000)]
    projection.weight = next((other for other in others if id(other) == place), others[0])
    with pytest.raises(RuntimeError, match="were replaced between forward and backward"):
        loss.backward()


@pytest.mark.skipif(not LAYERS_TAKE_STATES_UP, reason="layers of transformers before 5.21 are refused")
def test_a_second_input_of_a_layer_that_changes():
    """Zamba 2's layers take the embeddings of all tokens beside hidden states."""
    model, taken = streamgrad.enable(small_model("zamba2"), chunk_size=5), []
    ids = tokens(1, 9)
    with mock.patch.object(torch, "clone", lambda tensor: taken.append(tensor * 1) or taken[-1]):
        loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        taken[0].add_(1)
    with pytest.raises(RuntimeError, match="an input of Zamba2HybridLayer 1 was modified in place"):
        loss.backward()


@pytest.mark.parametrize("in_place", [True, False])
def test_a_bias_that_balances_experts_changes(in_place):
    """Tokens would go to other experts than in forward, and the last of a chunk, whose outcome is compared, need not."""
    model = streamgrad.enable(tiny_model("deepseek_v3"), chunk_size=20)
    gate, ids = model.model.layers[1].mlp.gate, tokens(1, 40, seed=1)
    loss = model(input_ids=ids, labels=ids).loss
    moved = gate.e_score_correction_bias + torch.tensor([0.0, 0.05, 0.0, 0.0])
    if in_place:
        gate.e_score_correction_bias.copy_(moved)
    else:
        gate.e_score_correction_bias = moved
    with pytest.raises(RuntimeError, match="a buffer of DeepseekV3DecoderLayer 1 was changed between forward and backward"):
        loss.backward()
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("keep", ["input", "attention"])
@pytest.mark.parametrize(
    ("family", "batch"),
    [("mistral", batches.right_padded), ("mistral", batches.packed), pytest.param("lfm2", batches.right_padded, marks=more)],
)
def test_a_batch_that_is_written_over_before_backward(keep, family, batch):
    """As where batches have a place of their own; the stock model has read masks and positions by then."""
    model = tiny_model(family) if family in FAMILIES else small_model(family)

    def written_over(model, batch):
        batch = {name: value.bool() if name == "attention_mask" else value for name, value in batch.items()}
        batch = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        loss = model(**batch).loss
        for name in ("attention_mask", "position_ids", "labels"):
            if name in batch:
                batch[name].copy_(batch[name].flip(1))
        return loss

    with no_float32():
        expected = run_step(copy.deepcopy(model), batch(None))
        streamgrad.enable(model, **OPTIONS, keep=keep)
        assert_same_step(run_step(model, batch(None), forward=written_over), expected, 1e-10)


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_a_dense_mask_that_is_written_over_before_backward(keep):
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS, keep=keep)
    batch = batches.dense_mask(model)
    loss = model(**batch).loss
    batch["attention_mask"].zero_()
    with pytest.raises(RuntimeError, match="mask was modified in place|modified by an inplace operation"):
        loss.backward()


def test_functional_call_is_refused_in_backward():
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    values = {name: (2.0 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    loss = functional_call(model, values, kwargs=batches.plain(None)).loss
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()


def test_a_trainable_tensor_from_a_hook_is_refused():
    model = tiny_model("llama")
    vector = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + vector)
    streamgrad.enable(model, **OPTIONS)
    with pytest.raises(RuntimeError, match="trainable tensor of shape \\(24,\\) that is not among its parameters"):
        model(**batches.plain(None))


def test_hooks_on_decoder_layers_are_exact():
    vector = torch.zeros(24, dtype=torch.float64, requires_grad=True)

    def hooked():
        model = tiny_model("llama")
        model.model.layers[0].register_forward_hook(lambda module, args, out: 1.5 * out + vector)
        return model

    batch = batches.plain(None)
    with no_float32():
        vector.grad = None
        expected = run_step(hooked(), batch)
        expected_vector, vector.grad = vector.grad, None
        assert_same_step(run_step(streamgrad.enable(hooked(), **OPTIONS), batch), expected, 1e-10)
    torch.testing.assert_close(vector.grad, expected_vector, rtol=1e-10, atol=0)


class Counted(LlamaMLP):
    """Sets up, by the tokens of its first call, what it reads in every one: in place, by another buffer, or in a table."""

    way, calls = "in place", 0

    def forward(self, x):
        self.calls += 1
        if not self.is_set["default"]:
            mean = x.detach().mean()
            if self.way == "in place":
                self.shift.copy_(mean)
            else:
                self.shift = mean
            self.is_set["default"] = True
        return super().forward(x - self.shift)


@pytest.mark.parametrize(
    ("options", "with_graph"), [(OPTIONS, True), (OPTIONS, False), ({"chunk_size": 64, "keep": "input"}, True)]
)
@pytest.mark.parametrize("way", ["in place", "another"])
def test_layers_that_change_a_buffer_are_refused_and_left_as_they_were(way, options, with_graph):
    """However often they are called; the user may then go on without streaming."""
    stock = tiny_model("llama")
    for layer in stock.model.layers:
        layer.mlp.__class__, layer.mlp.way, layer.mlp.is_set = Counted, way, {"default": False}
        layer.mlp.register_buffer("shift", torch.zeros((), dtype=torch.float64))
    model, batch = streamgrad.enable(copy.deepcopy(stock), **options), batches.plain(None)
    for _ in range(4):
        with torch.set_grad_enabled(with_graph), pytest.raises(ValueError, match="change a buffer in forward"):
            model(**batch | {"use_cache": False})
    for layer in model.model.layers:
        assert layer.mlp.shift == 0 and layer.mlp.calls == 0 and layer.mlp.is_set == {"default": False}
    with no_float32():
        assert_same_step(run_step(streamgrad.disable(model), batch), run_step(stock, batch), 1e-10)


def test_a_batch_norm_in_a_layer_is_refused():
    model = tiny_model("llama")
    model.model.layers[1].mlp.norm = torch.nn.BatchNorm1d(24)
    with pytest.raises(ValueError, match="BatchNorm1d, which mixes tokens"):
        streamgrad.enable(model)


def test_adapters_that_look_at_the_whole_sequence_are_refused_whenever_they_are_attached():
    """Activated LoRA counts its offsets from the end of the sequence."""
    options = {"targets": ["q_proj"], "alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"}
    with pytest.raises(ValueError, match="activated LoRA"):
        streamgrad.enable(with_lora(tiny_model("llama"), **options))
    late = with_lora(streamgrad.enable(tiny_model("llama"), **OPTIONS), **options)
    with pytest.raises(ValueError, match="activated LoRA"):
        late(**batches.plain(None))


def test_a_layer_whose_only_trainable_parameter_is_unused():
    model = tiny_model("llama").requires_grad_(False)
    model.model.layers[0].spare = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    model.model.layers[1].mlp.up_proj.weight.requires_grad_()
    batch = batches.plain(None)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, **OPTIONS)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("way", ["hook", "forward", "attribute", "helper"])
def test_a_tensor_that_becomes_trainable_in_a_later_step_is_refused(way):
    """Whatever way a layer comes by it, and however many steps it has passed."""
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    mlp, vector = model.model.layers[1].mlp, torch.zeros(24, dtype=torch.float64)
    kind, steered = type(mlp), functools.partial(torch.add, vector)
    if way == "hook":
        mlp.register_forward_hook(lambda module, args, out: out + vector)
    elif way == "forward":
        mlp.forward = lambda hidden: kind.forward(mlp, hidden) + vector
    elif way == "attribute":
        mlp.vector = vector
        mlp.__class__ = type("Steered", (kind,), {"forward": lambda self, hidden: kind.forward(self, hidden) + self.vector})
    else:
        mlp.__class__ = type("Steered", (kind,), {"forward": lambda self, hidden: steered(kind.forward(self, hidden))})
    for _ in range(2):
        model(**batches.plain(None)).loss.backward()
    vector.requires_grad_()
    loss = model(**batches.plain(None)).loss
    with pytest.raises(RuntimeError, match=r"LlamaDecoderLayer 1 reads a trainable tensor of shape \(24,\)"):
        loss.backward()


class _Named(torch.autograd.Function):
    """Twice its input; its node has an attribute of the name that nodes of tensors have."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.variable = torch.zeros(3, requires_grad=True)
        return 2.0 * hidden

    @staticmethod
    def backward(ctx, gradient):
        return 2.0 * gradient


def test_what_a_function_calls_variable_is_not_taken_for_a_leaf():
    def hooked():
        model = tiny_model("llama")
        model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: _Named.apply(out))
        return model

    batch = batches.plain(None)
    with no_float32():
        expected = run_step(hooked(), batch)
        assert_same_step(run_step(streamgrad.enable(hooked(), **OPTIONS), batch), expected, 1e-10)


# --- the installed forward ---------------------------------------------------------------------------------------------


def test_pickle_runs_its_own_weights():
    model = streamgrad.enable(tiny_model("qwen3"), **OPTIONS)
    loaded = pickle.loads(pickle.dumps(model))
    assert streamgrad.is_enabled(loaded)
    assert InstalledForward.on(loaded).module is loaded
    batch = batches.plain(None)
    with no_float32():
        assert_same_step(run_step(loaded, batch), run_step(tiny_model("qwen3"), batch), 1e-10)


def test_the_signature_is_stock():
    import inspect

    model = tiny_model("qwen3")
    before = inspect.signature(model.forward), inspect.signature(model.model.forward)
    streamgrad.enable(model)
    assert (inspect.signature(model.forward), inspect.signature(model.model.forward)) == before


def test_disabling_the_decoder_alone_and_enabling_again():
    model = tiny_model("qwen3")
    streamgrad.enable(model, **OPTIONS)
    streamgrad.disable(model.model)
    streamgrad.enable(model, **OPTIONS)
    batch = batches.plain(None)
    with no_float32():
        assert_same_step(run_step(model, batch), run_step(tiny_model("qwen3"), batch), 1e-10)
    streamgrad.disable(model)
    assert not {"forward", "_streamgrad"} & (vars(model).keys() | vars(model.model).keys())


def test_disable_under_someone_elses_wrapper_passes_on_to_stock():
    """accelerate and others keep a reference to the forward they found."""
    model = streamgrad.enable(tiny_model("qwen3"), **OPTIONS)
    inner = model.forward
    model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    streamgrad.disable(model)
    assert "forward" in vars(model), "the wrapper is not ours to remove"
    assert isinstance(model(**batches.plain(None)).logits, torch.Tensor)


def test_a_layer_that_stands_twice_in_the_list():
    def shared():
        model = tiny_model("llama", num_hidden_layers=3)
        model.model.layers[2] = model.model.layers[0]
        return model

    batch = batches.plain(None) | {"use_cache": False}
    with no_float32():
        assert_same_step(run_step(streamgrad.enable(shared(), **OPTIONS), batch), run_step(shared(), batch), 1e-10)


@pytest.mark.parametrize("extra", [{"ignore_index": 7}, {"shift": True}])
def test_ignore_index_and_shifted_labels(extra):
    batch = batches.plain(None)
    if extra.get("shift"):
        shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        shifted[:, 3:6] = -100
        batch["shift_labels"] = shifted
    else:
        batch["labels"][:, 4:9] = 7
        batch |= extra
    with no_float32():
        expected = run_step(tiny_model("llama"), batch)
        assert_same_step(run_step(streamgrad.enable(tiny_model("llama"), **OPTIONS), batch), expected, 1e-10)


def test_a_mask_that_needs_a_gradient_is_refused():
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    batch = batches.dense_mask(model)
    batch["attention_mask"].requires_grad_()
    with pytest.raises(ValueError, match="attention mask needs a gradient"):
        model(**batch)
