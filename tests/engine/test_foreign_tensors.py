"""Trainable tensors that a layer reads and that are not its own parameters, and parameters of classes of their own."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from tiny import tiny_model

NOT_ITS_OWN = "that is not among its parameters"


# --- a layer that is frozen, as is what comes before it ---------------------------------------------------------------------


def frozen_model():
    """Only the second layer's MLP and what follows can be trained, so the first layer has nothing to train."""
    model = tiny_model("llama").requires_grad_(False)
    model.model.layers[1].mlp.requires_grad_(True)
    return model


def add_vector(model, vector: Tensor) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + vector)


def add_to_keys(model, vector: Tensor) -> None:
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda module, args, out: out + vector[:16])


def make_weight(model, vector: Tensor) -> None:
    """A hypernetwork: a weight that is made of something else."""
    projection = model.model.layers[0].mlp.down_proj
    weight = projection.weight.detach()
    projection.forward = lambda h: F.linear(h, weight + torch.outer(vector, weight.sum(dim=0)))


def add_buffer(model, vector: Tensor) -> None:
    mlp = model.model.layers[0].mlp
    mlp.register_buffer("shift", vector)
    mlp.register_forward_hook(lambda module, args, out: out + module.shift)


@pytest.mark.parametrize("chunk_size", [7, batches.LENGTH])
@pytest.mark.parametrize("attach", [add_vector, add_to_keys, make_weight, add_buffer])
def test_a_trainable_tensor_that_reaches_a_frozen_layer_is_refused(attach, chunk_size):
    model = streamgrad.enable(frozen_model(), chunk_size=chunk_size, keep="input")
    vector = torch.full((24,), 0.1, dtype=torch.float64)
    attach(model, vector)
    run_step(model, batches.plain(model))  # which is right as long as nobody wants its gradient
    model.zero_grad()
    vector.requires_grad_()
    with pytest.raises(RuntimeError, match=NOT_ITS_OWN):
        model(**batches.plain(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_frozen_layer_makes_no_graph():
    model = streamgrad.enable(frozen_model(), chunk_size=7)
    seen = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    model(**batches.plain(model)).loss.backward()
    seen.clear()  # the trial of the layer has asked for derivatives
    model(**batches.plain(model)).loss.backward()
    assert len(seen) == 4 and not any(seen)


def test_x_lora_is_refused(tmp_path):
    """Its scales are made for the whole sequence by a classifier outside of the layers, the only thing that is trained."""
    with_lora(tiny_model("llama"), targets=["q_proj"], task_type="CAUSAL_LM").save_pretrained(tmp_path)
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=24, adapters={"0": str(tmp_path)})
    model = tiny_model("llama")
    model.config.use_cache = False
    with pytest.raises(ValueError, match="is an X-LoRA adapter"):
        streamgrad.enable(peft.get_peft_model(model, config))


# --- parameters of classes of their own -------------------------------------------------------------------------------------


class Tenfold(Tensor):
    """A weight whose linear map is ten times as steep in backward, as quantised training has products of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return _TenTimes.apply(args[0], args[1])
        return super().__torch_function__(function, types, args, kwargs or {})


class TenfoldParameter(nn.Parameter):
    """The same as a parameter's class, whose other operations give plain tensors."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear:
                return _TenTimes.apply(args[0], args[1])
            return function(*args, **(kwargs or {}))


class _TenTimes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.mT

    @staticmethod
    def backward(ctx, dout):
        hidden, weight = ctx.saved_tensors
        return dout @ weight, 10.0 * dout.flatten(0, 1).mT @ hidden.flatten(0, 1)


def with_weights_of(kind, dtype=torch.float64):
    model = tiny_model("llama", dtype=dtype)
    for layer in model.model.layers:
        weight = layer.mlp.up_proj.weight.detach()
        layer.mlp.up_proj.weight = nn.Parameter(weight.as_subclass(kind)) if kind is Tenfold else kind(weight)
    return model


@pytest.mark.parametrize("kind", [Tenfold, TenfoldParameter])
@pytest.mark.parametrize("chunk_size", [7, batches.LENGTH])
def test_a_parameter_keeps_its_class_in_the_rerun(kind, chunk_size):
    model = with_weights_of(kind)
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        ordinary = run_step(tiny_model("llama"), batch)
        name = "model.layers.1.mlp.up_proj.weight"
        torch.testing.assert_close(expected.gradients[name], 10.0 * ordinary.gradients[name])
        streamgrad.enable(model, chunk_size=chunk_size)
        assert_same_step(run_step(model, batch), expected, 1e-10)


def test_gradients_of_such_a_parameter_are_summed_in_32_bits():
    model = with_weights_of(Tenfold, torch.bfloat16)
    batch = batches.plain(model)
    streamgrad.enable(model, chunk_size=1)
    one, name = run_step(model, batch), "model.layers.1.mlp.up_proj.weight"
    streamgrad.disable(model)
    truth, plain = run_step(with_weights_of(Tenfold).to(torch.float64), batch), run_step(model, batch)
    errors = [(step.gradients[name].double() - truth.gradients[name]).norm() for step in (one, plain)]
    assert errors[0] <= 1.5 * errors[1]
    assert one.gradients[name].dtype == torch.bfloat16


# --- torchao ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao", reason="needs torchao, as in make test-plugs")


def test_int8_mixed_precision_training_is_exact(torchao):
    from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig

    model = tiny_model("llama", dtype=torch.float32)
    torchao.quantize_(model.model.layers, Int8MixedPrecisionTrainingConfig())
    batch = batches.plain(model)
    expected = run_step(model, batch)
    streamgrad.enable(model, chunk_size=7)
    assert_same_step(run_step(model, batch), expected, 1e-4)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_is_exact_with_scales_of_rows_and_refused_with_one_of_a_tensor(torchao, recipe):
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = tiny_model("llama", dtype=torch.float32, hidden_size=32, intermediate_size=48)
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    convert_to_float8_training(model.model.layers, config=config)
    batch = batches.plain(model)
    expected = run_step(model, batch)
    if recipe == "tensorwise":
        with pytest.raises(ValueError, match="trains in float8 with one scale for a whole tensor.*'rowwise'"):
            streamgrad.enable(model, chunk_size=7)
    else:
        streamgrad.enable(model, chunk_size=7)
        assert_same_step(run_step(model, batch), expected, 1e-4)


def test_float8_with_one_scale_a_tensor_is_refused_by_name():
    """By what torchao's module says of itself, where torchao is not installed."""

    class Float8Linear(nn.Linear):
        pass

    model = tiny_model("llama")
    module = Float8Linear(24, 40, bias=False).double()
    cast = type("Cast", (), {})()
    cast.scaling_type, cast.scaling_granularity = (type("Member", (), {"name": name}) for name in ("DYNAMIC", "TENSORWISE"))
    module.config = type("Config", (), {})()
    module.config.cast_config_input = cast
    model.model.layers[1].mlp.up_proj = module
    with pytest.raises(ValueError, match=r"Layer\.mlp\.up_proj trains in float8"):
        streamgrad.enable(model)
