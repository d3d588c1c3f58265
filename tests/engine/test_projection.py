"""On the host, the product that reads attention's output waits with it, and is not run again; gradients are as without.

On a CPU `offload="host"` copies nothing, and keeps the same. A layer's second step notes all products that its re-run makes, and
its third is the first to leave some out (`engine.unread`), so later steps are looked at.
"""

from __future__ import annotations

import pytest
import torch

import batches
import streamgrad
from gradients import assert_same_step, no_float32, run_step
from lora import with_lora
from products import later_step
from tiny import FAMILIES, tiny_model, tokens

OPTIONS = {"keep": "attention", "head_chunk_size": 5}


def on_device_and_host(made, **options):
    """The products of a later step's forward and backward, with attention kept on the device and on the host."""
    return [later_step(streamgrad.enable(made(), offload=place, **OPTIONS, **options)) for place in ("none", "host")]


@pytest.mark.parametrize("chunk_size", [7, 21])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
def test_it_is_not_run_again(adapted, chunk_size):
    def made():
        model = tiny_model("llama", num_key_value_heads=2, num_attention_heads=4, head_dim=10)
        return with_lora(model) if adapted else model

    device, host = on_device_and_host(made, chunk_size=chunk_size)
    assert host[0] == device[0]  # forward
    assert device[1] - host[1] == {(40, 24): 2 * 21 // chunk_size}, "once a chunk, in two layers"
    assert not host[1] - device[1]


@pytest.mark.parametrize("chunk_size", [7, 21])
@pytest.mark.parametrize("adapted", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_later_steps(family, adapted, chunk_size):
    def model():
        return with_lora(tiny_model(family)) if adapted else tiny_model(family)

    batch = batches.plain(None)
    streamed = streamgrad.enable(model(), chunk_size=chunk_size, offload="host", **OPTIONS)
    with no_float32():
        expected = run_step(model(), batch)
        for _ in range(4):
            assert_same_step(run_step(streamed, batch), expected, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_step_is_that_of_attention_on_the_device(dtype):
    steps = []
    for place in ("none", "host"):
        model = streamgrad.enable(tiny_model("llama", dtype=torch.float32), chunk_size=7, offload=place, **OPTIONS)
        with torch.autocast("cpu", dtype=dtype):
            steps.append([run_step(model, batches.plain(None)) for _ in range(4)])
    for on_device, on_host in zip(*steps, strict=True):
        assert_same_step(on_host, on_device, 2**-8)


def halve(module, args, out):
    out.mul_(0.5)


def replaced(module, args):
    return (args[0] * 0.5,)


@pytest.mark.parametrize("register", [lambda o: o.register_forward_hook(halve), lambda o: o.register_forward_pre_hook(replaced)])
def test_a_product_that_is_changed_or_reads_something_else_is_run_again(register):
    def made():
        model = tiny_model("llama")
        for layer in model.model.layers:
            register(layer.self_attn.o_proj)
        return model

    device, host = on_device_and_host(made, chunk_size=7)
    assert host == device
    batch, streamed = batches.plain(None), streamgrad.enable(made(), chunk_size=7, offload="host", **OPTIONS)
    with no_float32():
        expected = run_step(made(), batch)
        for _ in range(4):
            assert_same_step(run_step(streamed, batch), expected, 1e-10)


def test_an_adapter_that_is_switched_between_steps():
    """The map that reads attention is another one then, or more than one."""
    batch, model, stock = batches.plain(None), with_lora(tiny_model("llama")), with_lora(tiny_model("llama"))
    streamgrad.enable(model, chunk_size=7, offload="host", **OPTIONS)
    with no_float32():
        for active in (True, True, True, False, True, True):
            for each in (model, stock):
                (each.enable_adapter_layers if active else each.disable_adapter_layers)()
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_("lora_" in name or not active)
            assert_same_step(run_step(model, batch), run_step(stock, batch), 1e-10)


class Mapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.func.vmap(self.inner)(x)


def test_a_map_inside_a_transform_multiplies():
    def made():
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.self_attn.o_proj = Mapped(layer.self_attn.o_proj)
        return model

    ids, streamed = tokens(1, 21), streamgrad.enable(made(), chunk_size=7, offload="host", **OPTIONS)
    with no_float32():
        expected = run_step(made(), {"input_ids": ids, "labels": ids})
        for _ in range(4):
            assert_same_step(run_step(streamed, {"input_ids": ids, "labels": ids}), expected, 1e-10)


@pytest.mark.parametrize("chunk_size", [7, 21])
def test_backward_twice(chunk_size):
    ids, streamed = tokens(2, 21), streamgrad.enable(tiny_model("llama"), chunk_size=chunk_size, offload="host", **OPTIONS)
    with no_float32():
        for _ in range(4):
            loss = streamed(input_ids=ids, labels=ids).loss
            loss.backward(retain_graph=True)
            first = [parameter.grad.clone() for parameter in streamed.parameters()]
            loss.backward()
            for parameter, once in zip(streamed.parameters(), first, strict=True):
                torch.testing.assert_close(parameter.grad, 2 * once, rtol=1e-12, atol=1e-12)
            streamed.zero_grad()
