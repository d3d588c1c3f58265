"""Ranks that share sequences: gradients of plain backpropagation on the whole, the bytes of Ulysses, 1/P of the memory."""

from __future__ import annotations

from engine_worker import launch
from gradients import assert_same_step
from sequence_worker import Case, plain_step, run_cases

TWO_RANKS = [
    *(Case(chunk_size=size) for size in (1, 5, 12, 64)),  # 5: a last chunk of 2 tokens
    *(Case(keep=keep, chunk_size=5) for keep in ("attention", "all")),
    *(Case(kind=kind, chunk_size=5) for kind in ("padded", "left padded", "packed", "prompt", "positions", "embedded")),
    Case(kind="packed", chunk_size=12),
    Case(kind="packed", keep="all", chunk_size=5),
    Case("mistral", kind="packed"),
    Case("mistral", length=22, kind="padded", chunk_size=3, keep="attention"),
    Case("gpt_oss", kind="positions"),
    Case("gemma2", chunk_size=5),
    Case("qwen3_moe", chunk_size=5),
    Case("granite", chunk_size=5),
    Case(lora=True, chunk_size=5),
    Case(lora=True, keep="attention"),
    Case(chunk_size=4, options={"memory_budget": "1GiB"}, keep="auto"),
    Case(chunk_size="auto", options={"memory_budget": "1GiB"}, keep="auto"),
]
FOUR_RANKS = [Case(ranks=4, chunk_size=2), Case("mistral", kind="packed", ranks=4, chunk_size=4), Case(ranks=4, kind="padded")]


def check(subtests, cases: list[Case]) -> None:
    by_rank = launch(run_cases, cases, world_size=cases[0].ranks)
    for index, case in enumerate(cases):
        expected = plain_step(case)
        for rank, outcomes in enumerate(by_rank):
            with subtests.test(f"{case}, rank {rank}"):
                assert_same_step(outcomes[index].step, expected, 1e-10)


def test_two_ranks(subtests):
    check(subtests, TWO_RANKS)


def test_four_ranks(subtests):
    check(subtests, FOUR_RANKS)
