"""Ranks that share sequences: gradients of plain backpropagation on the whole, the bytes of Ulysses, 1/P of the memory."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import streamgrad
from engine_worker import Reference, launch
from gradients import assert_same_step, more
from sequence_worker import (
    CHUNKS,
    COUNTED,
    ENGINES,
    LENGTH,
    Case,
    counted_config,
    on_four_ranks,
    on_more_ranks,
    on_two_ranks,
    plain_step,
    plain_training,
)
from streamgrad.attention.masks import CausalMask
from streamgrad.engine.kv_chunk import SeamError
from streamgrad.engine.policy import LayerPolicy
from streamgrad.engine.ulysses import Ulysses
from streamgrad.hf.estimates.dry_run import model_shape
from streamgrad.hf.estimates.shapes import shape_of
from streamgrad.hf.sequence_slices import Slices
from streamgrad.memory.costs import ModelShape
from streamgrad.memory.phases import streamed_phases
from streamgrad.memory.traffic import Ranks, SharedSequences, exchanged_bytes, ring_bytes, shared_shape
from streamgrad.parallel import sequence_loss
from tiny import tiny_model, tokens

TWO_RANKS = [
    *(Case(chunk_size=size) for size in (1, 5, 12)),  # 5: a last chunk of 2 tokens
    *(Case(keep=keep, chunk_size=5) for keep in ("attention", "all")),
    *(Case(kind=kind, chunk_size=5) for kind in ("padded", "left padded", "packed", "flash", "prompt", "embedded")),
    Case(kind="packed", chunk_size=64),
    Case(kind="packed", keep="all", chunk_size=5),
    Case("mistral", kind="packed"),
    Case("mistral", length=22, kind="padded", chunk_size=3, keep="attention"),
    Case("gpt_oss", kind="positions"),
    Case("gemma2", chunk_size=5),
    Case("qwen3_moe", chunk_size=5),
    *(Case("deepseek_v3", chunk_size=5, keep=keep) for keep in ("input", "attention", "all")),
    Case("deepseek_v3", kind="packed", chunk_size=5),
    Case(lora=True, chunk_size=5),
    # Fused, as on a GPU in 16 bits.
    *(Case(chunk_size=5, keep=keep, options={"fused_kernels": "on"}) for keep in ("input", "attention", "all")),
    Case("gemma2", chunk_size=5, lora=True, options={"fused_kernels": "on"}),
    Case(chunk_size="auto", options={"memory_budget": "1GiB"}, keep="auto"),
    Case("qwen3_moe", keep="auto", options={"budgets": ("1GiB", "400KiB")}),
    Case("qwen3_moe", balance=True, chunk_size=5, keep="all"),
    *(Case("qwen3_moe", balance=True, chunk_size=5, kind=kind) for kind in ("padded", "prompt")),
    Case("gpt_oss", balance=True, kind="padded", chunk_size=5, keep="attention"),
    Case("qwen3_moe", balance=True, kind="padded", chunk_size=5, scored=True),
]
FOUR_RANKS = [
    Case(ranks=4, chunk_size=2),
    Case(ranks=4, chunk_size=2, keep="attention"),
    Case(ranks=4, chunk_size=4, keep="all"),
    Case("mistral", kind="packed", ranks=4, chunk_size=4),
    # Fewer key heads than ranks.
    *(Case(ranks=4, key_heads=1, chunk_size=4, keep=keep) for keep in ("input", "attention", "all")),
    Case(ranks=4, key_heads=2, chunk_size=4),
    Case("mistral", ranks=4, key_heads=1, kind="packed", chunk_size=4),
    Case(ranks=4, key_heads=2, kind="padded", chunk_size=4, lora=True),
    # A ring over all ranks, or over pairs that trade heads; 6 tokens a rank, in chunks of 4 and 2.
    Case(ranks=4, ring=4, key_heads=1),
    Case(ranks=4, ring=2, key_heads=1, keep="attention"),
    Case(ranks=4, ring=2, key_heads=2, keep="all"),
    Case("mistral", ranks=4, ring=2, kind="packed"),
    Case("qwen3_moe", ranks=4, ring=4, kind="padded", balance=True),
]
RINGS = [
    *(
        Case(ranks=4, ring=4, key_heads=1, chunk_size=size, keep="attention") for size in (1, 3)
    ),  # blocks of no token, and of 2 and 1
    Case(ranks=4, ring=4, keep="all", chunk_size=4),
    *(Case(ranks=4, ring=2, kind=kind, chunk_size=4) for kind in ("padded", "left padded", "prompt", "embedded")),
    *(Case(ranks=4, ring=4, kind="packed", chunk_size=4, keep=keep) for keep in ("input", "attention", "all")),
    Case("mistral", ranks=4, ring=4, key_heads=2, length=40, kind="padded", chunk_size=3),
    Case("gpt_oss", ranks=4, ring=2, kind="padded", keep="attention", balance=True),
    Case("gpt_oss", ranks=4, ring=4, kind="positions"),
    Case("gemma2", ranks=4, ring=2),
    Case("deepseek_v3", ranks=4, ring=2, kind="packed", keep="attention"),
    Case(ranks=4, ring=2, key_heads=2, kind="padded", chunk_size=1, lora=True),
    Case(ranks=4, ring=2, options={"fused_kernels": "on"}, keep="attention"),
    Case("qwen3_moe", ranks=4, ring=2, keep="auto", kind="packed", options={"memory_budget": "1GiB"}),
    Case("qwen3_moe", ranks=4, ring=2, kind="padded", balance=True, scored=True),
]
EIGHT_RANKS = [
    *(Case(ranks=8, key_heads=heads, length=48, chunk_size=4) for heads in (1, 2, 4)),
    Case("gpt_oss", ranks=8, key_heads=2, length=48, kind="padded", chunk_size=4, keep="attention"),
    Case("mistral", ranks=8, key_heads=4, length=48, kind="packed", chunk_size=4, keep="all"),
    # More ranks than query heads, of which there are four.
    *(Case(ranks=8, ring=ring, key_heads=heads, length=48) for ring in (2, 4, 8) for heads in (1, 2, 4)),
    Case("mistral", ranks=8, ring=4, key_heads=2, length=48, kind="packed", keep="attention"),
    Case("gpt_oss", ranks=8, ring=2, key_heads=1, length=48, kind="padded", keep="all"),
]


def exchanged(case: Case) -> tuple[int, int]:
    """All-to-alls of a step on one rank, and the elements it puts into them, of which (P - 1) / P go to other ranks.

    In a layer, by what it keeps: q, k, v, out; k, v again and q, out again; dout, dq, dk, dv. Around the layers: ids, hidden
    states and their gradient. Ranks that are all in one ring trade no heads.
    """
    heads = 8 if case.ranks == 8 * case.ring else 4
    times_heads, times_groups = {"input": (6, 6), "attention": (6, 4), "all": (4, 4)}[case.keep]
    if case.ranks == case.ring:
        times_heads = times_groups = 0
    tokens = 2 * case.length // case.ranks
    elements = LAYERS * tokens * HEAD_SIZE * (times_heads * heads + times_groups * key_heads(case)) + tokens * (1 + 2 * 24)
    return LAYERS * chunks(case) * (times_heads + times_groups) + 3, elements


def over_the_ring(case: Case) -> tuple[tuple[int, int], tuple[int, int]]:
    """All-gathers of keys and values together, forward and again before backward, and reduce-scatters of their gradients.

    With each, the elements that a rank puts into them: its own keys and values, and its terms for those of all r ranks.
    """
    if case.ring == 1:
        return (0, 0), (0, 0)
    times, calls = (1, 1) if case.keep == "all" else (2, chunks(case))
    own = 2 * (2 * case.length // case.ranks) * key_heads(case) * HEAD_SIZE
    return (LAYERS * times * calls, LAYERS * times * own), (LAYERS * calls, LAYERS * case.ring * own)


LAYERS, HEAD_SIZE = 2, 8


def chunks(case: Case) -> int:
    return -(-case.length // case.ranks // case.chunk_size)


def key_heads(case: Case) -> int:
    """Key heads, and copies of them where there are fewer than ranks that trade heads."""
    return math.lcm(case.key_heads or (4 if case.ranks >= 4 else 2), case.ranks // case.ring)


@pytest.fixture(scope="module")
def two_ranks() -> list[dict]:
    return launch(on_two_ranks, TWO_RANKS)


@pytest.fixture(scope="module")
def four_ranks() -> list[dict]:
    return launch(on_four_ranks, FOUR_RANKS, world_size=4)


def check_steps(subtests, cases: list[Case], ranks: list[dict]) -> None:
    for index, case in enumerate(cases):
        expected = plain_step(case)
        for rank, outcomes in enumerate(ranks):
            with subtests.test(f"{case}, rank {rank}"):
                outcome = outcomes["steps"][index]
                assert_same_step(outcome.step, expected, 1e-10)
                if "budgets" in case.options:
                    assert outcome.kept == ["attention", "all"], "ranks with more memory must go by those with less"
                if case.family == "qwen3" and case.kind == "plain" and not case.lora and isinstance(case.chunk_size, int):
                    assert outcome.exchanged == exchanged(case)
                    assert (outcome.gathered, outcome.summed) == over_the_ring(case)


def test_steps_of_two_ranks(subtests, two_ranks):
    check_steps(subtests, TWO_RANKS, two_ranks)


def test_steps_of_four_ranks(subtests, four_ranks):
    check_steps(subtests, FOUR_RANKS, four_ranks)


@more
def test_steps_of_rings(subtests):
    check_steps(subtests, RINGS, launch(on_more_ranks, RINGS, world_size=4))


@more
def test_steps_of_eight_ranks(subtests):
    """With eight query heads and fewer key heads, as Qwen3 and Llama have on more ranks than key heads."""
    check_steps(subtests, EIGHT_RANKS, launch(on_more_ranks, EIGHT_RANKS, world_size=8))


def test_memory_falls_with_the_number_of_ranks(four_ranks):
    """With as many chunks, so that a chunk has fewer tokens too. What does not fall is a layer's gradients and a term of them."""
    for rank in four_ranks:
        peaks, layer = rank["live bytes"]
        assert peaks[1, 1, 4, "input"] > 60 * layer, "there is too little to fall"
        for ranks in (2, 4):
            assert peaks[ranks, 1, 4, "input"] < peaks[1, 1, 4, "input"] / ranks + 2 * layer, peaks


