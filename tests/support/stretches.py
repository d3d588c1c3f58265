"""Steps whose chunks run forward several at a time, as plans on a GPU say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

from streamgrad.hf.step_plan import Planner


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
