"""Models as programs change them: attention of their own, hooks, adapters of experts, caches, wrappers. Exact, or refused."""

from __future__ import annotations

from functools import partial

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import flash_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import batches
import streamgrad
from gradients import assert_same_step, no_float32, relative_error, run_step
from lora import with_lora
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.unusable import NoLogits
from tiny import tiny_config, tiny_model

CHUNKED = {"chunk_size": 5, "head_chunk_size": 7}


def assert_exact(make, forward=None, **options) -> None:
    """A model that `make` makes, plain and streamed."""
    with no_float32():
        model = make()
        expected = run_step(model, batches.plain(model), forward=forward)
        model = streamgrad.enable(make(), **CHUNKED | options)
        assert_same_step(run_step(model, batches.plain(model), forward=forward), expected, 1e-9)


# --- Attention of a program's own ----------------------------------------------------------------------------------------------


def halved(module, query, key, value, mask, scaling=None, **kwargs):
    return sdpa_attention_forward(module, query, key, value, mask, scaling=0.5 * scaling, **kwargs)


def other_mask(*args, **kwargs):
    return sdpa_mask(*args, **kwargs)


def under_a_name_of_its_own(monkeypatch, model):
    monkeypatch.setitem(AttentionInterface._global_mapping, "halved", halved)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "halved", sdpa_mask)
    model.set_attn_implementation("halved")


def under_a_known_name(monkeypatch, model):
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", halved)


def mask_under_a_known_name(monkeypatch, model):
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._local_mapping, "sdpa", partial(other_mask))


def eager_in_the_models_file(monkeypatch, model):
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", halved)
    model.set_attn_implementation("eager")


def inside_flash_attention(monkeypatch, model):
    """As verl and ring-flash-attn do, where ranks share a sequence."""
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", halved)
    model.config._attn_implementation_internal = "flash_attention_2"


@pytest.mark.parametrize(
    "install",
    [under_a_name_of_its_own, under_a_known_name, mask_under_a_known_name, eager_in_the_models_file, inside_flash_attention],
)
@pytest.mark.parametrize("enabled_before", [True, False])
def test_attention_that_is_not_transformers_own_is_refused(install, enabled_before, monkeypatch):
    model = tiny_model("llama")
    if enabled_before:
        streamgrad.enable(model)
    install(monkeypatch, model)
    with pytest.raises(ValueError, match=r"has a function of .*test_strange_models in place of transformers' own"):
        streamgrad.enable(model)(**batches.plain(model))


@pytest.mark.parametrize("kind", ["Attention", "DecoderLayer"])
def test_a_layer_whose_attention_another_package_has_replaced_is_refused_at_once(kind, monkeypatch):
    """As Unsloth replaces it on a GPU: by a function of its own that goes around transformers' attention."""

    def fast_forward(self, hidden_states, attention_mask=None, past_key_values=None, **kwargs):
        return hidden_states, None

    model = tiny_model("llama")
    for name in {"Attention", kind}:  # a layer of its own around transformers' attention would do no harm
        monkeypatch.setattr(getattr(modeling_llama, f"Llama{name}"), "forward", fast_forward)
    with pytest.raises(ValueError, match=r"has a forward of .*test_strange_models, .* in a process that does not import"):
        streamgrad.enable(model)
    assert not streamgrad.is_enabled(model)


# --- The head ------------------------------------------------------------------------------------------------------------------


def on_the_head(model):
    return model.lm_head.register_full_backward_hook(lambda module, given, taken: (0.5 * given[0],))


def before_the_head(model):
    return model.lm_head.register_full_backward_pre_hook(lambda module, taken: (0.5 * taken[0],))


def on_everything(model):
    return nn.modules.module.register_module_full_backward_hook(lambda *_: None)


@pytest.mark.parametrize("register", [on_the_head, before_the_head, on_everything])
def test_backward_hooks_that_the_head_would_not_call_are_refused(register):
    model = streamgrad.enable(tiny_model("llama"))
    hook = register(model)
    try:
        with pytest.raises(ValueError, match="a backward hook on .* cannot be called"):
            model(**batches.plain(model))
    finally:
        hook.remove()


