"""Shared settings: one torch thread, a fixed seed, no cache of shapes, and the float64 loss that stock models are compared by."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton, where it is installed, reads this at import: kernels then run on CPU tensors, interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
# Tests of the cache have one of their own; the user's is left alone.
os.environ["STREAMGRAD_CACHE"] = "off"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
