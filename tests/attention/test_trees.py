"""The rectangles of a tree's chunks cover exactly what each token would see in a row of its own, each pair once."""

from __future__ import annotations

import random

import pytest
import torch

from streamgrad.attention import trees
from streamgrad.attention.trees import Tree, TreeMask, band_mask
from streamgrad.attention.varlen import RepeatedKeys, Segment

DEPTH_THREE = Tree((7, 12, 20, 21, 30, 33), (-1, 0, 0, 2, 2, -1))
# A prompt with five completions, one of them empty, and a second prompt without any.
COMPLETIONS = Tree((9, 15, 15, 16, 28, 31, 37), (-1, 0, 0, 0, 0, 0, -1))


def random_tree(seed: int) -> Tree:
    drawn = random.Random(seed)
    lengths = [drawn.choice([0, 1, 2, 5, 11]) for _ in range(drawn.randint(1, 8))]
    return Tree(tuple(torch.tensor(lengths).cumsum(0).tolist()), tuple(drawn.randint(-1, i - 1) for i in range(len(lengths))))


def path(tree: Tree, segment: int) -> list[int]:
    """The tokens of a row of its own that ends with this segment."""
    before = path(tree, tree.parents[segment]) if tree.parents[segment] >= 0 else []
    return before + list(range(*tree.span(segment)))


def seen_by(tree: Tree, window: int | None) -> torch.Tensor:
    seen = torch.zeros(tree.length, tree.length, dtype=torch.int)
    for segment in range(len(tree.ends)):
        row = path(tree, segment)
        for token in range(*tree.span(segment)):
            place = row.index(token)
            seen[token, row[max(0, place + 1 - (window or place + 1)) : place + 1]] = 1
    return seen


def covered(tree: Tree, window: int | None, chunk_size: int, *, joined: bool) -> torch.Tensor:
    """How often each pair is in a rectangle."""
    mask, count = TreeMask(tree, window), torch.zeros(tree.length, tree.length, dtype=torch.int)
    for start in range(0, tree.length, chunk_size):
        stop = min(start + chunk_size, tree.length)
        for part in mask.parts(start, stop, 1, joined=joined):
            if part.varlen is not None:
                keys = sum(segment.keys for segment in part.varlen.segments)
                assert keys <= 2 * chunk_size or window is not None, "more keys than a kernel may be given"
                for segment in part.varlen.segments:
                    add_segment(count, segment.moved(queries=-start, keys=-part.first), part.window)
                continue
            first, last = (start + query for query in part.queries or (0, stop - start))
            if part.band is not None:
                assert part.last - part.first < window, "a mask that is wider than the window"
                count[first:last, part.first : part.last] += band_mask(part, torch.device("cpu"))[0, 0]
            else:
                add_segment(count, Segment(0, first, last, part.first, part.last, part.causal), part.window)
    return count


def add_segment(count: torch.Tensor, segment: Segment, window: int | None) -> None:
    first, last, keys = segment.first_query, segment.last_query, [key for each in segment.key_intervals for key in range(*each)]
    seen = torch.ones(last - first, len(keys), dtype=torch.int)
    if segment.causal:
        seen = seen.tril(len(keys) - (last - first))
        seen = seen if window is None else seen.triu(len(keys) - (last - first) - window + 1)
    count[first:last, keys] += seen


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("tree", [DEPTH_THREE, COMPLETIONS, *map(random_tree, range(12))], ids=lambda tree: str(tree.parents))
def test_rectangles_cover_what_is_seen_once(monkeypatch, tree, window, joined):
    expected = seen_by(tree, window)
    for pairs in (16, 60, trees.PAIRS) if joined else [0]:
        monkeypatch.setattr(trees, "PAIRS", pairs)
        for chunk_size in (1, 3, 8, 50):
            assert torch.equal(covered(tree, window, chunk_size, joined=joined), expected), (chunk_size, pairs)


def test_a_prompt_is_one_rectangle_for_all_of_its_completions():
    """So the fastest kernel computes it at once; the completion next to the prompt goes on from it."""
    tree = Tree((100, 120, 140, 160), (-1, 0, 0, 0))
    found = [(part.queries, part.first, part.last, part.causal) for part in TreeMask(tree).parts(0, 160, 1)]
    assert found == [
        ((0, 120), 0, 120, True),
        ((120, 140), 120, 140, True),
        ((140, 160), 140, 160, True),
        ((120, 160), 0, 100, False),
    ]


@pytest.mark.parametrize(("prompt", "completion", "parts"), [(250, 1000, 1), (1000, 10, 2), (5000, 100, 3)])
def test_the_number_of_parts_does_not_grow_with_that_of_branches(prompt, completion, parts):
    """A long prompt's rectangles are calls of their own: its own, and that of all completions."""
    for branches in (2, 8, 16):
        tree = Tree(tuple(prompt + completion * branch for branch in range(branches + 1)), (-1, *[0] * branches))
        assert len(TreeMask(tree).parts(0, tree.length, 1, joined=True)) <= parts
        assert len(TreeMask(tree, window=300).parts(0, tree.length, 1, joined=True)) == 1


def test_keys_of_ancestors_are_repeated_and_their_gradients_summed():
    segments = [
        Segment(0, 0, 9, 2, 9, True),
        Segment(0, 9, 12, 14, 17, True, ((2, 7),)),
        Segment(0, 12, 13, 17, 18, True, ((2, 7),)),
    ]
    keys = RepeatedKeys.of(segments, torch.device("cpu"))
    assert keys.cu_seqlens_C.tolist() == [0, 7, 15, 21]
    key_BHSD = torch.randn(1, 2, 18, 4, dtype=torch.float64)
    gathered = keys.gather(key_BHSD)
    assert torch.equal(gathered.transpose(0, 1), torch.cat([segment.of_keys(key_BHSD) for segment in segments], dim=2)[0])
    total, term = torch.zeros_like(key_BHSD), torch.randn_like(gathered)
    for segment, own in zip(segments, term.split([7, 8, 6]), strict=True):
        segment.add_to_keys(total, own.transpose(0, 1).unsqueeze(0))
    pieces = keys.gradients(term, 2 * term, 1, 18)
    assert [piece[:2] for piece in pieces] == [(2, 9), (14, 18)]
    for first, last, dkey, dvalue in pieces:
        torch.testing.assert_close(dkey, total[:, :, first:last])
        torch.testing.assert_close(dvalue, 2 * total[:, :, first:last])


def test_positions_go_on_from_the_parent():
    assert DEPTH_THREE.positions().tolist() == [*range(7), *range(7, 12), *range(7, 15), 15, *range(15, 24), *range(3)]


@pytest.mark.parametrize(
    ("ends", "parents", "told"),
    [
        ((3, 2), (-1, 0), r"ends=\(3, 2\) are not in order"),
        ((3, 5), (-1, 1), "the parent of segment 1 is 1"),
        ((3, 5), (-1,), "2 ends and 1 parents"),
    ],
)
def test_what_is_no_tree_is_refused(ends, parents, told):
    with pytest.raises(ValueError, match=told):
        Tree(ends, parents)
