"""Write docs/compatibility.md from the test matrix: `python docs/generate_compatibility.py`.

Which families are streamed and which are refused is what tests/hf/test_all_families.py holds the library to. The reasons are the
library's own: each refused family is built small and enabled here, and its error is read.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import transformers

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/compatibility.md"
sys.path.insert(0, str(ROOT / "tests" / "support"))

import families as matrix  # noqa: E402
import image_families as image_matrix  # noqa: E402
import streamgrad  # noqa: E402
from gradients import run_step  # noqa: E402
from tiny import FAMILIES  # noqa: E402


def page() -> str:
    by_reason: dict[str, list[str]] = {}
    for family in sorted(matrix.REFUSED):
        by_reason.setdefault(refusal(matrix.small_model(family)), []).append(family)
    refused = "\n".join(
        f"| {reason} | {names(families)} |" for reason, families in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    )
    skipped = "\n".join(f"| {family} | {reason} |" for family, reason in sorted(matrix.SKIPPED.items()))
    return f"""# Compatibility

Families of transformers' `AutoModelForCausalLM`, by model type, as tested with transformers {transformers.__version__}. This
page is written by [docs/generate_compatibility.py](generate_compatibility.py) from the tests.

A family that is not here, or whose code changed with a newer transformers, is either streamed or refused with the reason. To see
whether your model is exact on your machine, run `python -m streamgrad check MODEL`.

## Streamed, with every kind of batch

{len(FAMILIES)} families, each with padded, packed and masked batches, full training and LoRA, at several chunk sizes
([tests/engine/test_exact_gradients.py](../tests/engine/test_exact_gradients.py)): {names(FAMILIES)}.

## Streamed

{len(matrix.STREAMED)} families, those above among them, each with a plain and a padded batch: loss and gradients equal plain
backpropagation's in float64 ([tests/hf/test_all_families.py](../tests/hf/test_all_families.py)): {names(matrix.STREAMED)}.

Composite models (text with images or sound) were given text alone. Models whose own forward makes the loss of full logits
({names(matrix.OWN_LOSS)}) have streamed layers and a stock head; a warning says so.

Layers with states (linear attention, state spaces, convolutions) are streamed by handing the states from chunk to chunk, alone or
beside attention. [Limits](limits.md#packed-documents-in-hybrid-models) says what becomes of packed documents in them.

{images()}

## Refused

{len(matrix.REFUSED)} families. `streamgrad.enable`, or the first forward pass, raises a `ValueError` with this reason; nothing is
computed wrongly.

| reason | families |
|---|---|
{refused}

## Not built by the tests

| family | why |
|---|---|
{skipped}
"""


def images() -> str:
    """The section on classes for text and images."""
    by_reason: dict[str, list[str]] = {}
    for family in sorted(image_matrix.REFUSED):
        by_reason.setdefault(refusal(image_matrix.small_image_model(family)), []).append(family)
    refused = "\n".join(f"| {reason} | {names(families)} |" for reason, families in sorted(by_reason.items()))
    return f"""## Text with images

Classes of `AutoModelForImageTextToText`. {len(image_matrix.WITH_IMAGES)} are streamed with images: loss and gradients, those of
the vision tower and the projector included, equal plain backpropagation's in float64
([tests/hf/test_images.py](../tests/hf/test_images.py), [tests/hf/test_image_families.py](../tests/hf/test_image_families.py)):
{names(image_matrix.WITH_IMAGES)}.

{len(image_matrix.TEXT_ALONE)} were given text alone, and are exact: {names(image_matrix.TEXT_ALONE)}.

[Text with images](trainers.md#text-with-images) has a recipe, and [Limits](limits.md#images) what to know. Refused:

| reason | families |
|---|---|
{refused}"""


def names(families) -> str:
    return ", ".join(f"`{family}`" for family in sorted(families))


def refusal(model) -> str:
    """The library's reason, without the names of classes that would make every family's a reason of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            streamgrad.enable(model, chunk_size=5, head_chunk_size=7)
            run_step(model, matrix.batches()[0])
        except ValueError as error:
            _, found, reason = str(error).partition(" cannot be streamed: ")
            if not found:
                raise
        else:
            raise AssertionError(f"{type(model).__name__} is streamed, but tests/support has its family among the refused")
    reason = re.sub(r"\.( (Call streamgrad.disable|Train it without streamgrad|If its layers can be streamed).*)?$", "", reason)
    reason = re.sub(r"^\w+ has the scan", "it has the scan", reason)
    return re.sub(r"^\w+, which get_decoder\(\) returns,", "what `get_decoder()` returns", reason)


if __name__ == "__main__":
    PAGE.write_text(page())
