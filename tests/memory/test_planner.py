"""Plans, by arithmetic alone: the fastest that fits, what it promises, and how amounts of memory are read."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import streamgrad
from streamgrad.config import parse_bytes
from streamgrad.engine.policy import LayerPolicy
from streamgrad.memory.costs import LayerCosts, Shape, embedding_parts
from streamgrad.memory.device import usable_share
from streamgrad.memory.planner import (
    LARGE_CHUNKS,
    LAST_CHUNKS,
    LONGEST_WITH_MORE_ON_HOST,
    SMALL_CHUNKS,
    Budget,
    Choices,
    Plan,
    Step,
    choose_plan,
    host_bytes,
    predicted_peak,
    regular_chunk,
)

GB = 1e9
COSTS = LayerCosts(
    input=5e3, keys_and_values=4e3, key_sums=8e3, attention=8e3, graph=1.1e5, widest=1.4e5, at_attention=6e4,
    gradients=2e8, gradient_sums=4e8, largest_gradient=5e7, projection=5e3,
)  # fmt: skip


def step_of(sequence: int, *, batch: int = 1) -> Step:
    return Step(
        COSTS, 36, Shape(batch, sequence), resident_bytes=8 * GB, layer_gradient_bytes=0.2 * GB, head_bytes=3 * GB,
        head_gradient_bytes=0.8 * GB, embedding_bytes=0.8 * GB,
    )  # fmt: skip


def plan_of(sequence: int, budget: float, *, keep="auto", offload="auto", host: float = 100 * GB, chunk_size=None):
    return choose_plan(step_of(sequence), Choices(keep, offload, chunk_size), Budget(budget, host))


def slowness(plan: Plan) -> int:
    """Runs of layers beyond one forward and one backward, and twice those in which attention runs too.

    For each layer whose input is made again, the one below runs forward once more.
    """
    return sum({"all": 0, "attention": 1, "input": 3}[policy.keep] + 3 * policy.recomputed for policy in plan.policies)


def kinds(plan: Plan) -> list[str]:
    return list(dict.fromkeys(str(policy) for policy in plan.policies))


def test_from_everything_to_the_smallest():
    """One length under smaller and smaller budgets."""
    assert kinds(plan_of(36_000, 200 * GB)[0]) == ["all"]
    assert kinds(plan_of(36_000, 100 * GB)[0]) == ["attention", "all"]
    assert kinds(plan_of(36_000, 30 * GB)[0]) == ["attention on host", "all"]
    assert kinds(plan_of(200_000, 30 * GB, host=200 * GB)[0]) == ["attention on host", "attention"]
    assert kinds(plan_of(36_000, 24 * GB, host=8 * GB)[0]) == ["input on host", "attention on host", "attention"]
    assert kinds(plan_of(36_000, 30 * GB, offload="none")[0]) == ["input", "attention"]
    assert kinds(plan_of(36_000, 200 * GB, offload="host")[0]) == ["attention on host"]
    assert kinds(plan_of(36_000, 200 * GB, keep="input")[0]) == ["input"]
    assert kinds(plan_of(36_000, 200 * GB, keep="attention")[0]) == ["attention"]
    assert kinds(plan_of(400_000, 60 * GB, keep="input", host=60 * GB)[0]) == ["input on host", "input"]


def test_very_long_sequences_use_the_host_only_for_what_the_device_cannot_hold():
    """What whole graphs and the product that reads attention would save is too little for the host memory that they cost."""
    longest = LONGEST_WITH_MORE_ON_HOST
    assert all(plan_of(size, 60 * GB)[0].policies[0].projection == (size == longest) for size in (longest, longest + 1))
    beside, without = plan_of(longest, 60 * GB)[0], plan_of(longest + 1, 60 * GB)[0]
    assert kinds(beside) == ["attention on host", "all"] and kinds(without) == ["attention on host", "attention"]
    assert without.host_bytes < beside.host_bytes / 2


def test_the_product_that_reads_attention_gives_way_to_attention():
    """Each host holds attention for as many layers as without the product, and the product only where it has room for each."""
    without = dataclasses.replace(step_of(72_000), costs=dataclasses.replace(COSTS, projection=0.0))
    for host in range(5, 100, 5):
        plan = plan_of(72_000, 30 * GB, host=host * GB)[0]
        plain = choose_plan(without, Choices("auto", "auto", None), Budget(30 * GB, host * GB))[0]
        away = [policy for policy in plan.policies if policy.on_host and policy.keep == "attention"]
        assert len({policy.projection for policy in away}) <= 1
        assert [policy.keep for policy in plan.policies].count("input") == [policy.keep for policy in plain.policies].count(
            "input"
        )
    assert plan.policies[0].projection and plain.policies[0].projection


def test_the_smallest_segments_that_fit():
    """Where device and host together cannot keep every input: fewer are kept, and no plan without segments would fit."""
    seen = []
    for host in (60, 40, 26, 20):
        plan, fits = plan_of(600_000, 60 * GB, host=host * GB)
        layers = next((index for index, policy in enumerate(plan.policies[1:], 1) if not policy.recomputed), 36)
        for fewer in range(1, layers):
            choices = Choices("auto", "auto", None, fewer)
            assert not choose_plan(step_of(600_000), choices, Budget(60 * GB, host * GB))[1]
        seen.append((layers, fits))
    assert all(fits for _, fits in seen) and seen == sorted(seen) and seen[-1][0] > 1, seen


@pytest.mark.parametrize(("sequence", "gigabytes"), [(30_000, 17.7), (100_000, 20.3), (200_000, 25.8)])
def test_the_smallest_chunks_come_where_no_segments_have_room_for_others(sequence, gigabytes):
    budget = Budget(gigabytes * GB, 0.0)
    plan, fits = choose_plan(step_of(sequence), Choices("auto", "none", None), budget)
    assert fits and min(plan.chunk_sizes) < SMALL_CHUNKS[-1]
    for layers in range(1, 7):
        assert not choose_plan(step_of(sequence), Choices("auto", "none", SMALL_CHUNKS[-1], layers), budget)[1]


def test_one_more_forward_pass_comes_before_the_smallest_chunks():
    """Every layer's input would fit, with chunks that take longer to start than to compute."""
    step, budget = step_of(100_000), Budget(30.3 * GB, 0.0)
    kept, fits = choose_plan(step, Choices("auto", "none", None, 1), budget)
    assert fits and min(kept.chunk_sizes) < SMALL_CHUNKS[-1]
    plan, fits = choose_plan(step, Choices("auto", "none", None), budget)
    assert fits and min(plan.chunk_sizes) >= SMALL_CHUNKS[-1] and any(policy.recomputed for policy in plan.policies)