def test_a_head_that_reads_a_parameter_of_others_is_refused():
    model = tiny_model("llama")
    head, embeddings = model.lm_head, model.get_input_embeddings()
    head.forward = lambda x: F.linear(x, head.weight) + F.linear(x, embeddings.weight)
    streamgrad.enable(model)
    with pytest.raises(RuntimeError, match="reads a trainable tensor .* not among its parameters"):
        model(**batches.plain(model))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_head_of_a_model_whose_decoder_is_enabled():
    model = tiny_model("llama")
    streamgrad.enable(model.model, **CHUNKED)
    streamgrad.enable(model, **CHUNKED)
    assert InstalledForward.on(model) is not None and isinstance(model(**batches.plain(model)).logits, NoLogits)
    streamgrad.disable(model)
    assert InstalledForward.on(model) is None and InstalledForward.on(model.model) is None


# --- Adapters ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen3_moe", {"target_modules": "all-linear"}),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_adapters_of_experts(family, targets):
    def make():
        adapted = peft.get_peft_model(tiny_model(family), peft.LoraConfig(r=3, **targets), autocast_adapter_dtype=False)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = 0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
        assert any(isinstance(module, ParamWrapper) for module in adapted.modules())
        return adapted

    def two_passes(model, batch):
        return model(**batch).loss + 2 * model(**batch).loss

    assert_exact(make)
    assert_exact(make, two_passes)


def two_new_adapters():
    """Whose outputs are zero, as those of all new ones: switching them changes no value."""
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "up_proj"], lora_dropout=0.5)
    adapted = peft.get_peft_model(tiny_model("llama"), config).double()
    adapted.add_adapter("other", config)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return streamgrad.enable(adapted, **CHUNKED)


