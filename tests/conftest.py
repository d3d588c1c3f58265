"""Shared settings: one torch thread, a fixed seed, no limit on time, and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
# How long an example takes says how fast the machine is, nothing else.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
if not torch.cuda.is_available():
    # Triton, where it is installed, reads this at import: kernels then run on CPU tensors, interpreted.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
