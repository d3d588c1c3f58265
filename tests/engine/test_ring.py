"""Rings of ranks without ranks: which tokens each has, equal work, and what is computed while keys are on their way."""

from __future__ import annotations

import pytest
import torch

from gradients import more
from streamgrad.attention.backends.eager import EagerBackend
from streamgrad.attention.masks import CausalMask
from streamgrad.attention.streamed import streamed_attention
from streamgrad.engine.kv_chunk import Chunk, KeyValueStream
from streamgrad.engine.ring import Ring
from streamgrad.engine.ulysses import ALONE, SequenceSharing


def ranks_of(ring: int, heads: int, length: int, chunk_size: int) -> list[Ring]:
    """All ranks of a ring, for what they compute without communicating."""
    found = []
    for rank in range(ring * heads):
        sharing = Ring.__new__(Ring)
        sharing.ranks, sharing.rank, sharing.length, sharing.chunk_size = ring * heads, rank, length, min(chunk_size, length)
        sharing.ring_ranks, sharing.head_ranks = ring, heads
        sharing.ring_rank, sharing.head_rank = divmod(rank, heads)
        sharing.device = torch.device("cpu")
        found.append(sharing)
    return found


SIZES = [(2, 1, 6, 4), (4, 1, 5, 1), (3, 2, 7, 3), (2, 4, 9, 4), (8, 1, 16, 16)]


@pytest.mark.parametrize("sizes", [*SIZES[:3], *(pytest.param(sizes, marks=more) for sizes in SIZES[3:])], ids=str)
def test_every_token_is_on_one_rank(sizes):
    """And the slice that it comes from knows which."""
    ranks = ranks_of(*sizes)
    length = sizes[2]
    for rank in ranks:
        assert torch.equal(rank.positions_T, rank.positions_T.sort().values), "ranks receive their tokens in order"
    owners = torch.cat([rank._owners_T for rank in ranks])
    assert owners.shape == (len(ranks) * length,)
    for number, rank in enumerate(ranks):
        assert torch.equal((owners == number).nonzero().flatten(), rank.positions_T)


@pytest.mark.parametrize(("ring", "heads", "chunk_size"), [(2, 1, 4), (4, 2, 3), (8, 1, 6)])
def test_groups_have_equal_work_in_every_chunk(ring, heads, chunk_size):
    """The number of keys that a group's queries see under a causal mask, where blocks have equal lengths."""
    ranks = ranks_of(ring, heads, 3 * chunk_size, chunk_size)
    for start in range(0, 3 * chunk_size, chunk_size):
        work = {
            sum(1 + query for first, last in rank.query_spans(start, start + chunk_size) for query in range(first, last))
            for rank in ranks
        }
        assert len(work) == 1


class _Watched(SequenceSharing):
    """One rank that exchanges with itself as a ring would, and notes when."""

    ring_ranks = 2

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def gather_over_ring(self, start, stop, key_BGLD, value_BGLD):
        self.log.append("keys leave")
        return lambda: self.log.append("keys are there") or (key_BGLD, value_BGLD)

    def sum_over_ring(self, start, stop, sums):
        self.log.append("gradients leave")
        totals = [total.clone() for total in sums(start, stop)]
        return lambda: self.log.append("gradients are there") or totals


class _WatchedKernel(EagerBackend):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def forward(self, query_BHLD, key_BGSD, *args):
        self.log.append(f"forward over {key_BGSD.shape[2]} keys")
        return super().forward(query_BHLD, key_BGSD, *args)

    def backward(self, dout_BHLD, query_BHLD, key_BGSD, *args):
        self.log.append(f"backward over {key_BGSD.shape[2]} keys")
        return super().backward(dout_BHLD, query_BHLD, key_BGSD, *args)


def attended(sharing: SequenceSharing, log: list[str], mask: CausalMask) -> list[torch.Tensor]:
    """Output and gradients of the second of two chunks, of 5 and 3 tokens."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 8, 4, generator=generator, dtype=torch.float64) for heads in (2, 1, 1))
    stream = KeyValueStream(8)
    stream.write(0, 5, key[:, :, :5], value[:, :, :5])
    chunk = Chunk(5, 8, stream, mask, [_WatchedKernel(log)], sharing=sharing)
    own = [tensor[:, :, 5:].clone().requires_grad_() for tensor in (query, key, value)]
    out = streamed_attention(chunk, *own, scale=0.5)
    out.backward(torch.ones_like(out))
    return [out.detach(), *(tensor.grad for tensor in own), *stream.sums(0, 5)]


def test_earlier_keys_are_computed_with_while_others_are_on_their_way():
    log: list[str] = []
    for actual, expected in zip(attended(_Watched(log), log, CausalMask()), attended(ALONE, [], CausalMask()), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    assert log == [
        "keys leave", "forward over 5 keys", "keys are there", "forward over 3 keys",
        "backward over 3 keys", "gradients leave", "backward over 5 keys", "gradients are there",
    ]  # fmt: skip


def test_a_window_waits():
    log: list[str] = []
    mask = CausalMask(lambda batch, head, query, key: key > query - 4, window=4)
    for actual, expected in zip(attended(_Watched(log), log, mask), attended(ALONE, [], mask), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-13, atol=1e-13)
    assert log[:2] == ["keys leave", "keys are there"]
