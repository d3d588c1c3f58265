"""Small models of every causal language model that transformers can build, and whether each is streamed or refused.

`STREAMED` and `REFUSED` record a family's fate, so that a transformers release which changes it fails in tests/hf.
"""

from __future__ import annotations

import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Cache, PreTrainedConfig, PreTrainedModel

from tiny import VOCABULARY, WINDOW, tokens

LENGTH, PADDED_LENGTH = 17, 11

# Applied where a family's configuration has the name. Families disagree about names, so most sizes are here several times.
SHAPE = {
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "embedding_size": 32,
    "hidden_size": 32, "n_embd": 32, "d_model": 32,
    "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "d_ff": 48, "dff": 48, "decoder_ffn_dim": 48,
    "dense_intermediate_size": 48,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "n_positions": 128, "sliding_window": WINDOW,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_num_heads": 4, "linear_head_dim": 8,
}  # fmt: skip

_MLA = {"num_key_value_heads": 4}  # latent attention: as many key as query heads
_ONE_DENSE = {"first_k_dense_replace": 1}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}

# By model type, of a family or of the text configuration inside a composite one: what makes the small sizes consistent, and what
# switches on the parts that real checkpoints have and default configurations do not.
OVERRIDES: dict[str, dict] = {
    "axk1": _MLA,
    "bailing_hybrid": _MLA,
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": _MLA | _ONE_DENSE,
    "deepseek_v3": _MLA | _ONE_DENSE,
    "dots1": _ONE_DENSE | {"n_shared_experts": 1},
    "falcon_h1": _MAMBA | {
        "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "attention_in_multiplier": 0.7, "ssm_out_multiplier": 1.3,
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
    "gemma4_unified_text": {"use_bidirectional_attention": None},
    "glm4_moe": _ONE_DENSE,
    "glm4_moe_lite": _MLA,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kimi_linear": _MLA,
    "laguna": _MIXED | {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": _MLA | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "moe_topk": 2, "zero_expert_num": 2},
    "mamba2": {"head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "mellum": _MIXED,
    "minicpm3": _MLA,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 4,
        "index_block_size": 4, "index_topk_blocks": 2, "index_n_heads": 2, "index_head_dim": 8,
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
        },
    },
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "moe_shared_expert_intermediate_size": 16,
    },
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "smollm3": {"no_rope_layers": [1, 0]},
    "youtu": _MLA,
    "zamba": {
        "num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_key_value_heads": 4,
        "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_dt_rank": 2, "mamba_d_state": 8,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"], "num_key_value_heads": 4, "attention_head_dim": 16,
        "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "adapter_rank": 4, "chunk_size": 8,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip

# Not built here, and why.
SKIPPED = {
    "gemma4_assistant": "a draft head: its forward needs the keys and values of the model that it drafts for",
    "gemma4_unified_assistant": "a draft head: its forward needs the keys and values of the model that it drafts for",
    "gemma3n": "its vision tower is a timm model; gemma3n_text is its text model",
    "musicgen": "AutoModelForCausalLM builds it only from the decoder's configuration, which is a type of its own",
    "musicgen_melody": "AutoModelForCausalLM builds it only from the decoder's configuration, which is a type of its own",
}

STREAMED = {
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "bailing_hybrid", "bamba", "bart", "biogpt", "bitnet", "blenderbot",
    "blenderbot-small", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2",
    "deepseek_v3", "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon_h1", "flex_olmo", "flint",
    "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm",
    "glm4", "glm4_moe", "glm4_moe_lite", "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite",
    "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm2_moe", "llama",
    "mamba2", "marian", "mbart", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral",
    "mixtral", "moshi", "moss_transcribe_diarize", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid",
    "olmoe", "opt", "pegasus", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "plbart", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma", "whisper", "youtu", "zamba2",
}  # fmt: skip

# Those whose forward computes a loss of full logits, without shifting labels.
OWN_LOSS = {"bart", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart", "whisper"}

# Layers of older transformers begin with a new state wherever they are given more than one token, and are refused.
LAYERS_TAKE_STATES_UP = hasattr(Cache, "is_recording_past")
STREAMED_SINCE_5_21 = {
    "bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
}  # fmt: skip

# What older releases of transformers build otherwise: the first release with which the family is streamed.
STREAMED_SINCE = {"ctrl": "5.13", "lfm2": "5.15", "lfm2_moe": "5.15", "moshi": "5.17", "nemotron": "5.13"}
OLDER = Version(transformers.__version__) < Version("5.17")  # whose configurations are not all built by the options above

REFUSED = {
    "axk2", "beam", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "bloom", "blt", "camembert", "codegen", "cpmant",
    "data2vec-text", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "electra", "ernie", "falcon", "falcon_mamba",
    "gemma3n_text", "git", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text", "hy_v4", "inkling_text", "jamba",
    "llama4", "llama4_text", "longcat_flash", "mamba", "megatron-bert", "minimax", "minimax_m3_vl_text", "mllama",
    "modernbert-decoder", "mpt", "mvp", "openai-gpt", "prophetnet", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "reformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "rwkv", "trocr", "xglm", "xlm", "xlm-roberta",
    "xlm-roberta-xl", "xlnet", "xlstm", "xmod", "zamba", "zaya",
}  # fmt: skip


def small_options(defaults: PreTrainedConfig, changes: dict, beside: dict | None = None) -> dict:
    """What to pass to `type(defaults)` for a tiny model that draws no random numbers; `beside` adds to `SHAPE`."""
    names = {*defaults.to_dict(), *type(defaults).attribute_map}
    options = {name: value for name, value in (SHAPE | (beside or {})).items() if name in names}
    for name, value in defaults.to_dict().items():
        if isinstance(value, float) and ("drop" in name or "jitter" in name):
            options[name] = 0.0
    kinds = list(dict.fromkeys(getattr(defaults, "layer_types", None) or ()))
    if len(kinds) == 2 and "layer_types" in defaults.to_dict():
        options["layer_types"] = kinds
    options |= OVERRIDES.get(defaults.model_type, {}) | changes
    for name in type(defaults).sub_configs:
        part = getattr(defaults, name, None)
        if isinstance(part, PreTrainedConfig):
            options[name] = small_options(part, options.get(name, {}), beside)
            if part.model_type:
                options[name]["model_type"] = part.model_type
    return options


def small_model(family: str, **changes) -> PreTrainedModel:
    config_class = CONFIG_MAPPING[family]
    config = config_class(**small_options(config_class(), changes))
    # The loop over experts: torch's grouped GEMM has no float64.
    config._experts_implementation = "eager"
    # With sdpa, transformers 5.17 leaves out Gemma 2's softcap.
    options = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
    model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.double()
    # Rotary angles stay in float32, equal on both sides: some families multiply them with float32 positions.
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:
            buffer.data = buffer.data.float()
    return model.train()


def batches() -> list[dict]:
    ids = tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[1, PADDED_LENGTH:] = 0
    padded = {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return [{"input_ids": ids, "labels": ids.clone()}, padded]
