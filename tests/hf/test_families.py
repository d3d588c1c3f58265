"""Shapes by formulas are those of dry runs; a configuration that is not understood is nobody's."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest
import torch
from transformers import AutoConfig

from streamgrad.hf.configs import preset_config
from streamgrad.hf.dry_run import model_shape
from streamgrad.hf.families import SIZES, known_shape, value_of
from streamgrad.hf.presets import packaged, preset_names, presets

FAMILIES = list(packaged("families.json"))

# As they are published: by earlier versions of transformers, with what a preset leaves to its family.
PUBLISHED = {
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
        "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
        "use_cache": True, "vocab_size": 128256,
    },
}  # fmt: skip


def read(configuration: dict) -> object:
    """As transformers reads a config.json."""
    return AutoConfig.for_model(**configuration)


def drawn(family: str, seed: int) -> dict:
    """A configuration of random sizes: wide and narrow layers, one head and many, tied or not."""
    chance = random.Random(f"{family} {seed}")
    groups, heads = chance.choice([(1, 4), (3, 3), (2, 8), (8, 32)]), chance.choice([16, 64, 128])
    sizes = {"G": groups[0], "H": groups[1], "D": heads, "E": 8 * groups[1] * chance.randint(1, 60), "N": chance.randint(6, 9)}
    sizes |= {"F": chance.choice([8, 500, 20_000]), "V": chance.randint(10, 2000)}
    sizes |= {"X": chance.randint(4, 12), "A": chance.randint(2, 4), "M": 8 * chance.randint(1, 200)}
    keys = packaged("families.json")[family]["sizes"]
    said = {"model_type": family, **{key: sizes[SIZES[key]] for key in keys}}
    if chance.random() < 0.3 and family != "gemma3_text":
        del said["head_dim"]
    if family == "gemma3_text":
        said |= {"sliding_window": chance.randint(1, 4096), "sliding_window_pattern": chance.randint(2, 6)}
    if family == "mistral":
        said["sliding_window"] = chance.choice([None, 4096])
    if family in ("qwen2", "qwen3"):
        said |= {"use_sliding_window": False, "sliding_window": chance.choice([None, 131_072])}
    said |= packaged("families.json")[family]["stated"]
    return said | {"tie_word_embeddings": chance.random() < 0.5, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@pytest.mark.parametrize("rank", [pytest.param(None, marks=pytest.mark.more), 3, pytest.param(64, marks=pytest.mark.more)])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_moe"])
def test_a_shape_by_formulas_is_that_of_a_dry_run(family, rank):
    for seed in range(3):
        said = drawn(family, seed)
        known = known_shape(said, dtype="bfloat16", lora_rank=rank)
        assert known is not None, said
        assert asdict(known) == asdict(model_shape(read(said), lora_rank=rank)), f"{said}: run `python docs/generate_families.py`"


def test_with_experts_that_is_so_without_adapters():
    for seed in range(6):
        said = drawn("qwen3_moe", seed)
        known = known_shape(said, dtype="bfloat16", lora_rank=None)
        assert known is not None and asdict(known) == asdict(model_shape(read(said))), said
        assert known_shape(said, dtype="bfloat16", lora_rank=8) is None


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_known(name):
    row = dict(presets()[name])
    dtype, rank = ("bfloat16", None) if "moe" in row["family"] else ("float16", 32)
    known = known_shape({"model_type": row.pop("family"), **row}, dtype=dtype, lora_rank=rank)
    assert known == model_shape(preset_config(name), dtype=getattr(torch, dtype), lora_rank=rank)


@pytest.mark.parametrize("name", preset_names())
def test_what_transformers_writes_is_understood(name):
    """Every key of a configuration that `save_pretrained` writes."""
    written = preset_config(name).to_diff_dict()
    assert known_shape(written, dtype="bfloat16", lora_rank=None) == model_shape(preset_config(name))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_understood(name):
    """In the dtype that was asked for, whatever a file says of the weights."""
    said = PUBLISHED[name]
    known = known_shape(said, dtype="bfloat16", lora_rank=None)
    assert known == model_shape(read(said | {"torch_dtype": "float32"})) != known_shape(said, dtype="bfloat16", lora_rank=8)


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_id": [151643, 151645]}, {"use_mrope": False, "sliding_window": 131072}, {"unsloth_fixed": True},
        {"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_interleaved": False, "is_llama_config": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
        {"cache_implementation": "hybrid", "_attn_implementation_autoset": True}, {"layer_types": ["full_attention"] * 36},
    ],
    ids=str,
)  # fmt: skip
def test_what_others_write_into_them_is_understood(change):
    said = PUBLISHED["qwen3-8b"] | change
    assert known_shape(said, dtype="bfloat16", lora_rank=None) == model_shape(read(said))


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True}, {"hidden_act": "gelu"}, {"use_sliding_window": True}, {"quantization_config": {"bits": 4}},
        {"head_dim": None}, {"model_type": "qwen9"}, {"model_type": ["qwen3"]}, {"layer_types": ["sliding_attention"] * 36},
        {"layer_types": ["full_attention"] * 35}, {"sliding_window": "wide"}, {"sliding_window_pattern": 0},
        {"rope_scaling": {"rope_type": "longrope"}}, {"rope_scaling": "much"}, {"rope_scaling": {}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_scaling": {"rope_type": "llama3"}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"num_attention_heads": 31}, {"num_key_value_heads": 3}, {"head_dim": 63}, {"hidden_size": 0}, {"hidden_size": -4096},
        # transformers refuses what is of another type.
        {"num_hidden_layers": 36.0}, {"tie_word_embeddings": 0}, {"attention_dropout": False}, {"rope_theta": None},
        {"max_position_embeddings": "many"}, {"rms_norm_eps": None}, {"pad_token_id": 10**9}, {"dtype": "floaty"},
        {"max_window_layers": True}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}, {"hidden_size": True},
        {"rms_norm_eps": 1}, {"initializer_range": 1.5}, {"rope_theta": 10**400}, {"eos_token_id": [1, "2"]},
        {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, {"rope_interleaved": True},
        {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "default"}},
        # What no model has, and torch could not count.
        {"num_hidden_layers": 10**6}, {"intermediate_size": 10**400}, {"vocab_size": 10**18}, {"sliding_window": 10**30},
        {"num_attention_heads": 1, "num_key_value_heads": 1},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_understood_is_left_to_be_measured(change):
    assert known_shape(PUBLISHED["qwen3-8b"] | change, dtype="bfloat16", lora_rank=None) is None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3-30b-a3b", {"num_local_experts": 128}),  # two names of one thing: which one transformers takes is not known here
        ("qwen3-30b-a3b", {"num_experts_per_tok": 1}),
        ("qwen3-30b-a3b", {"num_experts_per_tok": 129}),
        ("qwen3-30b-a3b", {"moe_intermediate_size": 770}),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}),
        ("qwen3-30b-a3b", {"norm_topk_prob": False}),
        ("llama-3.1-8b", {"sliding_window": 4096}),
        ("llama-3.1-8b", {"moe_intermediate_size": 512}),
        ("gemma-3-1b", {"sliding_window": None}),
        ("gemma-3-1b", {"sliding_window_pattern": 1}),
        ("gemma-3-1b", {"_sliding_window_pattern": 5}),
        ("gemma-3-1b", {"layer_types": ["full_attention"] * 26}),
        ("gemma-3-1b", {"layer_types": 26}),
        ("gemma-3-1b", {"layer_types": [["full_attention"]] * 26}),
        ("gemma-3-1b", {"use_bidirectional_attention": True}),
        ("gemma-3-1b", {"rope_parameters": {"rope_type": "default"}}),
        ("gemma-3-1b", {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": None}}),
    ],
    ids=str,
)
def test_so_is_what_other_families_say(name, change):
    row = dict(presets()[name])
    said = PUBLISHED.get(name) or {"model_type": row.pop("family"), **row}
    assert known_shape(said, dtype="bfloat16", lora_rank=None) is not None
    assert known_shape(said | change, dtype="bfloat16", lora_rank=None) is None


@pytest.mark.parametrize("key", [key for key in SIZES if key in PUBLISHED["qwen3-8b"] and key != "head_dim"] + ["model_type"])
def test_a_size_that_is_not_said_is_not_guessed(key):
    said = {other: value for other, value in PUBLISHED["qwen3-8b"].items() if other != key}
    assert known_shape(said, dtype="bfloat16", lora_rank=None) is None


def test_other_dtypes_and_no_configuration_at_all():
    assert known_shape(PUBLISHED["qwen3-8b"], dtype="float32", lora_rank=None) is None
    assert known_shape(PUBLISHED["qwen3-30b-a3b"], dtype="float16", lora_rank=None) is None
    assert known_shape(None, dtype="bfloat16", lora_rank=None) is None
    assert known_shape([], dtype="bfloat16", lora_rank=None) is None


def test_the_value_of_sums():
    assert value_of([{"E*F": 3, "1": 8}, {"E": 1}], {"E": 2, "F": 5}) == 38
    assert value_of([{"E*F": 3, "1": 8}, {"E": 100}], {"E": 2, "F": 5}) == 200
