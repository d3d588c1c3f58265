"""Measures the paper's linear example (appendix "Linear Example of StreamBP"): the whole idea in two matrix products.

    Y = X W1,   Z = Y W2,   L = sum(Z)

Plain backpropagation holds all of Y (and dY, and Z or dZ). Rows of X do not see each other, so one partition of rows at a time
gives the same gradient from 1/D of those intermediate values.

Shapes: T rows of X, M, N, K the widths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.names import command_line
from benchmarks.records import versions
from streamgrad.cli.bench_run import device_name, median_ms
from streamgrad.memory.live_bytes import peak_bytes_of
from streamgrad.ops.accumulate import accumulator_dtype, add_product_, zeros_for_sum

PARTITIONS = (1, 20, 50, 100, 200, 500)
PAPER_ROWS, PAPER_WIDTH, PAPER_DTYPE = 1_000_000, 16_384, "bfloat16"

# Partitions -> (intermediate memory in GB, seconds), table "linear-example-memory-cost".
PAPER_RESULTS = {
    1: (25.15, 14.48),
    20: (2.39, 14.50),
    50: (1.61, 14.70),
    100: (1.34, 14.79),
    200: (1.21, 15.45),
    500: (1.13, 18.42),
}
PAPER_NOTE = (
    "In 16 bits X and Y take 32.8 GB each at this shape, more than the paper's 25.15 GB of intermediate values for standard "
    "backpropagation: its memory column cannot be for the shape it states, so only the trend compares."
)

_TIMED_RUNS = 3


class LinearStep(NamedTuple):
    """Holds the loss and the gradients of both weights."""

    loss: Tensor
    dw1: Tensor
    dw2: Tensor


@torch.no_grad()
def streamed_linear_gradients(x: Tensor, w1: Tensor, w2: Tensor, partitions: int) -> LinearStep:
    """Return loss and weight gradients of `L = sum(X W1 W2)`, one of D = `partitions` blocks of rows at a time.

    Equals `standard_linear_gradients(x, w1, w2)`. For each block X_i of rows:

        Y_i = X_i W1                    Z_i = Y_i W2                  L   += sum(Z_i)
        dZ_i = 1                        dY_i = dZ_i W2^T
        dW1 += X_i^T dY_i               dW2 += Y_i^T dZ_i             then drop Y_i, Z_i, dZ_i, dY_i

    The three sums run in fp32 for 16-bit inputs, else in the inputs' dtype, and the gradients are cast once at the end.

    Args:
        x: (T, M).
        w1: (M, N).
        w2: (N, K).
        partitions: D, from 1 to T. Where it does not divide T, the first T mod D blocks have one row more.
    """
    _check_partitions(partitions, rows=len(x))
    dw1, dw2 = zeros_for_sum(w1), zeros_for_sum(w2)
    loss = torch.zeros((), dtype=accumulator_dtype(x.dtype), device=x.device)
    for x_i in x.tensor_split(partitions):
        y_i = x_i @ w1
        z_i = y_i @ w2
        loss += z_i.sum(dtype=loss.dtype)
        dz_i = z_i.fill_(1.0)  # in place: Z_i is not needed any more
        dy_i = dz_i @ w2.mT
        add_product_(dw1, x_i.mT, dy_i)
        add_product_(dw2, y_i.mT, dz_i)
        # Before the next block's tensors are made, or two blocks would be alive at a time.
        del y_i, z_i, dz_i, dy_i
    return LinearStep(loss, dw1.to(w1.dtype), dw2.to(w2.dtype))


def standard_linear_gradients(x: Tensor, w1: Tensor, w2: Tensor) -> LinearStep:
    """Return the same by autograd: all of Y is kept from forward to backward, and all of Z and dY exist at some time."""
    w1, w2 = w1.detach().requires_grad_(), w2.detach().requires_grad_()
    loss = (x.detach() @ w1 @ w2).sum()
    dw1, dw2 = torch.autograd.grad(loss, (w1, w2))
    return LinearStep(loss.detach(), dw1, dw2)


def _check_partitions(partitions: int, *, rows: int) -> None:
    if partitions < 1:
        raise ValueError(f"partitions={partitions} leaves nothing to compute. Pass at least 1.")
    if partitions > rows:
        raise ValueError(
            f"partitions={partitions} is more than the {rows} rows of X, so that some would be empty. "
            f"Pass at most {rows} partitions, or at least {partitions} rows."
        )


@dataclass(frozen=True)
class LinearRecord:
    """Records one row of the benchmark; `step_ms` and `peak_bytes` are None where `error` says why.

    `peak_bytes` counts above X, W1 and W2: intermediate values and the gradients of the weights.
    """

    benchmark: str
    method: str
    partitions: int
    shape: dict[str, int]
    dtype: str
    step_ms: float | None
    peak_bytes: int | None
    error: str | None
    device: str
    versions: dict[str, str]
    command: str


def measure_linear(*, rows: int, width: int, device: torch.device, dtype: torch.dtype) -> Iterator[LinearRecord]:
    """Yield one record per entry of `PARTITIONS`, where 1 stands for standard backpropagation."""
    _check_partitions(max(PARTITIONS), rows=rows)
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, width, generator=generator, device=device, dtype=dtype)
    w1, w2 = torch.randn(2, width, width, generator=generator, device=device, dtype=dtype).mul_(width**-0.5)
    dtype_name = str(dtype).removeprefix("torch.")
    command = command_line("linear", rows=rows, width=width, device=device.type, dtype=dtype_name)
    for partitions in PARTITIONS:
        step_ms, peak_bytes, error = _measure(_step_function(x, w1, w2, partitions), device)
        yield LinearRecord(
            benchmark="linear",
            method="standard" if partitions == 1 else "streamed",
            partitions=partitions,
            shape={"rows": rows, "width": width},
            dtype=dtype_name,
            step_ms=step_ms,
            peak_bytes=peak_bytes,
            error=error,
            device=device_name(device),
            versions=versions(),
            command=command,
        )


def _step_function(x: Tensor, w1: Tensor, w2: Tensor, partitions: int) -> Callable[[], LinearStep]:
    if partitions == 1:
        return lambda: standard_linear_gradients(x, w1, w2)
    return lambda: streamed_linear_gradients(x, w1, w2, partitions)


def _measure(step: Callable[[], LinearStep], device: torch.device) -> tuple[float | None, int | None, str | None]:
    """Return `(median milliseconds, peak bytes, None)`, or Nones and the reason. The run that is counted warms up."""
    try:
        peak_bytes = peak_bytes_of(step, device)[1]
        return median_ms(step, device, _TIMED_RUNS), peak_bytes, None
    except torch.OutOfMemoryError:
        return None, None, "out of memory"
