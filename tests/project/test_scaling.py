"""docs/scaling.md is what its generator writes: a row of each table here, all of them where there is time."""

from __future__ import annotations

from docs import generate_scaling as scaling
from gradients import more

OUTDATED = "run `python docs/generate_scaling.py`"


def written_tables(text: str) -> list[str]:
    """The tables of the page, as they stand there."""
    blocks = [block + "\n" for block in text.split("\n\n") if block.startswith("| ")]
    assert len(blocks) == 2
    return blocks


def test_a_row_and_the_words_are_up_to_date():
    text = scaling.PAGE.read_text()
    lengths, published = written_tables(text)
    assert scaling.row("llama-3.1-8b", "zero3", 128) in lengths.splitlines(), OUTDATED
    assert scaling.published_row(*scaling.PUBLISHED[0]) in published.splitlines(), OUTDATED
    assert scaling.page(lengths, published) == text, OUTDATED
    assert len(lengths.splitlines()) == 2 + len(scaling.MODELS) * len(scaling.ENGINES) * len(scaling.GPUS)
    assert len(published.splitlines()) == 2 + len(scaling.PUBLISHED)


@more
def test_the_page_is_up_to_date():
    assert scaling.page(*scaling.tables()) == scaling.PAGE.read_text(), OUTDATED
