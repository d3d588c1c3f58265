"""examples/lightning_module.py runs as it stands, and trains as it does without streamgrad."""

from __future__ import annotations

import json

import pytest

from plugged import ROOT, needs, python

pytestmark = needs("lightning")

LINE = "        streamgrad.enable(self.model, chunk_size=16)\n"


def losses(folder, program: str) -> list[float]:
    (folder / "program.py").write_text(program + "\nimport json\nprint('LOSSES', json.dumps(module.losses))\n")
    (folder / "toy.py").write_text((ROOT / "examples/toy.py").read_text())
    (line,) = [line for line in python("lightning", folder, "program.py").splitlines() if line.startswith("LOSSES")]
    return json.loads(line.removeprefix("LOSSES"))


def test_lightning_trains_as_without_streamgrad(tmp_path):
    program = (ROOT / "examples/lightning_module.py").read_text()
    assert program.count(LINE) == 1
    streamed, plain = losses(tmp_path, program), losses(tmp_path, program.replace(LINE, ""))
    assert len(plain) == 20 and plain[-1] < 0.8 * plain[0]
    assert streamed == pytest.approx(plain, rel=1e-3)
    assert streamed != plain  # sums in another order: it was streamed
