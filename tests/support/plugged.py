"""Frameworks in folders of their own under out/plugs, run in a process with their versions of what they need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import tiny_model
from trainers import tokenizer

ROOT = Path(__file__).parents[2]
PLUGS = Path(os.environ.get("STREAMGRAD_PLUGS", ROOT / "out/plugs"))


def needs(framework: str) -> pytest.MarkDecorator:
    """Skip a test unless `make test-plugs` has installed what tests/integrations/FRAMEWORK.txt lists."""
    return pytest.mark.skipif(
        not (PLUGS / framework).exists(), reason=f"{framework} is not in out/plugs: make test-plugs installs it"
    )


def python(framework: str, folder: Path, *words: str, **environment: str) -> str:
    """Run `python WORDS` in `folder` with the framework and its versions, without a GPU or the hub, and return what it prints."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder, capture_output=True, text=True, timeout=900,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join([str(PLUGS / framework), str(ROOT / "src")]), "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "cache"),
        } | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def save_tiny_model(folder: Path, family: str = "qwen3") -> None:
    """Save a tiny model in float32, with its tokenizer."""
    tiny_model(family, dtype=torch.float32).save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def assert_same_steps(streamed: list[dict], plain: list[dict]) -> None:
    """Compare the losses and gradient norms that two runs have logged in three steps, the first in chunks of five tokens."""
    assert len(plain) == 3
    assert [step["streamgrad/chunk_tokens"] for step in streamed] == [5, 5, 5]
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in streamed] == pytest.approx([step[name] for step in plain], rel=1e-4), name
