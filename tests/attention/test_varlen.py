"""Padding, documents and windows as segments: they say what the mask says, in the fewest keys that any query sees."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamgrad.attention.backends import Block
from streamgrad.attention.backends.block import visible_mask
from streamgrad.attention.masks import CausalMask
from streamgrad.attention.varlen import Segment
from streamgrad.engine.kv_chunk import spans
from streamgrad.hf.seams import with_documents

CPU = torch.device("cpu")


@st.composite
def masks(draw):
    """A mask of each row's padding, documents and one window, any of them absent, and the length."""
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 20))
    position = torch.arange(length)
    padding = None
    if draw(st.booleans()):
        bounds = [sorted(draw(st.tuples(st.integers(0, length), st.integers(0, length)))) for _ in range(batch)]
        padding = torch.stack([(position >= first) & (position < last) for first, last in bounds])
    documents = None
    if draw(st.booleans()):
        rows = draw(st.sampled_from([1, batch]))
        documents = torch.tensor([draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(rows)]).cumsum(1)
    window = draw(st.none() | st.integers(1, length + 2))

    def rule(b, h, q, k):
        seen = torch.ones_like(b + q + k, dtype=torch.bool)
        if documents is not None:
            row = b if len(documents) > 1 else 0 * b
            seen &= documents[row, q] == documents[row, k]
        return seen if window is None else seen & (k > q - window)

    return CausalMask(rule, padding, window, documents, batch=batch), length


def as_mask(part, start: int, stop: int, batch: int) -> torch.Tensor:
    """What a part says, over all keys before `stop`."""
    block = Block(scale=1.0, causal=part.causal, window=part.window, varlen=part.varlen)
    seen = visible_mask(block, stop - start, part.last - part.first, CPU)
    whole = torch.zeros(batch, 1, stop - start, stop, dtype=torch.bool)
    whole[..., part.first : part.last] = True if seen is None else seen
    return whole


@settings(max_examples=300)
@given(drawn=masks(), chunk_size=st.integers(1, 22))
def test_segments_say_what_the_mask_says(drawn, chunk_size):
    mask, length = drawn
    for start, stop in spans(length, chunk_size):
        part = mask.part(start, stop, mask.batch)
        if part.masked:
            after_padding = mask.padding_BT is not None and not mask.padding_BT[:, start:stop].all()
            assert mask.window is not None and after_padding, "only a window over queries on padding is not made of segments"
            continue
        expected = mask.visible(start, stop, 0, CPU).expand(mask.batch, 1, -1, -1)
        assert torch.equal(as_mask(part, start, stop, mask.batch), expected)
        if expected.any():
            seen = expected.any(dim=2).any(dim=0).flatten().nonzero()
            assert (part.first, part.last) == (seen.min(), seen.max() + 1), "keys are read that no query sees"


def test_what_no_segments_can_say_keeps_its_mask():
    holes = torch.tensor([[True, False, True, True]])
    assert CausalMask(padding_BT=holes).part(0, 4, 1).masked
    assert CausalMask(lambda b, h, q, k: k % 2 == 0, has_other_rule=True).part(0, 4, 1).masked
    right = torch.tensor([[True, True, True, False, False, False]])
    windowed = CausalMask(lambda b, h, q, k: k > q - 2, padding_BT=right, window=2)
    # Token 3, on the padding, sees token 2; tokens 4 and 5 see nothing.
    assert [windowed.part(start, start + 2, 1).masked for start in (0, 2, 4)] == [False, True, False]


def test_one_segment_for_all_is_a_plain_block():
    """So that the kernel for plain blocks, which is the fastest, takes it."""
    all_real = CausalMask(padding_BT=torch.ones(2, 8, dtype=torch.bool)).part(4, 8, 2)
    assert (all_real.first, all_real.last, all_real.causal, all_real.varlen) == (0, 8, True, None)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2]])
    inside = CausalMask(documents_BT=documents).part(4, 7, 1)
    assert (inside.first, inside.last, inside.causal, inside.varlen) == (2, 7, True, None)
    across = CausalMask(documents_BT=documents).part(4, 8, 1)
    assert across.varlen.segments == (Segment(0, 0, 3, 0, 5, True), Segment(0, 3, 4, 5, 6, True))
    on_padding = CausalMask(padding_BT=torch.tensor([[True] * 3 + [False] * 5])).part(4, 8, 1)
    assert (on_padding.first, on_padding.last, on_padding.causal, on_padding.varlen) == (0, 3, False, None)
    assert CausalMask(window=4).part(2, 4, 1).window is None, "a window that hides nothing is none"
    windowed = CausalMask(window=4).part(4, 8, 1)
    assert (windowed.first, windowed.causal, windowed.window) == (1, True, 4)


def test_boundaries_of_one_row_hold_for_every_row():
    mask = with_documents(CausalMask(), torch.tensor([0, 3, 8]), 8)
    assert [segment.row for segment in mask.part(2, 8, batch=3).varlen.segments] == [0, 0, 1, 1, 2, 2]


def test_documents_and_padding_come_from_the_device_in_one_copy(monkeypatch):
    copies = []
    plain = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.shape) or plain(tensor))
    real = torch.ones(3, 40, dtype=torch.bool)
    real[1, 30:] = False
    mask = CausalMask(padding_BT=real, documents_BT=torch.arange(40).repeat(3, 1) // 7)
    for start, stop in spans(40, 6):
        mask.part(start, stop, 3)
    assert copies == [(3, 2, 40)]
