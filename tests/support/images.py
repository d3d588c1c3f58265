"""Small models of text and images, and batches with images made on the spot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from gradients import no_float32
from tiny import VOCABULARY, WINDOW

IMAGE, LENGTH, PADDING = VOCABULARY - 1, 29, 3
SIDE, PATCH = 8, 2  # pixels of an image and of a patch

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0,
}  # fmt: skip
_MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MULTIMODAL_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
_TOWER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE,
    "patch_size": PATCH,
}  # fmt: skip
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
_QWEN = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": PATCH, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_GEMMA_4 = {"sliding_window": WINDOW, "global_head_dim": 8, "num_global_key_value_heads": 2}
_GEMMA_4_TOWER = _TOWER | {"num_key_value_heads": 2, "head_dim": 8, "pooling_kernel_size": 2, "position_embedding_size": 16}
_QWEN_3_5 = {"vision_config": _QWEN, "vision_start_token_id": 58}

# By model type: what the configuration has beside `TEXT` and the image token.
FAMILIES: dict[str, dict] = {
    "qwen2_vl": {
        "text_config": _MULTIMODAL_ROPE, "vision_start_token_id": 58,
        "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2, "num_heads": 2, "patch_size": PATCH},
    },
    "qwen2_5_vl": {
        "text_config": _MULTIMODAL_ROPE, "vision_start_token_id": 58,
        "vision_config": _QWEN | {"window_size": 8, "fullatt_block_indexes": [1]},
    },
    # DeepStack: features of the vision tower are added to the hidden states between the decoder's layers.
    "qwen3_vl": {
        "text_config": _MULTIMODAL_ROPE, "vision_start_token_id": 58,
        "vision_config": _QWEN | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": _MULTIMODAL_ROPE | _EXPERTS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        "vision_start_token_id": 58, "vision_config": _QWEN | {"deepstack_visual_indexes": [0]},
    },
    "qwen3_5": {**_QWEN_3_5, "text_config": _MULTIMODAL_ROPE | _LINEAR},
    "qwen3_5_moe": {
        **_QWEN_3_5, "text_config": _MULTIMODAL_ROPE | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 16},
    },
    "llava": {
        "text_config": {"model_type": "llama"}, "vision_config": _TOWER | {"model_type": "clip_vision_model"},
        "vision_feature_layer": -1,
    },
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": _TOWER | {"image_size": [8, 8], "patch_size": [2, 2]}},
    "mistral3": {
        "text_config": {"model_type": "mistral", "sliding_window": WINDOW},
        "vision_config": _TOWER | {"model_type": "pixtral", "head_dim": 8},
    },
    # Images whose tokens see each other both ways, and a prompt that does.
    "gemma3": {
        "text_config": _MIXED | {"query_pre_attn_scalar": 8}, "vision_config": _SIGLIP, "mm_tokens_per_image": 4,
        "boi_token_index": 57, "eoi_token_index": 58,
    },
    "paligemma": {"text_config": {"model_type": "gemma"}, "vision_config": _SIGLIP, "projection_dim": 32},
    "paligemma2": {
        "text_config": _MIXED | {"model_type": "gemma2", "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
        "vision_config": _SIGLIP, "projection_dim": 32,
    },
    # A vector per token and layer, and two layers that attend to the keys of earlier ones.
    "gemma4": {
        "text_config": _GEMMA_4 | {
            "num_hidden_layers": 5, "layer_types": ["sliding_attention", "full_attention"] + ["sliding_attention"] * 2 +
            ["full_attention"], "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
        },
        "vision_config": _GEMMA_4_TOWER,
    },
    # As its larger models: experts beside the dense part, and images whose tokens see each other both ways.
    "gemma4_moe": {
        "text_config": _GEMMA_4 | _MIXED | {
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
            "moe_intermediate_size": 16, "attention_k_eq_v": True, "use_bidirectional_attention": "vision",
        },
        "vision_config": _GEMMA_4_TOWER,
    },
    "gemma4_unified": {
        "text_config": _GEMMA_4 | _MIXED,
        "vision_config": {
            "patch_size": PATCH, "pooling_kernel_size": 2, "model_patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 8,
            "output_proj_dims": 16, "num_soft_tokens": 4,
        },
    },
}  # fmt: skip
# Names of their own for variants of a family.
_VARIANTS = {"paligemma2": "paligemma", "gemma4_moe": "gemma4"}
MODEL_TYPES = sorted(FAMILIES.keys() - _VARIANTS.keys())


def image_model(family: str, *, seed: int = 0, **changes) -> PreTrainedModel:
    """A randomly initialised model in float64 and training mode; `changes` go into the configuration of its text."""
    torch.manual_seed(seed)
    parts = dict(FAMILIES[family])
    parts["text_config"] = TEXT | parts["text_config"] | changes
    kind = _VARIANTS.get(family, family)
    names = {"image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": VOCABULARY + 1}
    known = {**(config := AutoConfig.for_model(kind)).to_dict(), **config.attribute_map}
    config = AutoConfig.for_model(kind, **parts, **{name: value for name, value in names.items() if name in known})
    config._experts_implementation = "eager"  # the loop over experts: torch's grouped GEMM has no float64
    # With sdpa, transformers 5.17 leaves out Gemma 2's softcap.
    options = {"attn_implementation": "eager"} if family == "paligemma2" else {}
    return with_loud_weights(AutoModelForImageTextToText.from_config(config, **options))


def with_loud_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model in float64 and training mode, with weights large enough that every part matters for the loss."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    model.double()
    for name, buffer in model.named_buffers():
        if "inv_freq" in name:  # rotary angles are float32 in every model
            buffer.data = buffer.data.float()
    return model.train()


@contextmanager
def float64_throughout() -> Iterator[None]:
    """`no_float32`, also where Gemma 4's vision tower averages patches by weights that it makes of `one_hot`."""
    one_hot = nn.functional.one_hot
    with no_float32(), mock.patch.object(nn.functional, "one_hot", lambda *args, **kwargs: one_hot(*args, **kwargs).double()):
        yield


