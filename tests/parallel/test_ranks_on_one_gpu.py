"""Two processes on one GPU, over gloo: CUDA streams, pinned memory and plans of ranks where there is no second GPU."""

from __future__ import annotations

import pytest
import torch

import engine_worker
from engine_worker import check_cases, launch
from gradients import assert_same_step
from sequence_worker import Case, on_one_gpu, plain_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HOST = {"offload": "host"}
EXCHANGES = [
    *(Case(chunk_size=5, keep=keep, options={"offload": place}) for keep in ("input", "attention") for place in ("host", "none")),
    Case(chunk_size=5, keep="all"),
    *(Case(chunk_size=5, kind=kind, options=HOST) for kind in ("padded", "packed")),
    # Ranks with unequal room agree about their plan; both hold what libraries keep on a GPU for themselves.
    Case("qwen3_moe", keep="auto", chunk_size="auto", options={"budgets": ("64GiB", "1GiB")}),
]
RINGS = [
    *(Case(ring=2, key_heads=1, chunk_size=4, keep=keep, options=HOST) for keep in ("input", "attention")),
    Case("mistral", ring=2, kind="packed", chunk_size=4),
]


@pytest.mark.parametrize("cases", [EXCHANGES, RINGS], ids=["exchanges", "rings"])
def test_ranks_that_share_a_sequence(subtests, cases):
    ranks = launch(on_one_gpu, cases)
    for index, case in enumerate(cases):
        expected = plain_step(case, "cuda")
        for rank in ranks:
            with subtests.test(str(case)):
                assert_same_step(rank["steps"][index].step, expected, 1e-9)
        kept = [rank["steps"][index].kept for rank in ranks]
        with subtests.test(f"{case}, plans"):
            assert kept[0] == kept[1]
            assert case.options.get("offload") != "host" or any("host" in policy for policy in kept[0])


def test_ddp(subtests):
    check_cases(
        subtests, [engine_worker.Case("ddp", keep=keep, device="cuda", offload="host") for keep in ("input", "attention")]
    )