@pytest.mark.parametrize("offload", ["auto", "none"])
@pytest.mark.parametrize("sequence", [12_000, 36_000])
def test_attention_runs_again_only_where_smaller_chunks_do_not_help(sequence, offload):
    """Chunks of 4,096 in a few layers take less time than attention does in any."""
    seen = set()
    for tenths in range(165, 260, 3):
        budget = Budget(tenths / 10 * GB, 100 * GB)
        plan, fits = choose_plan(step_of(sequence), Choices("auto", offload, None), budget)
        runs_again = any(policy.keep == "input" for policy in plan.policies)
        seen.add(fits and runs_again)
        if fits and runs_again:
            assert not choose_plan(step_of(sequence), Choices("attention", offload, SMALL_CHUNKS[0], 1), budget)[1]
    assert seen == {True, False}


def test_without_room_there_is_the_smallest_plan_and_a_no():
    plan, fits = plan_of(400_000, 9 * GB, host=80 * GB)
    assert not fits and set(plan.chunk_sizes) == {256} and plan.host_bytes <= 80 * GB
    plan, fits = plan_of(400_000, 200 * GB, keep="attention", offload="host", host=1 * GB)
    assert not fits and plan.host_bytes > 1 * GB


@settings(max_examples=60)
@given(
    sequence=st.integers(1, 600_000),
    budget=st.floats(9 * GB, 200 * GB),
    more=st.floats(1.0, 4.0),
    host=st.floats(0, 200 * GB),
    keep=st.sampled_from(["auto", "input", "attention", "all"]),
    offload=st.sampled_from(["auto", "none", "host"]),
)
def test_a_plan_keeps_its_promises(sequence, budget, more, host, keep, offload):
    step = step_of(sequence)
    plan, fits = plan_of(sequence, budget, keep=keep, offload=offload, host=host)
    assert len(plan.policies) == len(plan.chunk_sizes) == step.layers and min(plan.chunk_sizes) >= 1
    assert plan.peak_bytes == predicted_peak(step, plan.policies, plan.chunk_sizes)
    assert plan.host_bytes == host_bytes(step, plan.policies)
    if keep != "auto":
        assert {policy.keep for policy in plan.policies if not policy.recomputed} == {keep}
    if offload == "none" or keep == "all":
        assert not plan.host_bytes
    away = [size for size, policy in zip(plan.chunk_sizes, plan.policies, strict=True) if policy.on_host]
    assert len({*away} - {sequence}) <= 1, "host buffers of several lengths do not serve each other's layers"
    assert away == sorted(away), "a layer at work brings back chunks of the one below, for which it has room"
    if fits:
        assert plan.peak_bytes <= budget and plan.host_bytes <= host
        roomier, still_fits = plan_of(sequence, budget * more, keep=keep, offload=offload, host=host)
        assert still_fits
        if min(plan.chunk_sizes) >= min(sequence, SMALL_CHUNKS[-1]):  # smaller ones take longer to start than to compute
            assert slowness(roomier) <= slowness(plan)


