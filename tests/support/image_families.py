"""Small models of every class for text and images that transformers can build, and what becomes of each.

`WITH_IMAGES`, `TEXT_ALONE` and `REFUSED` record a family's fate, so that a transformers release which changes it fails in
tests/hf. Families in images.py are tried with its batches. Any other is shown images in the usual formats; where it takes none of
them, it is tried with text alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

import images
from families import batches, small_options
from gradients import Step, run_step
from images import IMAGE, PATCH, SIDE, with_loud_weights

# What makes vision towers small, in the names of all families, beside the sizes in families.py.
VISION = {
    "image_size": SIDE, "patch_size": PATCH, "depth": 2, "embed_dim": 32, "out_hidden_size": 32, "num_position_embeddings": 16,
    "image_token_id": IMAGE, "image_token_index": IMAGE, "video_token_id": IMAGE - 1, "projection_dim": 32,
    "vision_feature_layer": -1, "spatial_merge_size": 2, "image_seq_length": 4, "mm_tokens_per_image": 4, "text_hidden_size": 32,
}  # fmt: skip

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_THREE_AXES = {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [2, 1, 1]}}}
# By family: what makes the small sizes consistent.
CHANGES: dict[str, dict] = {
    "glm46v": _THREE_AXES,
    "glm4v": _THREE_AXES,
    "glm4v_moe": {"text_config": {"rope_parameters": _ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}},
    "glm_ocr": _THREE_AXES,
    "glmga": _THREE_AXES,
    "paddleocr_vl": _THREE_AXES,
    "qwen2_5_omni_thinker": _THREE_AXES,
}

WITH_IMAGES = {
    *images.MODEL_TYPES, "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_omni", "exaone4_5", "glm_ocr", "got_ocr2",
    "hyperclovax_vision_v2", "idefics2", "idefics3", "lighton_ocr", "ovis2", "pp_chart2table", "qianfan_ocr",
    "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "shieldgemma2", "smolvlm", "step3p7", "video_llava",
}  # fmt: skip
TEXT_ALONE = {
    "aria", "deepseek_vl", "deepseek_vl_hybrid", "fuyu", "glm46v", "glm4v", "glm4v_moe", "glmga", "kimi_k25", "lfm2_vl",
    "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "mllama",
    "paddleocr_vl", "video_llama_3", "vipllava",
}  # fmt: skip
REFUSED = {
    "blip-2", "kosmos-2.5", "llama4", "minimax_m3_vl", "qwen4_exp", "t5gemma2", "unlimited_ocr",
}  # fmt: skip


def small_image_model(family: str) -> PreTrainedModel:
    config_class = CONFIG_MAPPING[family]
    config = config_class(**small_options(config_class(), CHANGES.get(family, {}), beside=VISION))
    config._experts_implementation = "eager"
    return with_loud_weights(AutoModelForImageTextToText.from_config(config))


def expected_step(model: PreTrainedModel, family: str) -> tuple[dict, Step, bool]:
    """A batch that the stock model takes, what it makes of it, and whether there are images in it."""
    if family in images.MODEL_TYPES:
        batch = images.image_batch(family, padded=True)
        return batch, run_step(model, batch), True
    for pixels in image_formats():
        try:
            batch = _batch_of(model, pixels)
            return batch, run_step(model, batch), True
        except Exception:  # of any kind: the family takes images in another format
            continue
    batch = batches()[1]
    return batch, run_step(model, batch), False


def image_formats() -> Iterator[dict[str, Tensor]]:
    """Two images in each of the formats in which families take them."""
    grid = SIDE // PATCH
    pixels = torch.randn(2, 3, SIDE, SIDE, dtype=torch.float64)
    yield {"pixel_values": pixels}
    yield {"pixel_values": pixels, "image_sizes": torch.tensor([[SIDE, SIDE]] * 2)}
    patches = torch.randn(2 * grid**2, 3 * 2 * PATCH**2, dtype=torch.float64)
    yield {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, grid, grid]] * 2)}
    yield {"pixel_values": pixels.unsqueeze(1)}


def _batch_of(model: PreTrainedModel, pixels: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two rows of text with an image each, in as many tokens as the model makes of one."""
    features = model.get_image_features(**pixels)
    features = getattr(features, "pooler_output", features)
    count = sum(part.shape[:-1].numel() for part in ([features] if isinstance(features, Tensor) else features)) // 2
    ids = torch.randint(3, IMAGE - 2, (2, count + 20))
    ids[0, 3 : 3 + count] = ids[1, 9 : 9 + count] = IMAGE
    names = inspect.signature(model.forward).parameters
    kinds = {name: (ids == IMAGE).long() for name in ("mm_token_type_ids", "token_type_ids") if name in names}
    return {"input_ids": ids, "labels": ids.masked_fill(ids == IMAGE, -100)} | kinds | pixels
