"""Models of text and images: every gradient, those of the vision tower and the projector included, is plain backpropagation's.

Where the tokens of an image see each other both ways (Gemma 3; larger Gemma 4, in layers with a window), or those of a prompt
(PaliGemma), no chunk cuts them apart, and masks are made by chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.modeling_layers import GradientCheckpointingLayer

import streamgrad
from gradients import assert_same_step, more, run_step
from images import FAMILIES, IMAGE, LENGTH, SIDE, TEXT, float64_throughout, image_batch, image_model
from lora import with_lora
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.layer_args import LayerArguments

TOLERANCE = 1e-10
# DeepStack, images that see both ways, and a vector per token and layer with shared keys; the others are run by `make test-all`.
DEFAULT = ("qwen3_vl", "gemma3", "gemma4")


@contextmanager
def spans_of_chunks() -> Iterator[set[tuple[int, int]]]:
    """Collects the spans in which layers run within the block, but for those of trials."""
    found: set[tuple[int, int]] = set()
    run = LayerArguments.run

    def noted(self, h_BLE, chunk):
        if not chunk.alone:
            found.add((chunk.start, chunk.stop))
        return run(self, h_BLE, chunk)

    with mock.patch.object(LayerArguments, "run", noted):
        yield found


def assert_streamed_exactly(model, batch: dict, chunk_size: int, **options) -> set[tuple[int, int]]:
    """Compare with plain backpropagation; return the spans of the chunks, of which there are several unless one holds all."""
    with float64_throughout():
        expected = run_step(model, batch)
        streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=7, **options)
        with spans_of_chunks() as spans:
            actual = run_step(model, batch)
        streamgrad.disable(model)
    assert_same_step(actual, expected, TOLERANCE)
    assert spans == {(0, LENGTH)} if chunk_size >= LENGTH else len(spans) > 1
    return spans


def has_gradients_of_images(model) -> bool:
    """Whether the vision tower and the projector are trained; LLaVA does not use the norm after its tower."""
    layers = {id(p) for p in model.get_decoder().parameters()} | {id(p) for p in model.get_output_embeddings().parameters()}
    others = {name: p for name, p in model.named_parameters() if id(p) not in layers and "post_layernorm" not in name}
    return len(others) > 4 and all(p.grad is not None and p.grad.abs().sum() > 0 for p in others.values())


def families(default: tuple[str, ...]) -> list:
    return [pytest.param(family, marks=[] if family in default else [more]) for family in FAMILIES]


@pytest.mark.parametrize("family", families(DEFAULT))
def test_gradients_with_images(family):
    model = image_model(family)
    for chunk_size, padded in ((5, True), (LENGTH + 3, False)):
        assert_streamed_exactly(model, image_batch(family, padded=padded), chunk_size)
        assert has_gradients_of_images(model)


@more
@pytest.mark.parametrize("keep", ["input", "attention", "all"])
@pytest.mark.parametrize("chunk_size", [1, 7])
@pytest.mark.parametrize("padded", [False, True], ids=["whole rows", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_at_other_chunk_sizes(family, padded, chunk_size, keep):
    model, batch = image_model(family), image_batch(family, padded=padded)
    with float64_throughout():
        expected = run_step(model, batch)
        actual = run_step(streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=7, keep=keep), batch)
    assert_same_step(actual, expected, TOLERANCE)


@pytest.mark.parametrize("family", families(("gemma4",)))
def test_lora_on_the_text(family):
    """Everything else is frozen, so the first layer's inputs have no gradient."""
    model = image_model(family)
    prefix = next(name for name, module in model.named_modules() if module is model.get_decoder())
    adapted = with_lora(model, targets=rf"{prefix}\.layers\..*\.(q_proj|k_proj|v_proj|o_proj|in_proj_qkv|down_proj)")
    assert_streamed_exactly(adapted, image_batch(family, padded=True), 5)


@pytest.mark.parametrize("family", ["gemma3", "paligemma2"])
def test_no_chunk_cuts_what_sees_both_ways(family):
    """A chunk grows to hold an image that is longer than `chunk_size`; text is cut as ever."""
    batch = image_batch(family)
    together_BT = batch["token_type_ids"] == (1 if family == "gemma3" else 0)
    spans = assert_streamed_exactly(image_model(family), batch, 3)
    for stop in {stop for _, stop in spans} - {LENGTH}:
        assert not (together_BT[:, stop - 1] & together_BT[:, stop]).any()
    assert max(stop - start for start, stop in spans) > 3
    assert any(stop - start == 3 for start, stop in spans)


