"""Every class for text and images of the installed transformers is streamed exactly or refused; none is silently wrong.

tests/support/image_families.py records which. Those that the tests cannot build small, or whose stock model they cannot run, are
skipped with the reason.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import streamgrad
from gradients import assert_same_step, more, run_step
from image_families import REFUSED, TEXT_ALONE, WITH_IMAGES, expected_step, small_image_model
from images import MODEL_TYPES, float64_throughout, image_model

LARGEST = 20_000_000  # parameters, beyond which a model is not small


@more
@pytest.mark.parametrize("family", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
def test_family_is_streamed_exactly_or_refused(family):
    known = family in WITH_IMAGES | TEXT_ALONE | REFUSED
    make = image_model if family in MODEL_TYPES else small_image_model
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in make(family).parameters())
        assert size <= LARGEST, f"{size:,} parameters"
        model = make(family)
        with float64_throughout():
            batch, expected, has_images = expected_step(model, family)
    except Exception as error:  # of any kind: families differ in what they lack
        if known and family not in REFUSED:
            raise
        pytest.skip(f"{type(error).__name__}: {error}"[:200])
    try:
        with float64_throughout():
            actual = run_step(streamgrad.enable(model, chunk_size=5, head_chunk_size=7), batch)
    except ValueError as error:
        if "cannot be streamed" not in str(error) or (known and family not in REFUSED):
            raise
        return
    assert family not in REFUSED
    assert_same_step(actual, expected, 1e-9)
    if known:
        assert family in (WITH_IMAGES if has_images else TEXT_ALONE)


def test_no_family_has_two_fates():
    assert not WITH_IMAGES & TEXT_ALONE and not (WITH_IMAGES | TEXT_ALONE) & REFUSED