def test_layers_with_room_have_larger_chunks():
    """Gradients come together towards the first layer, so that the last ones have more room."""
    plan, fits = plan_of(12_000, 17.6 * GB, offload="none")
    small, large = min(plan.chunk_sizes), max(plan.chunk_sizes)
    assert fits and small < large == 12_000
    assert list(plan.chunk_sizes) == sorted(plan.chunk_sizes)
    assert f"chunks of {small} to {large} tokens, of {large} in {plan.chunk_sizes.count(large)} layers" in str(plan)


def test_each_layer_has_the_largest_chunks_that_it_has_room_for():
    """Few trained parameters: what is kept is most of what there is, and the last layers are the tightest."""
    step = dataclasses.replace(step_of(36_000), layer_gradient_bytes=0.0)
    budget = 18 * GB
    plan, fits = choose_plan(step, Choices("input", "none", None), Budget(budget, 0.0))
    assert fits and len(set(plan.chunk_sizes)) > 2 and list(plan.chunk_sizes) == sorted(plan.chunk_sizes, reverse=True)
    sizes = (36_000, *LARGE_CHUNKS, *SMALL_CHUNKS, *LAST_CHUNKS)
    for index, size in enumerate(plan.chunk_sizes):
        for larger in (other for other in sizes if other > size):
            changed = (*plan.chunk_sizes[:index], larger, *plan.chunk_sizes[index + 1 :])
            assert predicted_peak(step, plan.policies, changed) > budget


@pytest.mark.parametrize(("sequence", "largest"), [(65_536, 65_536), (65_537, 32_768)])
def test_a_batch_is_whole_up_to_a_limit(sequence, largest):
    plan, fits = plan_of(sequence, 139 * GB, offload="none")
    assert fits and max(plan.chunk_sizes) == largest


def test_chunks_have_few_sizes():
    assert regular_chunk(1, 6000, 8192) == 6000
    assert regular_chunk(1, 36_000, 8192) == regular_chunk(1, 50_000, 8192) == 8192
    assert regular_chunk(8, 36_000, 8192) == 1024
    assert regular_chunk(9000, 36_000, 8192) == 1
    for sequence in (1, 127, 8192, 8193, 100_000):
        sizes = [regular_chunk(1, sequence, tokens) for tokens in (*LARGE_CHUNKS, *SMALL_CHUNKS, *LAST_CHUNKS)]
        assert sizes == sorted(sizes, reverse=True) and all(1 <= size <= sequence for size in sizes)


AMOUNTS = [
    ("80GiB", 80 * 2**30),
    ("79.5 GB", 79_500_000_000),
    (1024, 1024),
    ("", None),
    (-1, None),
    ("80 GX", None),
    (True, None),
]


@pytest.mark.parametrize(("text", "count"), AMOUNTS)
def test_amounts_of_memory(text, count):
    if count is not None:
        assert parse_bytes(text) == count
        assert streamgrad.StreamConfig(memory_budget=text).budget_bytes == count
    else:
        with pytest.raises(ValueError, match="80GiB"):
            streamgrad.StreamConfig(memory_budget=text)


def test_a_host_without_a_known_limit():
    plan, fits = plan_of(300_000, 40 * GB, host=float("inf"))
    assert fits and plan.policies[0].on_host


def test_policies_read_well():
    plan = Plan((LayerPolicy("input", on_host=True), LayerPolicy("all")), (4096, 4096), 2.5 * 2**30, 2**30)
    expected = "1 x input on host, 1 x all; chunks of 4096 tokens; about 2.5 GiB on the device and 1.0 GiB on the host"
    assert str(plan) == expected
    assert "on the host" not in str(dataclasses.replace(plan, host_bytes=0.0))


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({}, 0.9),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, 0.95),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, 0.95),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, 0.9),
    ],
)
def test_more_of_a_device_is_left_free_where_segments_cannot_grow(variables, share, monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert usable_share() == pytest.approx(share)


@pytest.mark.parametrize(("tokens", "sums"), [(50, 5 + 50), (100, 10 + 100), (4000, 400 + 100)])
def test_the_embeddings_gradient_is_summed_by_ids(tokens, sums):
    """As torch's kernel allocates: a sum for every id that there may be, of 100 here, and one more for every ten tokens."""
    parts = embedding_parts(tokens, 16, width_sum_bytes=32, dense_bytes=100 * 16)
    assert parts == {"hidden states": 16 * tokens, "gradients": 1600, "other": 32 * sums}
    assert embedding_parts(tokens, 16, width_sum_bytes=32, dense_bytes=0)["other"] == 0
