"""Steps whose chunks run forward several at a time, as plans on a GPU say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import streamgrad
from gradients import Step, run_step
from lora import inner_of
from streamgrad.attention.backends.sdpa import SdpaBackend
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.step_plan import Planner
from tiny import tokens

CHUNK = 4


@contextmanager
def chunks_in_forward(count: int) -> Iterator[None]:
    """Let every plan run so many chunks forward together."""

    def with_count(planned):
        def plan(self, *args, **kwargs):
            found = planned(self, *args, **kwargs)
            return replace(found, chunks_in_forward=(count,) * len(found.policies))

        return plan

    with ExitStack() as patches:
        for name in ("plan", "plan_without_costs"):
            patches.enter_context(mock.patch.object(Planner, name, with_count(getattr(Planner, name))))
        yield


def calls_in_step(model: nn.Module, length: int, count: int, *, layer: int = 0, **options: Any) -> tuple[list[int], Step]:
    """Return the tokens of each call of a layer's norm in a second step, after the trial, and that step."""
    seen, ids = [], tokens(1, length)
    norm = decoder_layers(inner_of(model).get_decoder())[layer].input_layernorm
    handle = norm.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    streamgrad.enable(model, chunk_size=CHUNK, **options)
    with chunks_in_forward(count):
        for _ in range(2):
            seen.clear()
            torch.manual_seed(1)
            step = run_step(model, {"input_ids": ids, "labels": ids})
    streamgrad.disable(model)
    handle.remove()
    return seen, step


class SummedInTwoParts(TorchDispatchMode):
    """Rounds products of more rows than a chunk has once more, and lets attention in 16 bits run together.

    Sums in fp32 in another order would not do: whether any of them is rounded to another number depends on the processor.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.count = rows, 0

    def __enter__(self) -> SummedInTwoParts:
        attend = SdpaBackend.forward
        self._patch = mock.patch.object(SdpaBackend, "forward", lambda *args: replace(attend(*args), held_scores=False))
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if function is not torch.ops.aten.mm.default or args[0].shape[0] <= self.rows:
            return function(*args, **(kwargs or {}))
        self.count += 1
        left, right = args
        third = left.shape[1] // 3
        return left[:, third:] @ right[third:] + left[:, :third] @ right[:third]
