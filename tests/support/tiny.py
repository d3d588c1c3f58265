"""Tiny random models of every supported family, shaped so that heads, groups, windows and widths are all different numbers."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 61
WINDOW = 6

_SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 2048,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip

# What each family has beyond the common shape: windows, softcaps, multipliers, mixed layers.
FAMILIES: dict[str, dict] = {
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"attention_bias": True},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {
        "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {
        "sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": None},
    "olmo2": {},
    "granite": {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_neox": {"hidden_size": 32, "num_key_value_heads": None, "head_dim": None, "hidden_dropout": 0.0},
    "cohere": {"logit_scale": 0.5},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "gpt_oss": {
        "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Latent attention: keys and values of two head sizes are made of what is cached. One dense layer, one of experts.
    "deepseek_v3": {
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": None,
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip
# Those that stock attention by SDPA supports.
BY_SDPA = [family for family in FAMILIES if family not in ("gemma2", "gpt_oss")]


def tiny_config(family: str, **changes):
    options = {key: value for key, value in (_SHAPE | FAMILIES[family] | changes).items() if value is not None}
    config = AutoConfig.for_model(family, **options)
    # The loop over experts: torch's grouped GEMM has no float64.
    config._experts_implementation = "eager"
    return config


def tiny_model(
    family: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, kind: type = AutoModelForCausalLM, **changes
) -> PreTrainedModel:
    """A randomly initialised model in training mode, with weights large enough that every part matters for the loss."""
    torch.manual_seed(seed)
    # With sdpa, transformers 5.17 leaves out Gemma 2's softcap.
    options = {"attn_implementation": "eager"} if family == "gemma2" else {}
    model = kind.from_config(tiny_config(family, **changes), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    model = model.to(dtype)
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:  # rotary angles are float32 in every model
            buffer.data = torch.empty_like(buffer, dtype=torch.float32).copy_(buffer)
    return model.train()


def tokens(batch: int, length: int, *, seed: int = 1) -> torch.Tensor:
    """Token ids that are neither padding nor special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)
