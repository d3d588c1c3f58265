"""Shared settings: one torch thread, a fixed seed, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton, where it is installed, reads this at import: kernels then run on CPU tensors, interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