class Shapes(TorchDispatchMode):
    """The shapes of everything that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.made |= {tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor)}
        return result


@pytest.mark.parametrize("padded", [False, True], ids=["whole rows", "padded"])
@pytest.mark.parametrize("family", families(("gemma3", "paligemma")))
def test_no_mask_of_all_tokens_by_all_tokens(family, padded):
    length = 203
    model, batch = image_model(family), image_batch(family, padded=padded, length=length)
    streamgrad.enable(model, chunk_size=16, head_chunk_size=16)
    model(**batch).loss.backward()  # with the trials of layers
    with float64_throughout(), Shapes() as shapes:
        model(**batch).loss.backward()
    assert not [shape for shape in shapes.made if sum(size >= length - 8 for size in shape) > 1]


def test_text_alone_and_a_model_without_a_head():
    """Gemma 3 makes masks outside of its decoder for text too, and its model without a head is the one that makes them."""
    model, batch = image_model("gemma3"), image_batch("gemma3", padded=True)
    text = {name: batch[name] for name in ("attention_mask", "labels")} | {"input_ids": batch["input_ids"] % IMAGE}
    assert_streamed_exactly(model, text, 5)

    def distance(inner, batch: dict) -> torch.Tensor:
        return inner(**{name: value for name, value in batch.items() if name != "labels"}).last_hidden_state.square().mean()

    with float64_throughout():
        expected = run_step(model.model, batch, forward=distance)
        streamgrad.enable(model.model, chunk_size=5)
        with spans_of_chunks() as spans:
            actual = run_step(model.model, batch, forward=distance)
    assert_same_step(actual, expected, TOLERANCE)
    assert len(spans) > 1


def test_without_gradients_and_when_disabled():
    """A long input without a graph is streamed too, with the same logits; `disable` leaves nothing on any part."""
    model, batch = image_model("gemma3").eval(), image_batch("gemma3", padded=True)
    with torch.no_grad():
        expected = model(**batch).logits
        streamgrad.enable(model, chunk_size=5)
        with spans_of_chunks() as spans:
            torch.testing.assert_close(model(**batch, use_cache=False).logits, expected, rtol=1e-6, atol=1e-6)
            assert len(spans) > 1
        torch.testing.assert_close(model(**batch).logits, expected)  # fills a cache, and is not streamed
    streamgrad.disable(model)
    assert not [part for part in model.modules() if "_streamgrad" in part.__dict__ or "forward" in part.__dict__]


def test_attention_that_the_stock_model_would_do_otherwise_is_refused():
    model, batch = image_model("paligemma"), image_batch("paligemma")
    streamgrad.enable(model, chunk_size=5)
    with pytest.raises(ValueError, match="no argument says which tokens see each other both ways"):
        model(**{name: value for name, value in batch.items() if name != "token_type_ids"})
    model = streamgrad.enable(image_model("gemma3"), chunk_size=5)
    model.get_decoder().config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"flash_attention_2.* hide later.*set_attn_implementation\('sdpa'\)"):
        model(**image_batch("gemma3"))


def test_cross_attention_to_images_is_refused():
    """Llama 3.2 Vision; with text alone, its layers that attend to images are left out."""
    config = AutoConfig.for_model(
        "mllama", image_token_index=IMAGE,
        text_config=TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default",
                                                                                                      "rope_theta": 10000.0}},
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_global_layers": 1, "attention_heads": 2,
            "image_size": SIDE, "patch_size": 4, "max_num_tiles": 1, "vision_output_dim": 32, "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1]],
        },
    )  # fmt: skip
    model = streamgrad.enable(AutoModelForImageTextToText.from_config(config).train(), chunk_size=5)
    ids = torch.randint(3, 57, (1, 17))
    batch = {
        "input_ids": ids, "labels": ids, "pixel_values": torch.randn(1, 1, 1, 3, SIDE, SIDE),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long), "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 17, 1, 1),
    }  # fmt: skip
    for trained in (True, False):
        with pytest.raises(ValueError, match="MllamaTextModel cannot be streamed: its layers (take|read) cross_attention_states"):
            model.requires_grad_(trained)(**batch)


@pytest.mark.parametrize("family", families(("qwen3_vl",)))
def test_the_vision_tower_keeps_its_own_checkpointing(family):
    """`gradient_checkpointing_enable` lets the tower's layers run again in backward, and leaves the text's streamed."""
    model, batch = image_model(family), image_batch(family)
    text = set(decoder_layers(model.get_decoder()))
    tower = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer) and part not in text]
    calls = dict.fromkeys(tower, 0)

    def counted(part, stock):
        def forward(*args, **kwargs):
            calls[part] += 1
            return stock(*args, **kwargs)

        return forward

    for part in tower:
        part.forward = counted(part, part.forward)
    with float64_throughout():
        expected = run_step(model, batch)
        once = set(calls.values())
        streamgrad.enable(model, chunk_size=5, head_chunk_size=7)
        model.gradient_checkpointing_enable()
        with spans_of_chunks() as spans:
            assert_same_step(run_step(model, batch), expected, TOLERANCE)
    assert len(spans) > 1
    if family != "gemma4_unified":  # which has no tower
        assert once == {1} and set(calls.values()) == {3}