def test_memory_of_a_ring(four_ranks):
    """Like that of as many ranks without a ring, but one layer's keys and values, and the sums of their gradients, are r slices.

    A kernel's term of these sums is too, here of all keys, and of a bounded number of them in a long sequence.
    """
    own = 2 * (1024 // 4) * 4 * 8 * 4  # keys and values of a slice, 4 heads of size 8, in fp32
    for rank in four_ranks:
        peaks, _ = rank["live bytes"]
        for ring in (2, 4):
            of_others, more = (ring - 1) * own, peaks[4, ring, 4, "input"] - peaks[4, 1, 4, "input"]
            assert 2 * of_others <= more < 3 * of_others, peaks


@functools.cache
def counted_shape(key_heads: int) -> ModelShape:
    shape = model_shape(counted_config(key_heads), dtype=torch.float32)
    return replace(shape, profile=shape.eager)


def test_plans_hold_what_ranks_hold(subtests, four_ranks):
    """The bytes of `streamgrad plan --sp P --ring r`, without what kernels of a GPU take for themselves."""
    for case in COUNTED:
        ranks, ring, key_heads, keep = case
        shape = shared_shape(counted_shape(key_heads), Ranks(ranks, ranks, ring=ring))
        load = SharedSequences(shape, 1, LENGTH // ranks, gradient_share=0.0, ranks=ranks, ring=ring)
        size = LENGTH // ranks // CHUNKS
        phases = streamed_phases(load, [LayerPolicy(keep)] * 4, [size] * 4, size)
        planned = max(phase.total_bytes - phase.parts["workspace"] for phase in phases)
        for rank in four_ranks:
            with subtests.test(str(case)):
                counted = rank["live bytes"][0][case]
                assert 0.97 * counted < planned < 1.07 * counted


def test_plans_count_what_ranks_exchange(subtests):
    """By the functions that are compared with counted elements above; ids are no part of the plan."""
    size, known = 4, shape_of("qwen3-8b")
    for case in FOUR_RANKS + EIGHT_RANKS:
        if case.family == "qwen3" and case.kind == "plain" and case.keep in ("input", "attention", "all"):
            own_heads = case.key_heads or 4
            each = 2 * own_heads * HEAD_SIZE * size
            costs = replace(known.profile.costs, keys_and_values=each, key_sums=each)
            heads = 8 if case.ranks == 8 * case.ring else 4
            profile = replace(known.profile, costs=costs, query_heads=heads, head_size=HEAD_SIZE)
            ranks = Ranks(case.ranks, case.ranks, ring=case.ring)
            shape = shared_shape(replace(known, layers=LAYERS, width=24, itemsize=size, profile=profile), ranks)
            load = SharedSequences(shape, 2, case.length // case.ranks, ranks=case.ranks, ring=case.ring)
            policies = [LayerPolicy(case.keep)] * LAYERS
            in_layers, around = exchanged_bytes(load, policies)
            (_, gathered), (_, summed) = over_the_ring(case)
            with subtests.test(str(case)):
                in_all = around + (in_layers if ranks.heads > 1 else 0)
                assert in_all == size * (exchanged(case)[1] - 2 * case.length // case.ranks)
                if case.ring > 1:
                    assert ring_bytes(load, policies) == size * (gathered + summed / case.ring)


@pytest.mark.parametrize("engine", [*ENGINES, "a ring under fsdp2"])
def test_two_sequences_of_two_ranks_each(engine, four_ranks):
    """Data parallelism of sequence-parallel pairs under an engine that averages over all four ranks, three steps."""
    reference = Reference.of(plain_training)
    for rank in four_ranks:
        reference.check(rank["training"][engine])


def test_other_calls(two_ranks):
    """Without gradients, as a tuple, of a copy, in evaluation mode, after leaving the group: errors of logits, and routers'."""
    for rank in two_ranks:
        errors = rank["other calls"]
        assert len(errors) == 6 and all(error < 1e-10 for error in errors.values()), errors


def test_refusals(subtests, two_ranks):
    said = two_ranks[0]["refusals"]
    for name, needles in {
        "heads": ["3 attention heads cannot be shared by 2 ranks", "sequence_parallel(model, group, ring=2)"],
        "ring": ["ring=3 must be a number that divides the group's 2 ranks"],
        "dropout": ["attention dropout is on", "are shared by a ring of ranks"],
        "empty": ["every rank's slice of input_ids has shape (1, 0)", "at least one token"],
        "segments": ["recompute_layers=2 cannot be used", "nor where ranks share a sequence", "Pass recompute_layers=1"],
        "labels": ["shift_labels"],
        "dense mask": ["attention_mask other than (batch, tokens)", "position_ids that restart"],
        "boundaries": ["cu_seq_lens_q cannot be passed"],
        "hidden states": ["output_hidden_states=True"],
        "whole mask": ["attention_mask has shape (1, 16) and the rank's slice 8 tokens"],
        "cache": ["past_key_values"],
        "generation": ["Call model.eval() to generate"],
        "not enabled": ["Call streamgrad.enable(model) before"],
        "rotary": ["follows the longest position"],
        "evaluation": ["Call model.train()"],
        "targets": ["some labels (3 on rank 0) would be predicted from tokens that see no key"],
    }.items():
        with subtests.test(name):
            assert all(needle in said[name] for needle in needles), said[name]
    assert two_ranks[1]["refusals"]["targets"] == said["targets"], "one rank raises and the other waits"


def test_ranks_that_disagree_are_told(subtests, two_ranks):
    for rank in two_ranks:
        for name, needle in {
            "length": "tokens of a slice: 8, 7,",
            "chunk_size": "chunk_size: 4, 3,",
            "positions": "whether position_ids are passed: 0, 1,",
            "keep": "disagree about keep",
            "mask": "whether an attention_mask is passed: 0, 1,",
            "ring": "disagree about ring: [1, 2]",
            "groups": "ring=2 makes process groups, which needs ranks that are in equally many: they are in [",
        }.items():
            with subtests.test(name):
                assert needle in rank["disagreement"][name]


def test_an_unknown_rule_of_a_mask_is_refused():
    """Windows and documents go by places in the sequence; what another rule goes by is not known."""
    mask = CausalMask(lambda batch, head, query, key: key % 2 == 0, has_other_rule=True)
    with pytest.raises(SeamError, match="besides windows and documents"):
        Slices(None, {}, None, None, None).mask(mask)


def test_context_parallelism_of_accelerate_is_refused(monkeypatch):
    """Its batches are slices for an attention that is not called."""
    monkeypatch.setitem(AcceleratorState._shared_state, "parallelism_config", ParallelismConfig(cp_size=2))
    model, ids = streamgrad.enable(tiny_model("llama"), chunk_size=4), tokens(1, 8)
    with pytest.raises(ValueError, match="cp_size=2 cuts sequences .* Set sp_size"):
        model(input_ids=ids, labels=ids)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_segments_of_sharded_layers_are_refused(one_rank):
    """FSDP2 gathers a layer for its own turn; `recompute_layers="auto"` stays at 1."""
    model = tiny_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    ids = tokens(1, 9)
    streamgrad.enable(model, chunk_size=4, recompute_layers=2)
    with pytest.raises(ValueError, match="recompute_layers=2 cannot be used with FSDP2 or ZeRO-3"):
        model(input_ids=ids, labels=ids)
    streamgrad.enable(streamgrad.disable(model), chunk_size=4, memory_budget="1GiB")
    model(input_ids=ids, labels=ids).loss.backward()


def test_a_16_bit_loss_is_counted_in_32(one_rank):
    """float16 cannot hold the number of targets, and bfloat16 not exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        loss = torch.tensor(1.82, dtype=dtype, requires_grad=True)
        whole = sequence_loss(loss, torch.zeros(1, 70_001, dtype=torch.long), one_rank)
        whole.backward()
        assert torch.equal(whole, loss) and loss.grad == 1.0


@pytest.mark.parametrize("chunk_size", [3, 8])
def test_exchanged_tensors_lie_in_memory_as_projections_make_them(one_rank, chunk_size):
    """Tokens before heads: families such as afmoe view attention's output as (batch, tokens, width)."""
    sharing = Ulysses(one_rank, 8, chunk_size, torch.device("cpu"))
    tensor_BHLD = torch.randn(2, 4, 8, 5)
    for swap in (sharing.to_heads, sharing.to_tokens):
        assert torch.equal(swap(tensor_BHLD), tensor_BHLD) and swap(tensor_BHLD).transpose(1, 2).is_contiguous()
