"""docs/what-fits.md is what its generator writes: one row here, all of them where there is time."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs import generate_what_fits as fits
from gradients import more

README = Path(__file__).parents[2] / "README.md"
ROWS = [("qwen3-8b", "QLoRA"), pytest.param("qwen3-32b", "full", marks=more)]


@pytest.mark.parametrize(("model", "method"), ROWS)
def test_rows_are_up_to_date(model, method):
    assert fits.row(model, method) in fits.PAGE.read_text().splitlines(), "run `python docs/generate_what_fits.py`"


def test_the_words_are_up_to_date(monkeypatch):
    text = fits.PAGE.read_text()
    table = text[text.index("| model") : text.index("\nThese numbers")]
    monkeypatch.setattr(fits, "table", lambda: table)
    assert fits.page() == text, "run `python docs/generate_what_fits.py`"
    assert len(table.splitlines()) == 2 + len(fits.MODELS) * len(fits.METHODS)


def test_readme_has_the_pages_table():
    rows = [[line for line in path.read_text().splitlines() if line.startswith("| Qwen3-")] for path in (fits.PAGE, README)]
    assert rows[0] == rows[1] != []


@more
def test_the_page_is_up_to_date():
    assert fits.page() == fits.PAGE.read_text(), "run `python docs/generate_what_fits.py`"
