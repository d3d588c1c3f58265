"""Sequence parallelism (Ulysses): the tokens of a sequence are all in this process, or spread over the ranks of a group.

With P ranks, T tokens on each (P T in all) and chunks of L tokens per rank, rank r's chunk c in *chunk order* is global tokens

    [c P L + r l,  c P L + (r + 1) l)          l = L, or less in the last chunk

so the ranks' chunks c together are one contiguous global chunk, `P` times the local span, and all ranks work on the same global
chunk at the same time. Around attention, and nowhere else, ranks trade tokens for heads:

    to_heads:   (B, H, L, D), my tokens of all heads   ->  (B, H/P, P L, D), all tokens of my heads
    to_tokens:  the inverse, which is also the transpose: each is the other's backward pass

P divides the query heads. Where it does not divide the G key heads, each is copied before the exchange, so often that every rank
gets those of its queries: P / gcd(P, G) times. The gradients of the copies are summed after their exchange. `engine.ring` lets
more ranks share a sequence: then only those of `heads`, a part of the group, trade tokens for heads.

A model is called in *slice order*, with tokens `[r T, (r + 1) T)` on rank r. `to_chunk_order` and `to_slice_order` convert.

Known limits: trading tokens for heads does not overlap with computation.

Shapes: B batch, H heads, T tokens of this rank, L tokens of a chunk, S tokens of a global chunk, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamgrad.ops.accumulate import accumulator_dtype
from streamgrad.ops.autograd import first_order_only

# Keys and values, or their gradients, that other ranks send: a call waits for them.
Arriving = Callable[[], Sequence[Tensor]]


class SequenceSharing:
    """A sequence whose tokens are all in this process: nothing is communicated."""

    ranks = 1
    ring_ranks = 1  # of which none brings the other's keys by trading heads
    chunk_size: int | None = None  # of every layer, if the order of tokens depends on it

    def to_heads(self, tensor_BHLD: Tensor) -> Tensor:
        return tensor_BHLD

    def to_tokens(self, tensor_BHSD: Tensor) -> Tensor:
        return tensor_BHSD

    def keys_to_heads(self, tensor_BGLD: Tensor) -> Tensor:
        """Return `to_heads` of keys or values: all tokens of the heads that this rank's queries attend to."""
        return tensor_BGLD

    def keys_to_tokens(self, gradient_BGSD: Tensor, heads: int) -> Tensor:
        """Return the gradient of keys or values with `heads` heads from those that `keys_to_heads` has made of them."""
        return gradient_BGSD

    def query_spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the positions in the sequence of the queries that this rank attends with for its tokens `[start, stop)`."""
        return [(self.ranks * start, self.ranks * stop)]

    def gather_over_ring(self, start: int, stop: int, key_BGLD: Tensor, value_BGLD: Tensor) -> Arriving | None:
        """Start to gather the other ranks' keys and values of a chunk; None where `keys_to_heads` has brought all of them."""
        return None

    def sum_over_ring(self, start: int, stop: int, sums: Callable[[int, int], Sequence[Tensor]]) -> Arriving | None:
        """Start to sum the gradients of a chunk's keys and values over a ring; `sums` gives this rank's. None without a ring."""
        return None

    def kept_keys(self, length: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return those of the whole sequence's keys and values that this rank need not gather over the ring.

        `length` counts this rank's tokens.
        """
        return tensors

    def own_heads(self, tensor_H: Tensor) -> Tensor:
        """Return the entries of the heads that this rank attends with."""
        return tensor_H

    def whole(self, ordered_BT: Tensor) -> Tensor:
        """Return the whole sequence from the tokens of this process."""
        return ordered_BT

    def most(self, *numbers: float) -> tuple[float, ...]:
        """Return the maximum of each number over all ranks, so that ranks that decide by it decide alike."""
        return numbers


ALONE = SequenceSharing()


class Ulysses(SequenceSharing):
    """A sequence spread over the ranks of `group`: `length` tokens on each, in chunks of `chunk_size`, on `device`."""

    def __init__(self, group: dist.ProcessGroup, length: int, chunk_size: int, device: torch.device) -> None:
        self.group, self.length, self.device = group, length, device
        self.chunk_size: int = min(chunk_size, length)
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.heads: dist.ProcessGroup | None = group  # which trade tokens for heads
        self.head_ranks, self.head_rank = self.ranks, self.rank

    def to_heads(self, tensor_BHLD: Tensor) -> Tensor:
        if (heads := tensor_BHLD.shape[1]) % self.head_ranks:
            ranks = self.head_ranks
            raise ValueError(f"{heads} heads cannot be split over {ranks} ranks. The number of ranks must divide {heads}.")
        # Chunk by chunk: tokens of two chunks that are adjacent here are not adjacent in the sequence.
        return self._swapped(tensor_BHLD, self.chunk_size, 1, 2)

    def to_tokens(self, tensor_BHSD: Tensor) -> Tensor:
        return self._swapped(tensor_BHSD, self.head_ranks * self.chunk_size, 2, 1)

    def keys_to_heads(self, tensor_BGLD: Tensor) -> Tensor:
        copies = self._copies(tensor_BGLD.shape[1])
        return self.to_heads(tensor_BGLD if copies == 1 else tensor_BGLD.repeat_interleave(copies, dim=1))

    def keys_to_tokens(self, gradient_BGSD: Tensor, heads: int) -> Tensor:
        parts_BHLD = self.to_tokens(gradient_BGSD)
        if (copies := self._copies(heads)) == 1:
            return parts_BHLD
        total_BGLD = parts_BHLD.unflatten(1, (heads, copies)).sum(dim=2, dtype=accumulator_dtype(parts_BHLD.dtype))
        return total_BGLD.to(parts_BHLD.dtype)

    def _copies(self, key_heads: int) -> int:
        return self.head_ranks // math.gcd(self.head_ranks, key_heads)

    def _swapped(self, tensor: Tensor, size: int, cut: int, join: int) -> Tensor:
        """Cut axis `cut` of chunks of `size` tokens into pieces, send each rank its own, and join what arrives along axis `join`.

        The result is laid out in memory as (B, L, H, D), as projections make and consume heads: some families take a view of it.
        """
        if self.heads is None:
            return tensor
        parts = []
        for chunk in tensor.split(size, dim=2):
            pieces = torch.stack(chunk.chunk(self.head_ranks, dim=cut))
            arrived = torch.empty_like(pieces)
            dist.all_to_all_single(arrived, pieces, group=self.heads)
            parts.append(torch.cat([piece.transpose(1, 2) for piece in arrived.unbind(0)], dim=3 - join))
        return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).transpose(1, 2)

    def own_heads(self, tensor_H: Tensor) -> Tensor:
        return tensor_H.chunk(self.head_ranks)[self.head_rank]

    def most(self, *numbers: float) -> tuple[float, ...]:
        return tuple(max(of_ranks) for of_ranks in zip(*self.numbers_of_ranks(numbers), strict=True))

    def check_agreement(self, values: Mapping[str, int]) -> None:
        """Raise if the values differ between ranks, which would then wait for each other for ever or mix up their tokens."""
        listed = self.numbers_of_ranks(tuple(values.values()))
        for name, of_ranks in zip(values, zip(*listed, strict=True), strict=True):
            if len(set(of_ranks)) > 1:
                numbers = ", ".join(f"{number:.0f}" for number in of_ranks)
                raise ValueError(
                    f"the ranks that share a sequence disagree about {name}: {numbers}, from the first rank to the last. Cut a "
                    "sequence into slices of equal length, padded at its end with labels of -100, and call the model in the same "
                    "way on every rank."
                )

    def numbers_of_ranks(self, numbers: tuple[float, ...]) -> list[list[float]]:
        own = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        listed = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(listed, own, group=self.group)
        return torch.stack(listed).tolist()

    # --- slice order and chunk order -----------------------------------------------------------------------------------

    def to_chunk_order(self, slice_BT: Tensor) -> Tensor:
        """Return the rank's tokens in chunk order, (B, T, ...), from its tokens in slice order."""
        return _ToChunkOrder.apply(self, slice_BT)

    def to_slice_order(self, ordered_BT: Tensor) -> Tensor:
        """Return the rank's tokens in slice order, (B, T, ...), from its tokens in chunk order."""
        return _ToSliceOrder.apply(self, ordered_BT)

    def gather(self, slice_BT: Tensor) -> Tensor:
        """Return the whole sequence, in order, from the slices of all ranks."""
        slices = [torch.empty_like(slice_BT, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(slices, slice_BT.contiguous(), group=self.group)
        return torch.cat(slices, dim=1)

    def whole(self, ordered_BT: Tensor) -> Tensor:
        """Return the whole sequence, in order, from the ranks' tokens in chunk order; the ranks' gradients of it are added."""
        return self.joined(self.to_slice_order(ordered_BT))

    def joined(self, slice_BT: Tensor) -> Tensor:
        """Return `gather` of the slices of all ranks; the ranks' gradients of it are added."""
        return _Whole.apply(self, slice_BT)

    @cached_property
    def positions_T(self) -> Tensor:
        """Return the positions in the sequence of the rank's tokens in chunk order."""
        place_T = torch.arange(self.length, device=self.device)
        start_T = place_T // self.chunk_size * self.chunk_size
        size_T = (self.length - start_T).clamp(max=self.chunk_size)
        return self.ranks * start_T + self.rank * size_T + place_T - start_T

    @cached_property
    def _order_T(self) -> Tensor:
        """Return the order that sorts the slice's tokens by destination rank; it is stable, so ranks receive them in order."""
        return self._owners_T.argsort(stable=True)

    @cached_property
    def _owners_T(self) -> Tensor:
        """Return the rank that has each of the slice's tokens in chunk order."""
        place_T = self.rank * self.length + torch.arange(self.length, device=self.device)
        start_T = place_T // (self.ranks * self.chunk_size) * self.chunk_size
        return (place_T - self.ranks * start_T) // (self.length - start_T).clamp(max=self.chunk_size)

    @cached_property
    def _sent(self) -> list[int]:
        return self._owners_T.bincount(minlength=self.ranks).tolist()

    @cached_property
    def _received(self) -> list[int]:
        return (self.positions_T // self.length).bincount(minlength=self.ranks).tolist()

    def _chunk_ordered(self, slice_BT: Tensor) -> Tensor:
        sent_TB = slice_BT.transpose(0, 1)[self._order_T].contiguous()
        received_TB = torch.empty_like(sent_TB)
        dist.all_to_all_single(received_TB, sent_TB, self._received, self._sent, group=self.group)
        return received_TB.transpose(0, 1).contiguous()

    def _slice_ordered(self, ordered_BT: Tensor) -> Tensor:
        sent_TB = ordered_BT.transpose(0, 1).contiguous()
        received_TB = torch.empty_like(sent_TB)
        dist.all_to_all_single(received_TB, sent_TB, self._sent, self._received, group=self.group)
        slice_BT = torch.empty_like(ordered_BT, memory_format=torch.contiguous_format)
        slice_BT.transpose(0, 1)[self._order_T] = received_TB
        return slice_BT


class _ToChunkOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharing: Ulysses, slice_BT: Tensor) -> Tensor:
        ctx.sharing = sharing
        ctx.materialize_grads = False
        return sharing._chunk_ordered(slice_BT)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dordered_BT: Tensor) -> tuple[None, Tensor]:
        return None, ctx.sharing._slice_ordered(dordered_BT)


class _ToSliceOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharing: Ulysses, ordered_BT: Tensor) -> Tensor:
        ctx.sharing = sharing
        ctx.materialize_grads = False
        return sharing._slice_ordered(ordered_BT)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dslice_BT: Tensor) -> tuple[None, Tensor]:
        return None, ctx.sharing._chunk_ordered(dslice_BT)


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sharing: Ulysses, slice_BT: Tensor) -> Tensor:
        ctx.sharing = sharing
        ctx.materialize_grads = False
        return sharing.gather(slice_BT)

    @staticmethod
    @first_order_only
    def backward(ctx: Any, dwhole_BT: Tensor) -> tuple[None, Tensor]:
        sharing = ctx.sharing
        total_BT = dwhole_BT.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total_BT, group=sharing.group)
        return None, total_BT.narrow(1, sharing.rank * sharing.length, sharing.length)
