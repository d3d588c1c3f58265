"""Host buffers of what layers keep, as far as they can be tested without a GPU."""

from __future__ import annotations

import torch

from streamgrad.core.storage import PinnedPool


class Plain(PinnedPool):
    """A pool that pins nothing."""

    def _allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)


def test_buffers_are_used_again_for_what_is_about_as_large():
    pool = Plain(torch.device("cuda"))
    large = pool.take(1000)
    pool.give_back(large)
    small = pool.take(10)
    assert small is not large and pool.total_bytes == 1010
    assert pool.take(900) is large and pool.total_bytes == 1010


def test_buffers_that_have_become_too_small_are_given_up():
    pool = Plain(torch.device("cuda"))
    pool.give_back(pool.take(1000))
    pool.take(1500)
    assert pool.total_bytes == 1500