def other_adapter(model):
    model.set_adapter("other")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def scaled(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 1.0005


@pytest.mark.parametrize("change", [other_adapter, scaled, lambda model: model.disable_adapter_layers()])
def test_what_changes_no_value_yet_is_seen(change):
    model = two_new_adapters()
    loss = model(**batches.plain(model)).loss
    change(model)
    with pytest.raises(RuntimeError, match="between forward and backward"):
        loss.backward()


def test_adapters_that_were_off_in_between():
    """As for the reference's pass in DPO."""

    def forward(model, batch):
        loss = model(**batch).loss
        with torch.no_grad(), model.disable_adapter():
            model(**batch)
        return loss

    assert_exact(lambda: with_lora(tiny_model("llama")), forward)


def test_adapters_by_row_are_refused_in_backward():
    """PEFT chooses them by hooks that are there in forward alone."""
    model = two_new_adapters().eval()
    loss = model(**batches.plain(model), adapter_names=["default", "other"]).loss
    with pytest.raises(RuntimeError, match="a hook"):
        loss.backward()


@pytest.mark.parametrize("place", ["model.layers.0", "model.layers.0.mlp"])
def test_hooks_that_only_look_may_be_gone_in_backward(place):
    def forward(model, batch):
        hook = model.get_submodule(place).register_forward_hook(lambda *_: None)
        loss = model(**batch).loss
        hook.remove()
        return loss

    assert_exact(lambda: tiny_model("llama"), forward)


def test_frozen_weights_of_another_model_are_seen():
    model = with_lora(tiny_model("llama"))
    for module in model.modules():  # so that versions are alike
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    streamgrad.enable(model, **CHUNKED)
    weights = {name: p if p.requires_grad else (1.0001 * p).detach() for name, p in model.named_parameters()}
    loss = functional_call(model, weights, (), batches.plain(model)).loss
    with pytest.raises(RuntimeError, match="replaced between forward and backward"):
        loss.backward()


# --- Layers --------------------------------------------------------------------------------------------------------------------


def test_a_buffer_that_forward_replaces_is_refused():
    model = tiny_model("llama")

    def count(module, args, out):
        module.calls = module.calls + 1
        return out * (1 + 1e-4 * module.calls)

    for layer in model.model.layers:
        layer.mlp.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        layer.mlp.register_forward_hook(count)
    streamgrad.enable(model, **CHUNKED)
    with pytest.raises(ValueError, match="change a buffer in forward"):
        model(**batches.plain(model))


def test_a_weight_that_forward_changes_is_refused():
    """It would change once a chunk, and again in backward."""
    model = tiny_model("llama")

    def decay(module, args):
        with torch.no_grad():
            module.weight.mul_(0.9999)

    for layer in model.model.layers:
        layer.mlp.up_proj.register_forward_pre_hook(decay)
    streamgrad.enable(model, **CHUNKED)
    with pytest.raises(ValueError, match="parameter of LlamaDecoderLayer 0 is modified in place"):
        model(**batches.plain(model))


def with_global_hook(model, batch):
    kind = type(model.model.layers[0].mlp.act_fn)
    hook = nn.modules.module.register_module_forward_hook(lambda m, args, out: 1.5 * out if isinstance(m, kind) else None)
    try:
        loss = model(**batch).loss
        loss.backward()
    finally:
        hook.remove()
    return loss.detach().requires_grad_()


def with_another_activation(model, batch):
    kind = type(model.model.layers[0].mlp.act_fn)
    stock = kind.forward
    kind.forward = lambda self, x: 1.5 * stock(self, x)
    try:
        loss = model(**batch).loss
        loss.backward()
    finally:
        kind.forward = stock
    return loss.detach().requires_grad_()


@pytest.mark.parametrize("forward", [with_global_hook, with_another_activation])
def test_an_activation_that_is_watched_or_replaced_is_not_fused(forward):
    assert_exact(lambda: tiny_model("llama"), forward, fused_kernels="on")


@pytest.mark.parametrize("fused_kernels", ["on", "off"])
def test_outputs_of_products_and_norms_may_be_changed_in_place(fused_kernels):
    """As clip_qkv of OLMo does."""

    def make():
        model = tiny_model("llama")
        for layer in model.model.layers:
            for module in (layer.self_attn.q_proj, layer.input_layernorm, layer.mlp):
                module.register_forward_hook(lambda module, args, out: out.clamp_(-0.3, 0.3))
        return model

    assert tiny_config("llama").attention_bias
    assert_exact(make, fused_kernels=fused_kernels)


class Scaled(nn.Module):
    def forward(self, weight):
        return 1.5 * weight


def test_a_cache_of_parametrized_weights_is_refused():
    def make():
        model = tiny_model("llama")
        for layer in model.model.layers:
            parametrize.register_parametrization(layer.mlp.up_proj, "weight", Scaled())
        return model

    assert_exact(make)
    model = streamgrad.enable(make(), **CHUNKED)
    with parametrize.cached(), pytest.raises(ValueError, match=r"leave cached\(\) out"):
        model(**batches.plain(model))


@pytest.mark.parametrize("name", ["self_attn", "mlp", None])
def test_checkpointing_in_or_around_layers_is_refused(name):
    model = tiny_model("qwen3")
    for index, layer in enumerate(model.model.layers):
        if name is None:
            model.model.layers[index] = checkpoint_wrapper(layer)
        else:
            setattr(layer, name, checkpoint_wrapper(getattr(layer, name)))
    with pytest.raises(ValueError, match="CheckpointWrapper is around its layers or inside them"):
        streamgrad.enable(model)


@pytest.mark.parametrize("place", ["layer", "head"])
def test_a_module_that_detaches_its_input_is_refused(place):
    model = tiny_model("llama")
    module = model.lm_head if place == "head" else model.model.layers[1]
    stock = module.forward

    def forward(hidden_states, past_key_values=None, **kwargs):
        more = {} if place == "head" else {"past_key_values": past_key_values}
        return stock(hidden_states.detach(), **more, **kwargs)

    module.forward = forward
    streamgrad.enable(model, **CHUNKED)
    with pytest.raises(RuntimeError, match="gives its input no gradient"):
        model(**batches.plain(model)).loss.backward()


def test_a_weight_inside_and_outside_of_autocast():
    def make():
        model = tiny_model("llama", dtype=torch.float32)
        for layer in model.model.layers:
            stock = layer.mlp.forward

            def forward(x, stock=stock):
                first = stock(x)
                with torch.autocast("cpu", enabled=False):
                    return first.float() + stock(x.float())

            layer.mlp.forward = forward
        return model

    def step(model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batches.plain(model)).loss
        loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert relative_error(step(streamgrad.enable(make(), **CHUNKED)), step(make())) < 0.02
