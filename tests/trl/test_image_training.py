"""`StreamSFTTrainer` on text with images: everything that TRL's own trainer logs, and the weights it ends with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText
from trl import SFTConfig, SFTTrainer

from gradients import no_float32
from streamgrad import StreamConfig
from streamgrad.trl import StreamSFTTrainer
from trainers import history, settings, trl_on_full_logits

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def questions() -> Dataset:
    """Images of noise, one or two to a question, and answers of several lengths."""
    torch.manual_seed(3)
    images = [Image.fromarray(torch.randint(256, (32, 32, 3), dtype=torch.uint8).numpy()) for _ in range(6)]
    return Dataset.from_dict(
        {
            "images": [[images[0], images[1]], [images[2]], [images[3], images[4]], [images[5]]],
            "prompt": [[{"role": "user", "content": f"What is {'this' * i}?"}] for i in range(1, 5)],
            "completion": [[{"role": "assistant", "content": "Noise." * i}] for i in range(4, 0, -1)],
        }
    )


def test_steps_are_those_of_stock_trl(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    for module in ("toy", "toy_images"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    import toy_images

    runs = []
    for kind, options in ((SFTTrainer, {}), (StreamSFTTrainer, {"stream": StreamConfig(chunk_size=7, head_chunk_size=5)})):
        model = AutoModelForImageTextToText.from_pretrained(toy_images.MODEL, dtype=torch.float64)
        arguments = settings(SFTConfig, tmp_path, max_steps=2, learning_rate=1e-3, max_length=None)
        assert arguments.gradient_checkpointing
        with no_float32(), trl_on_full_logits():
            trainer = kind(model=model, args=arguments, train_dataset=questions(), **options)
            runs.append((history(trainer), dict(trainer.model.named_parameters())))
    (expected, expected_weights), (actual, weights) = runs
    assert len(actual) == len(expected) == 2
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-7, abs=1e-9)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-7, atol=1e-10)
    assert any("vision_tower" in name for name in weights)
