"""Triton kernel that merges two pieces of attention: both are read once, and the result overwrites the first.

It equals `backends.block.merge`, whose torch code is its reference. Importing this module needs Triton; `merge` imports it only
for 16-bit tensors on a GPU. Offsets are 64-bit: queries x heads x head size exceeds 2^31.

Shapes: B batch, H heads, L queries, D head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of each operand that a program holds at a time.
TILE = 4096


def merge_(out_BHLD: Tensor, lse_BHL: Tensor, other_BHLD: Tensor, other_lse_BHL: Tensor) -> None:
    """Overwrite `out` and `lse` with those of attention over both sets of keys."""
    batch, heads, length, size = out_BHLD.shape
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    with torch.cuda.device_of(out_BHLD):
        _merge_kernel[(triton.cdiv(length, rows), heads, batch)](
            out_BHLD, lse_BHL, other_BHLD, other_lse_BHL, length, *out_BHLD.stride(), *lse_BHL.stride(), *other_BHLD.stride(),
            *other_lse_BHL.stride(), D=size, ROWS=rows, BLOCK=block, num_warps=8,
        )  # fmt: skip


# These follow the length of a sequence: Triton would compile a second kernel for lengths that 16 divides, which is no faster.
@triton.jit(do_not_specialize=["length", "lse_b", "lse_h", "other_lse_b", "other_lse_h"])
def _merge_kernel(
    out, lse, other, other_lse, length, out_b, out_h, out_l, out_d, lse_b, lse_h, lse_l,
    other_b, other_h, other_l, other_d, other_lse_b, other_lse_h, other_lse_l,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    in_rows = row < length
    inside = in_rows & (column < D)
    lse += batch * lse_b + head * lse_h + row * lse_l
    other_lse += batch * other_lse_b + head * other_lse_h + row * other_lse_l
    a, b = tl.load(lse, mask=in_rows, other=0.0), tl.load(other_lse, mask=in_rows, other=0.0)
    largest = tl.maximum(a, b)
    total = largest + tl.log(tl.exp(a - largest) + tl.exp(b - largest))
    out += batch * out_b + head * out_h + row * out_l + column * out_d
    other += batch * other_b + head * other_h + row * other_l + column * other_d
    first = tl.load(out, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(other, mask=inside, other=0.0).to(tl.float32)
    tl.store(out, first * tl.exp(a - total) + second * tl.exp(b - total), mask=inside)
    tl.store(lse, total, mask=in_rows)
