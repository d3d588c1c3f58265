"""Two kernels on the CPU by the names of those between which prices decide: "cudnn" and "flash"."""

from __future__ import annotations

from collections.abc import Callable

from streamgrad.attention import backends
from streamgrad.attention.backends.eager import EagerBackend
from streamgrad.attention.backends.sdpa import SdpaBackend

Log = list[tuple[str, bool, tuple[int, int]]]  # which kernel, whether in backward, and for how many queries and keys


class Prices:
    """Decides as `is_worth(backward)` says; stands for `PlanPrices`."""

    def __init__(self, is_worth: Callable[[bool], bool]) -> None:
        self._is_worth = is_worth

    def is_worth_a_plan(self, query, key, causal, *, backward=False):
        return self._is_worth(backward)


def two_kernels(monkeypatch, is_worth: Callable[[bool], bool]) -> Log:
    """Let models that are enabled from now on have these two kernels, by these prices; return the log of their calls."""
    log: Log = []

    def logged(kernel, name):
        class Logged(kernel):
            def forward(self, query, key, value, block):
                log.append((self.name, False, (query.shape[2], key.shape[2])))
                return super().forward(query, key, value, block)

            def backward(self, dout, query, key, value, done, block):
                log.append((self.name, True, (query.shape[2], key.shape[2])))
                return super().backward(dout, query, key, value, done, block)

        Logged.name = name
        return Logged()

    monkeypatch.setattr(backends, "_ALL", (logged(SdpaBackend, "cudnn"), logged(EagerBackend, "flash"), EagerBackend()))
    monkeypatch.setattr(backends, "_FOUND", {})
    monkeypatch.setattr(backends, "PRICES", Prices(is_worth))
    return log
