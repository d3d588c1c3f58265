"""The ring: more ranks than heads share a sequence. Ranks that have the same heads gather each other's keys.

P = r u ranks are r groups of u consecutive ranks. Inside a group, ranks trade tokens for heads (`engine.ulysses`), so u divides
the query heads. Rank i of every group then has the same heads; these r ranks are a ring. Each attends with the queries of its own
group to the keys of all groups.

All ranks work on the same global chunk [c P L, (c + 1) P L) at the same time. It is cut into 2 r blocks, of which group j has the
blocks j and 2 r - 1 - j (zig-zag). So under causal attention all groups have equal work in every chunk:

    blocks of group   0  1  ...  r-1  r-1  ...  1  0          a tokens each in the first half and u l - a in the second
                                                              a = ceil(u l / 2);  l = L, or less in the last chunk

There is one exchange for each chunk and layer in either direction, at a place that the streamed layer has:

    forward   when the chunk's keys are made: all-gather of its keys and values. Attention to the keys of earlier chunks, which
              are there already, is computed meanwhile.
    backward  before the gradient of the chunk's keys flows on into their projections: reduce-scatter, in fp32, of what the ranks'
              queries owe to the chunk's keys and values. What they owe to earlier keys is computed meanwhile.

By then every later chunk has run backward on every rank, and this one's attention as well, so the sum is complete. In all, a rank
sends its keys and values to r - 1 others, as if they travelled round a ring.

Known limits: for the layer at work, a rank holds the keys and values of the whole sequence, for its heads, and the sums of their
gradients. Where a window, documents or padding hide keys, attention waits for the exchange.

Shapes: B batch, G key heads of this rank, L tokens of a chunk, S tokens of a group's chunk, T tokens of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from streamgrad.engine.ulysses import Arriving, Ulysses
from streamgrad.ops.accumulate import accumulator_dtype

# By the names that torch 2.13 has given them.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Ring(Ulysses):
    """A sequence spread over the ranks of `group`, which has `ring_ranks` groups; `heads` and `ring` are this rank's parts of it.

    `heads` is None where each group has one rank, which then keeps all heads.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        heads: dist.ProcessGroup | None,
        ring: dist.ProcessGroup,
        length: int,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        super().__init__(group, length, chunk_size, device)
        self.ring, self.ring_ranks, self.ring_rank = ring, dist.get_world_size(ring), dist.get_rank(ring)
        self.heads, self.head_ranks, self.head_rank = heads, 1, 0
        if heads is not None:
            self.head_ranks, self.head_rank = dist.get_world_size(heads), dist.get_rank(heads)

    def query_spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        return list(self._spans(self.ring_rank, start, stop))

    def _spans(self, group: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks of a group in the chunks of `[start, stop)`, in order."""
        for chunk in range(start, stop, self.chunk_size):
            tokens = self.head_ranks * (min(chunk + self.chunk_size, stop) - chunk)
            early, late = tokens - tokens // 2, tokens // 2
            first = self.ranks * chunk + group * early
            yield first, first + early
            if late:
                first = self.ranks * chunk + self.ring_ranks * early + (self.ring_ranks - 1 - group) * late
                yield first, first + late

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield every group's blocks in `[start, stop)`: the group, the block's place in the group's tokens and in all tokens."""
        for group in range(self.ring_ranks):
            place = 0
            for first, last in self._spans(group, start, stop):
                in_chunk = slice(first - self.ranks * start, last - self.ranks * start)
                yield group, slice(place, place + last - first), in_chunk
                place += last - first

    def gather_over_ring(self, start: int, stop: int, key_BGLD: Tensor, value_BGLD: Tensor) -> Arriving:
        own_2BGSD = torch.stack([key_BGLD, value_BGLD])
        arrived = own_2BGSD.new_empty(self.ring_ranks, *own_2BGSD.shape)
        work = _all_gather(arrived.flatten(0, 1), own_2BGSD, group=self.ring, async_op=True)

        def wait() -> Sequence[Tensor]:
            work.wait()
            whole_2BGSD = arrived.new_empty(*arrived.shape[1:4], self.ranks * (stop - start), arrived.shape[5])
            for group, in_group, in_chunk in self._blocks(start, stop):
                whole_2BGSD[:, :, :, in_chunk] = arrived[group][:, :, :, in_group]
            return whole_2BGSD.unbind(0)

        return wait

    def sum_over_ring(self, start: int, stop: int, sums: Callable[[int, int], Sequence[Tensor]]) -> Arriving:
        totals = sums(self.ranks * start, self.ranks * stop)
        batch, heads, length, size = totals[0].shape
        dtype = accumulator_dtype(totals[0].dtype)
        sent = totals[0].new_empty(self.ring_ranks, len(totals), batch, heads, length // self.ring_ranks, size, dtype=dtype)
        for group, in_group, in_chunk in self._blocks(start, stop):
            for part_BGSD, total_BGSD in zip(sent[group], totals, strict=True):
                part_BGSD[:, :, in_group] = total_BGSD[:, :, in_chunk]
        own_2BGSD = torch.empty_like(sent[0])
        work = _reduce_scatter(own_2BGSD, sent.flatten(0, 1), group=self.ring, async_op=True)

        def wait() -> Sequence[Tensor]:
            work.wait()
            return own_2BGSD.unbind(0)

        return wait

    def kept_keys(self, length: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        spans = self.query_spans(0, length)
        return tuple(torch.cat([tensor_BGTD[:, :, first:last] for first, last in spans], dim=2) for tensor_BGTD in tensors)

    @cached_property
    def positions_T(self) -> Tensor:
        found = []
        for start in range(0, self.length, self.chunk_size):
            stop = min(start + self.chunk_size, self.length)
            group_S = torch.cat([torch.arange(*span, device=self.device) for span in self._spans(self.ring_rank, start, stop)])
            found.append(group_S.chunk(self.head_ranks)[self.head_rank])
        return torch.cat(found)

    @cached_property
    def _owners_T(self) -> Tensor:
        place_T = self.rank * self.length + torch.arange(self.length, device=self.device)
        start_T = place_T // (self.ranks * self.chunk_size) * self.chunk_size
        tokens_T = (self.length - start_T).clamp(max=self.chunk_size)
        late_T = self.head_ranks * tokens_T // 2
        early_T = self.head_ranks * tokens_T - late_T
        place_T = place_T - self.ranks * start_T
        beyond_T = place_T - self.ring_ranks * early_T
        some_T = late_T.clamp(min=1)  # where it is 0, no token is beyond
        group_T = torch.where(beyond_T < 0, place_T // early_T, self.ring_ranks - 1 - beyond_T // some_T)
        in_group_T = torch.where(beyond_T < 0, place_T % early_T, early_T + beyond_T % some_T)
        return group_T * self.head_ranks + in_group_T // tokens_T
