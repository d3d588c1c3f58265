"""docs/scaling.md is what its generator writes: one row here, all of them where there is time."""

from __future__ import annotations

from docs import generate_scaling as scaling
from gradients import more


def test_a_row_and_the_words_are_up_to_date(monkeypatch):
    text = scaling.PAGE.read_text()
    table = text[text.index("| model") : text.index("\nA dash: nothing fits.")]
    assert scaling.row("qwen3-32b", "zero3", 32) in table.splitlines(), "run `python docs/generate_scaling.py`"
    monkeypatch.setattr(scaling, "table", lambda: table)
    assert scaling.page() == text, "run `python docs/generate_scaling.py`"
    assert len(table.splitlines()) == 2 + len(scaling.MODELS) * len(scaling.ENGINES) * len(scaling.GPUS)


@more
def test_the_page_is_up_to_date():
    assert scaling.page() == scaling.PAGE.read_text(), "run `python docs/generate_scaling.py`"
