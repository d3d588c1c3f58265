"""Every causal language model of the installed transformers is either streamed exactly or refused; none is silently wrong.

Each family of `AutoModelForCausalLM` is built with random weights, two layers and a few thousand parameters. `STREAMED` and
`REFUSED` in tests/support/families.py record which of the two is its fate, so a transformers release that changes it fails here.
A family in neither list, from a newer transformers, must still have one of the two; one that the installed version does not have
is not looked at.

Composite models (a text model and other towers) are given text alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers
from packaging.version import Version
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import streamgrad
from families import (
    LAYERS_TAKE_STATES_UP,
    OLDER,
    REFUSED,
    SKIPPED,
    STREAMED,
    STREAMED_SINCE,
    STREAMED_SINCE_5_21,
    batches,
    small_model,
)
from gradients import assert_same_step, no_float32, run_step

TOLERANCE = 1e-9


def is_streamed(model: PreTrainedModel) -> bool:
    """Whether the model is streamed, and then exactly; False where it is refused in so many words."""
    options = {"chunk_size": 5, "head_chunk_size": 7}
    try:
        streamgrad.enable(model, **options)
        streamgrad.disable(model)
        for batch in batches():
            expected = run_step(model, batch)
            streamgrad.enable(model, **options)
            actual = run_step(model, batch)
            streamgrad.disable(model)
            assert_same_step(actual, expected, TOLERANCE)
    except ValueError as error:
        if "cannot be streamed" not in str(error):
            raise
        return False
    return True


def families() -> Iterator:
    for family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        marks = []
        if family in SKIPPED:
            marks.append(pytest.mark.skip(reason=SKIPPED[family]))
        yield pytest.param(family, marks=marks)


def trainable(family: str) -> PreTrainedModel:
    """Return a small model; skip the test where an older transformers does not build or train the same one by itself."""
    if not OLDER:
        return small_model(family)
    try:
        model = small_model(family)
        for batch in batches():
            run_step(model, batch)
    except Exception as error:
        pytest.skip(f"transformers {transformers.__version__} does not train it without streamgrad either: {error}")
    return model


@pytest.mark.filterwarnings("ignore:streamgrad. .* made the logits of all")
@pytest.mark.filterwarnings("ignore:`input_embeds` is deprecated:FutureWarning")  # by transformers 5.5 itself
@pytest.mark.parametrize("family", list(families()))
def test_family_is_streamed_exactly_or_refused(family):
    model = trainable(family)
    with no_float32():
        streamed = is_streamed(model)
    if family in STREAMED | REFUSED:
        too_old = Version(transformers.__version__) < Version(STREAMED_SINCE.get(family, "0"))
        has_states = family in STREAMED_SINCE_5_21 and not LAYERS_TAKE_STATES_UP
        assert streamed == (family in STREAMED and not too_old and not has_states)


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 16},
        {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    ],
    ids=["as its larger models", "layers that share keys", "experts"],
)  # fmt: skip
def test_gemma_4_is_streamed(options):
    """With a vector per token and layer (E2B, E4B) and without, and with layers that attend to the keys of earlier ones."""
    if "num_kv_shared_layers" in options and Version(transformers.__version__) < Version("5.5.4"):
        pytest.skip("transformers before 5.5.4 hands shared keys on in the cache, and is refused")
    model = small_model("gemma4_text", **options)
    with no_float32():
        assert is_streamed(model)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 8,
         "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0]},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_inside_a_layer_that_depends_on_the_length_is_refused(rope):
    """Moshi makes its rotary angles inside the layer, where a chunk's length would stand for the sequence's."""
    model = small_model("moshi", max_position_embeddings=8, rope_parameters=rope | {"rope_theta": 10000.0})
    with no_float32():
        assert not is_streamed(model)


def test_no_family_has_two_fates():
    assert not STREAMED & REFUSED
    assert not (STREAMED | REFUSED) & SKIPPED.keys()