def _patches(images: int) -> dict[str, Tensor]:
    grid = SIDE // PATCH
    return {
        "pixel_values": torch.randn(images * grid**2, 3 * 2 * PATCH**2, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, grid, grid]] * images),
    }


def _pixels(images: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(images, 3, SIDE, SIDE, dtype=torch.float64)}


def _placed_patches(images: int, side: int) -> dict[str, Tensor]:
    """Patches of `side` pixels with their places, as Gemma 4 takes them."""
    grid = SIDE // side
    places = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).flip(1)
    return {
        "pixel_values": torch.rand(images, grid**2, 3 * side**2, dtype=torch.float64),
        "image_position_ids": places.expand(images, -1, -1).clone(),
    }


def _sized_pixels(images: int) -> dict[str, Tensor]:
    return _pixels(images) | {"image_sizes": torch.tensor([[SIDE, SIDE]] * images)}


_IMAGES: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "mistral3": _sized_pixels,
    "gemma4": partial(_placed_patches, side=PATCH),
    "gemma4_moe": partial(_placed_patches, side=PATCH),
    "gemma4_unified": partial(_placed_patches, side=2 * PATCH),
}


def image_batch(family: str, *, padded: bool = False, length: int = LENGTH) -> dict[str, Tensor]:
    """Two rows of text with images in other places of each (PaliGemma: one, first); with `padded`, the second is shorter."""
    torch.manual_seed(1)
    ids = torch.randint(3, 57, (2, length))
    prompted = family.startswith("paligemma")
    places = [(0, 0), (1, 0)] if prompted else [(0, 2), (0, 13), (1, 8), (1, 17)]
    size = (SIDE // PATCH) ** 2 if prompted or family == "llava" else (SIDE // PATCH // 2) ** 2
    if family == "llava":
        places = [(0, 5), (1, 2)]
    for row, start in places:
        ids[row, start : start + size] = IMAGE
    is_image = ids == IMAGE
    make = _IMAGES.get(family, _patches if family.startswith("qwen") else _pixels)
    batch = {"input_ids": ids, "labels": ids.masked_fill(is_image, -100)} | make(len(places))
    if family.startswith(("qwen", "gemma4")):
        batch["mm_token_type_ids"] = is_image.int()
    if family == "gemma3":
        batch["token_type_ids"] = is_image.long()
    if prompted:
        batch["token_type_ids"] = (torch.arange(length) >= torch.tensor([[18], [20]])).long()
        batch["labels"] = ids.masked_fill(batch["token_type_ids"] == 0, -100)
    if padded:
        mask = torch.ones_like(ids)
        mask[1, -PADDING:] = 0
        batch |= {"attention_mask": mask, "input_ids": ids * mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
        if prompted:
            batch["token_type_ids"] *= mask
    return batch
