"""Every example runs as it stands, and what it trains gets better."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

EXAMPLES = Path(__file__).parents[2] / "examples"
# By script: what it prints, and how far it must come. tests/benchmarks/test_bench_linear.py runs linear_example.py.
IMPROVES = {
    "sft.py": ("loss", lambda first, last: last < first - 0.4),
    "sft_images.py": ("loss", lambda first, last: last < first - 0.4),
    "dpo.py": ("reward margin", lambda first, last: last > first + 0.5),
    "grpo.py": ("reward", lambda first, last: last > 0.2 > 0.1 > first),
    "transformers_trainer.py": ("loss", lambda first, last: last < 0.8 * first),
}


def run(script: str, monkeypatch, capsys) -> str:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for module in ("toy", "toy_images"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.parametrize("script", IMPROVES)
def test_trainers(script, monkeypatch, capsys):
    name, is_better = IMPROVES[script]
    found = re.search(rf"^{name}: (-?[\d.]+) -> (-?[\d.]+)$", run(script, monkeypatch, capsys), re.MULTILINE)
    assert found, "the example printed no result"
    assert is_better(*map(float, found.groups())), found.group()


def test_torch_loop(monkeypatch, capsys):
    out = run("torch_loop.py", monkeypatch, capsys)
    for name in ("loss", "DPO loss"):
        losses = [float(value) for value in re.findall(rf": {name} ([\d.]+)$", out, re.MULTILINE)]
        assert len(losses) == 5 and losses[-1] < losses[0]
