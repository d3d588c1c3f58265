"""The merge of two pieces of attention as a Triton kernel against the torch code it stands for: on a GPU, else interpreted."""

from __future__ import annotations

import importlib

import pytest
import torch

from gradients import relative_error
from streamgrad.attention.backends import block as base
from streamgrad.engine.kv_chunk import Attended

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytest.importorskip("triton", reason="triton (0.6 GB) comes with torch's CUDA builds and is not installed with the CPU build")
kernels = importlib.import_module("streamgrad.attention.merge_kernel")


def piece(shape, dtype, *, heads_first: bool) -> Attended:
    batch, heads, length, size = shape
    out = torch.randn(shape if heads_first else (batch, length, heads, size), device=DEVICE).to(dtype)
    return Attended(out if heads_first else out.transpose(1, 2), 3.0 * torch.randn(shape[:3], device=DEVICE))


def in_float64(done: Attended) -> Attended:
    return Attended(done.out_BHLD.double(), done.lse_BHL.double())


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 1, 8), (2, 3, 47, 40), (1, 4, 131, 128), (2, 1, 33, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_merge(dtype, shape, heads_first):
    """Rounded once from the exact result; rows that see nothing in one of the sets keep what they have in the other."""
    a, b = piece(shape, dtype, heads_first=heads_first), piece(shape, dtype, heads_first=not heads_first)
    a.lse_BHL[..., ::3] = -torch.inf
    b.lse_BHL[..., 1::3] = -torch.inf
    exact = base.merge(in_float64(a), in_float64(b))
    kernels.merge_(a.out_BHLD, a.lse_BHL, b.out_BHLD, b.lse_BHL)
    torch.testing.assert_close(a.lse_BHL.double(), exact.lse_BHL, rtol=1e-6, atol=1e-6)
    assert a.out_BHLD.isfinite().all()
    rounded = exact.out_BHLD.to(dtype)
    # Triton's interpreter cuts fp32 off to bf16 where a GPU rounds.
    factor = 3.0 if dtype == torch.bfloat16 and not HAS_GPU else 1.01
    assert relative_error(a.out_BHLD, exact.out_BHLD) <= factor * relative_error(rounded, exact.out_BHLD)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_merge_takes_the_kernel_and_needs_no_memory():
    a, b = (piece((1, 4, 4096, 128), torch.bfloat16, heads_first=True) for _ in range(2))
    base.merge(a, b)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    merged = base.merge(a, b)
    assert merged.out_BHLD is a.out_BHLD
    assert torch.cuda.max_memory_allocated() == before
