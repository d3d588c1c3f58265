"""The examples of sequence parallelism as users start them, on two processes: the weights of plain backpropagation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from engine_worker import Reference
from gradients import more
from launching import CONFIGS, EXAMPLE, ON_CPU, TORCHRUN, run, weights
from tiny import VOCABULARY, tiny_model

LENGTH = 33  # one rank has 17 tokens, and the other 16 and padding
STEPS = 4


def start_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model("qwen3", dtype=dtype, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    start_model().save_pretrained(folder)
    return folder


def reference(sequences: list[torch.Tensor], **options) -> Reference:
    """What plain backpropagation makes of the same sequences."""

    def train(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = start_model(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
        for ids in sequences:
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    return Reference.of(train)


@pytest.mark.parametrize("ring", [1, pytest.param(2, marks=more)])
def test_torchrun(start, tmp_path, ring):
    options = ["--length", LENGTH, "--chunk-size", 5, "--steps", STEPS, "--ring", ring, "--output", tmp_path]
    done = run(*TORCHRUN, EXAMPLE.parent / "sequence_parallel.py", start, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    seeded = torch.Generator().manual_seed(0)
    sequences = [torch.randint(VOCABULARY, (1, LENGTH), generator=seeded) for _ in range(STEPS)]
    reference(sequences, momentum=0.9).check(weights(tmp_path))


@more
def test_trainer_under_accelerate(start, tmp_path):
    """With the group and the slices that Accelerate and DeepSpeed make, and the loss and the gradients as they combine them."""
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / "ulysses.yaml", "--main_process_port", "0"]
    launcher += ["--mixed_precision", "no", "--gradient_clipping", "1e9"]  # to be comparable
    options = ["--length", 32, "--chunk-size", 5, "--steps", STEPS, "--clipping", "1e9", "--output", tmp_path]
    done = run(*launcher, ON_CPU, EXAMPLE.parent / "ulysses_trainer.py", start, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    ids = torch.randint(VOCABULARY, (STEPS, 32), generator=torch.Generator().manual_seed(0))
    order = [2, 3, 0, 1]  # the Trainer's, for its default seed
    reference([ids[index : index + 1] for index in order]).check(weights(tmp_path))
