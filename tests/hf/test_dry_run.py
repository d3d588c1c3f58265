"""The dry run counts what the probe counts while training, and what can be written out by hand."""

from __future__ import annotations

import pytest
import torch

import streamgrad
from families import LAYERS_TAKE_STATES_UP, small_model
from gradients import more
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config, with_layers
from streamgrad.hf.estimates.dry_run import meta_model, model_shape, profile_layer
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.costs import ModelShape
from streamgrad.memory.live_bytes import LiveBytes
from tiny import FAMILIES, tiny_config, tiny_model, tokens

needs_states = pytest.mark.skipif(not LAYERS_TAKE_STATES_UP, reason="layers of transformers before 5.21 are refused")


def shape_of(preset: str, *, lora_rank: int | None = None) -> ModelShape:
    """Return the shape of a preset's first layer: all layers are alike."""
    return model_shape(with_layers(preset_config(preset), 1), lora_rank=lora_rank)


def probed_costs(model, ids, *, fused_parts: bool):
    """Return what the planner measures on the first layer of a real model."""
    options = {"keep": "attention", "memory_budget": "1TB", "fused_kernels": "on" if fused_parts else "off"}
    streamgrad.enable(model, StreamConfig(**options))
    model(input_ids=ids, labels=ids)
    costs, *_ = InstalledForward.on(model.get_decoder()).stream.planner._costs.values()  # of the first kind of layer
    streamgrad.disable(model)
    return costs


# In the tiny models experts are run by a loop, over as many tokens as come. Softcap's only kernel lays its output out otherwise,
# and rotary embedding's reference leaves Gemma 3's layout where the GPU's kernel puts the heads of a token together.
OTHERWISE_ON_CPU = {"gpt_oss", "qwen3_moe", "gemma2", "gemma3_text"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - OTHERWISE_ON_CPU))
@pytest.mark.parametrize("fused_parts", [True, False])
def test_a_layer_without_data_costs_what_the_probe_measures(family, fused_parts):
    config = tiny_config(family)
    costs = profile_layer(meta_model(config, dtype=torch.float32), fused_parts=fused_parts).costs
    probed = probed_costs(tiny_model(family, dtype=torch.float32), tokens(1, 256), fused_parts=fused_parts)
    # On a CPU the fused parts are computed by their references, and windows by masks: both make more tensors on the way.
    otherwise = {"widest", "forward", "at_attention", "weights"} if fused_parts or family == "mistral" else set()
    for name, count in vars(costs).items():
        assert name in otherwise or count == pytest.approx(getattr(probed, name), rel=2e-3), name


HYBRIDS = ["falcon_h1", *(pytest.param(each, marks=more) for each in ("zamba2", "lfm2", "mamba2", "bamba"))]


@needs_states
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_of_every_kind_cost_what_the_probe_measures(family):
    """All bytes but those of rotary angles, which the first call has made by then."""
    model, ids = small_model(family).float(), tokens(1, 512)
    costs = profile_layer(meta_model(model.config, dtype=torch.float32), fused_parts=False, every_kind=True).costs
    streamgrad.enable(model, keep="input", memory_budget="1TB", fused_kernels="off")
    model(input_ids=ids, labels=ids)
    probed = [vars(each) for each in InstalledForward.on(model.get_decoder()).stream.planner._costs.values()]
    for name, count in vars(costs).items():
        # Bytes of a chunk that runs forward beside others; none where the layers of one kind run theirs one by one.
        of_all = min if name == "forward" else max
        assert count == pytest.approx(of_all(each[name] for each in probed), rel=0.02), name


@needs_states
def test_a_hybrid_is_counted_by_its_kinds():
    """Four layers of one kind and two of the other: bytes of the larger, FLOPs of all, attention in two."""
    kinds = (["conv"] * 2 + ["full_attention"]) * 2
    config = small_model("lfm2", num_hidden_layers=6, layer_types=kinds).config
    shape = model_shape(config, dtype=torch.float32)
    assert (shape.layers, shape.full_attention_layers, shape.window) == (6, 2, 1)
    alone = {}
    for kind in set(kinds):
        part = small_model("lfm2", num_hidden_layers=1, layer_types=[kind]).config
        alone[kind] = profile_layer(meta_model(part, dtype=torch.float32), fused_parts=False, every_kind=True)
    conv, attention = alone["conv"], alone["full_attention"]
    assert shape.eager.forward_flops == pytest.approx((2 * conv.forward_flops + attention.forward_flops) / 3)
    assert shape.eager.costs.widest == max(conv.costs.widest, attention.costs.widest)


@needs_states
@pytest.mark.parametrize("family", HYBRIDS)
def test_the_estimate_of_a_hybrid_is_near_what_a_step_holds(family):
    model, ids = small_model(family).float(), tokens(1, 1024)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    report = streamgrad.estimate(model, 1024, dtype="float32", optimizer="none", keep="input", offload="none")
    streamgrad.enable(model, keep="input")
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids).loss.backward()
    of_cublas = 2 * 32 * 2**20  # which are not there on a CPU
    assert report.streamed.peak_bytes - of_cublas == pytest.approx(weights + live.peak_bytes, rel=0.05)


def test_bytes_and_products_of_a_known_shape():
    """Qwen3-8B written out: width 4096, 32 query and 8 key heads of 128, MLP of 12288, in bf16."""
    shape = shape_of("qwen3-8b")
    profile, costs = shape.profile, shape.profile.costs
    assert (costs.input, costs.keys_and_values, costs.attention) == (8192, 4096, 2 * 4096 + 4 * 32)
    norms = 4 * (2 + 32 + 8)  # a factor for each row
    # Normed input, queries and keys before norm and after rotary, angles, values, attention's output, residual, normed, MLP.
    saved = 8192 + 2 * (8192 + 2048) + 2 * 256 + 2048 + costs.attention + 2 * 8192 + 3 * 2 * 12288 + norms
    assert costs.graph == 8192 + saved
    matrices = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
    assert profile.forward_flops == 2 * matrices and profile.backward_flops == 4 * matrices
    assert profile.projection_flops == 2 * 4096 * (4096 + 2 * 1024)
    assert costs.graph < costs.widest < 2 * costs.graph and costs.at_attention < costs.widest
    assert 36 * shape.layer_parameters + shape.outside_parameters == pytest.approx(8.19e9, rel=1e-3)


def test_experts_count_as_far_as_they_work():
    """A token visits 8 of 128 experts: the products of those count, and the gradients of all."""
    shape = shape_of("qwen3-30b-a3b")
    expert, router = 3 * 2048 * 768, 2048 * 128
    attention = 2048 * 128 * (32 + 2 * 4 + 32)
    assert shape.profile.forward_flops == 2 * (8 * expert + router + attention)
    assert shape.layer_trainable == pytest.approx(128 * expert + router + attention, rel=1e-4)


def test_adapters_are_what_peft_attaches():
    shape = shape_of("qwen3-4b", lora_rank=32)
    widths = [(2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560), (2560, 9728), (2560, 9728), (9728, 2560)]
    assert shape.layer_trainable == sum(32 * (inputs + outputs) for inputs, outputs in widths)
    assert shape.outside_trainable == shape.head_trainable == 0
    assert shape.profile.costs.gradients == 2 * shape.layer_trainable


def test_a_dry_run_leaves_the_model_as_it_was():
    model = meta_model(tiny_config("llama"), dtype=torch.float32)
    before = dict(model.named_parameters())
    profile_layer(model, fused_parts=True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert not streamgrad.is_enabled(model) and "forward" not in vars(model.get_decoder())
