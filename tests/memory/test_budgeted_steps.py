"""Steps under a memory budget: how layers are measured, the gradients of plain backpropagation, and the live bytes, counted."""

from __future__ import annotations

import gc
import re

import peft
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import streamgrad
from families import small_model
from gradients import assert_same_step, more, no_float32, run_step
from streamgrad.engine.policy import LayerPolicy
from streamgrad.hf import step_plan as planning
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.memory.planner import Plan
from tiny import tiny_model, tokens

# --- The probe ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "mistral"])
def test_rows_that_are_all_padded_are_probed_too(family, side):
    """The keys that the probed tokens see are not the tokens themselves."""
    model, ids = tiny_model(family), tokens(2, 23)
    mask = torch.ones_like(ids)
    for row, real in enumerate((11, 7)):
        mask[row, : 23 - real] = 0
    mask = mask if side == "left" else mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    labels[torch.arange(2), mask.argmax(1)] = -100  # the first real token would be predicted from padding
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, memory_budget="1GiB", chunk_size=5)
        assert_same_step(run_step(model, batch), expected, 1e-10)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_probe_leaves_nothing_behind(checkpointed):
    """Nor would it be only the probe's: slices of the whole sequence's rotary angles are among what its graph saves."""
    model, ids = tiny_model("qwen3"), tokens(2, 23)

    def forward(ids):
        return model(input_ids=ids, labels=ids).loss

    streamgrad.enable(model, memory_budget="1GiB", chunk_size=5)
    with LiveBytes() as live:
        loss = checkpoint(forward, ids, use_reentrant=False) if checkpointed else forward(ids)
        loss.backward()
        del loss
        model.zero_grad(set_to_none=True)
        gc.collect()
        assert live.live_bytes == 0


def test_a_probe_inside_of_checkpointing():
    """Which runs the model again when anything that it saved is asked for, even inside its forward."""
    model, ids = tiny_model("qwen3"), tokens(2, 23)
    batch = {"input_ids": ids, "labels": ids}

    def checkpointed(model, batch):
        return checkpoint(lambda ids: model(input_ids=ids, labels=ids).loss, batch["input_ids"], use_reentrant=False)

    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, memory_budget="1GiB", chunk_size=5)
        assert_same_step(run_step(model, batch, forward=checkpointed), expected, 1e-10)


def test_segments_are_asked_for_and_given_back(monkeypatch):
    """One for each hidden state that will be kept, all at once; where there is less memory, as many as there is."""
    hidden = torch.zeros(1, 64, 16)
    with LiveBytes() as live:
        planning._give_segments(hidden, 5)
        assert (live.peak_bytes, live.live_bytes) == (5 * hidden.nbytes, 0)

    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty_like", full)
    planning._give_segments(hidden, 5)


# --- Steps under a budget -----------------------------------------------------------------------------------------------

SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6}
LENGTH = 1024


def counted_step(model, ids) -> tuple[int, Plan]:
    """Bytes of the weights and of everything alive at the peak of a step, and the plan that was followed."""
    model.zero_grad(set_to_none=True)
    with LiveBytes() as live:
        model(input_ids=ids, labels=ids).loss.backward()
    return sum(parameter.nbytes for parameter in model.parameters()) + live.peak_bytes, latest_plan(model)


def latest_plan(model) -> Plan:
    return InstalledForward.on(model.get_decoder()).stream.planner.latest


def test_a_step_fills_its_budget_and_does_not_exceed_it():
    """From the ordinary graph down to the smallest plan: the same gradients, and fewer bytes than allowed."""
    model = tiny_model("llama", **SHAPE)
    ids = tokens(1, LENGTH)
    batch = {"input_ids": ids, "labels": ids}
    seen = set()
    with no_float32():
        expected = run_step(model, batch)
        for megabytes in (120, 60, 20, 14):
            streamgrad.enable(model, memory_budget=f"{megabytes}MB", head_chunk_size=64, chunk_size=128)
            assert_same_step(run_step(model, batch), expected, 1e-10)
            used, plan = counted_step(model, ids)
            assert used <= megabytes * 1e6, f"{used / 1e6:.2f} MB of {megabytes}: {plan}"
            seen.add(tuple(dict.fromkeys(map(str, plan.policies))))
            streamgrad.disable(model)
    assert ("all",) in seen and len(seen) >= 3, seen


DEEP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 12}


@pytest.mark.parametrize(
    ("layers", "keep"),
    [(3, "attention"), *(pytest.param(*each, marks=more) for each in [(2, "input"), (6, "input"), (12, "attention")])],
)
def test_segments_hold_what_is_predicted(layers, keep):
    """The inputs that are kept, and those that are made again with all that a segment keeps for its backward."""
    model, ids = tiny_model("llama", **DEEP), tokens(1, LENGTH // 2)
    streamgrad.enable(model, memory_budget="1GiB", keep=keep, recompute_layers=layers, chunk_size=128, head_chunk_size=64)
    counted_step(model, ids)  # in which layers are measured and tried
    used, plan = counted_step(model, ids)
    assert sum(policy.recomputed for policy in plan.policies) == 12 - 12 // layers
    assert 0.95 * plan.peak_bytes < used <= plan.peak_bytes, f"{used / 1e6:.2f} MB: {plan}"


def test_segments_that_the_plan_has_chosen():
    """With a budget below what the inputs of all layers take, and no host to keep them: exact, and within it."""
    model, ids = tiny_model("llama", **DEEP), tokens(1, LENGTH // 2)
    batch = {"input_ids": ids, "labels": ids}
    options = {"chunk_size": 128, "head_chunk_size": 64}
    peaks = []
    for layers in (1, 3):
        streamgrad.enable(model, memory_budget="1GiB", keep="input", recompute_layers=layers, **options)
        peaks.append(counted_step(model, ids)[1].peak_bytes)
        streamgrad.disable(model)
    budget = int(sum(peaks) / 2)
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, memory_budget=budget, **options)
        assert_same_step(run_step(model, batch), expected, 1e-10)
        used, plan = counted_step(model, ids)
    assert any(policy.recomputed for policy in plan.policies) and used <= budget, f"{used} of {budget}: {plan}"


def test_automatic_chunks_stay_within_the_budget():
    """From the very first step, in which the layer is probed; and layers differ in what they have room for."""
    model = tiny_model("llama", hidden_size=128, intermediate_size=1024, num_hidden_layers=10)
    ids = tokens(1, LENGTH)
    batch = {"input_ids": ids, "labels": ids}
    sizes = set()
    with no_float32():
        expected = run_step(model, batch)
        for megabytes in (86, 88, 92, 100):
            streamgrad.enable(model, memory_budget=f"{megabytes}MB", head_chunk_size=256)
            used, plan = counted_step(model, ids)
            assert used <= megabytes * 1e6, f"{used / 1e6:.2f} MB of {megabytes}: {plan}"
            assert_same_step(run_step(model, batch), expected, 1e-10)
            sizes.add(plan.chunk_sizes)
            streamgrad.disable(model)
    assert len(sizes) > 2 and any(len(set(each)) > 1 for each in sizes)


def test_a_budget_holds_for_a_head_of_its_own():
    """Whose chunks are automatic, and whose weight is not the decoder's."""
    model = tiny_model("llama", dtype=torch.float32, hidden_size=32, vocab_size=8000, num_hidden_layers=2)
    ids = tokens(1, 2048)
    streamgrad.enable(model, memory_budget="30MB")
    used, plan = counted_step(model, ids)
    assert used <= 30e6, f"{used / 1e6:.2f} MB: {plan}"


def test_adapters_of_another_size_are_measured_again():
    model = tiny_model("llama")
    ids = tokens(1, 8)
    streamgrad.enable(model, memory_budget="1GiB", chunk_size=4)
    gradients = []
    for rank in (2, 16):
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=["q_proj"]))
        adapted(input_ids=ids, labels=ids).loss.backward()
        planner = InstalledForward.on(model.get_decoder()).stream.planner
        gradients.append(list(planner._costs.values())[-1].gradients)
        adapted.unload()
    assert gradients[1] == 8 * gradients[0]


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_moe"])
def test_layers_with_chunks_of_different_sizes(family, monkeypatch):
    """And of different policies: the gradients of plain backpropagation, whatever a plan gives to which layer."""
    model, ids = tiny_model(family, num_hidden_layers=6), tokens(2, 23)
    batch = {"input_ids": ids, "labels": ids}
    policies = [LayerPolicy(keep) for keep in ("input", "attention", "input", "all", "attention", "input")]
    plan = Plan(tuple(policies), (3, 23, 8, 23, 5, 1), 0.0, 0.0)
    monkeypatch.setattr(planning, "choose_plan", lambda *args, **options: (plan, True))
    with no_float32():
        expected = run_step(model, batch)
        streamgrad.enable(model, memory_budget="1GiB")
        assert_same_step(run_step(model, batch), expected, 1e-10)
    assert latest_plan(model) is plan


@pytest.mark.parametrize("chunk_size", [128, "auto"])
def test_a_budget_that_cannot_hold_a_step_says_what_would_fit(chunk_size):
    model = tiny_model("llama", dtype=torch.float32, **SHAPE)
    ids = tokens(1, LENGTH)
    streamgrad.enable(model, memory_budget="4MB", head_chunk_size=64, chunk_size=chunk_size)
    with pytest.raises(ValueError, match=r"cannot hold 1 x 1024 tokens.*MiB are needed.*tokens a sequence would fit") as error:
        model(input_ids=ids, labels=ids)
    longest = int(re.search(r"About (\d+) tokens", str(error.value))[1])
    model(input_ids=ids[:, :longest], labels=ids[:, :longest]).loss.backward()
    model.zero_grad(set_to_none=True)  # which would leave less room
    longer = tokens(1, 8 * LENGTH)
    with pytest.raises(ValueError, match="would fit") as error:
        model(input_ids=longer, labels=longer)
    assert int(re.search(r"About (\d+) tokens", str(error.value))[1]) == pytest.approx(longest, rel=0.05)


def test_measuring_a_layer_leaves_no_trace():
    """The probe draws from no generator, and hooks see one more call of each module at most."""
    model = tiny_model("gpt_neox", dtype=torch.float32, hidden_dropout=0.3)
    ids = tokens(1, 64)
    outcomes = []
    for budget in (None, "1GB"):
        torch.manual_seed(3)
        streamgrad.enable(model, memory_budget=budget, keep="attention", chunk_size=16)
        outcomes.append(run_step(model, {"input_ids": ids, "labels": ids}))
        streamgrad.disable(model)
    assert_same_step(outcomes[1], outcomes[0], 1e-12)


KINDS_OF_LAYERS = {
    # One dense layer, which is small, and then experts.
    "deepseek_v3": {"num_hidden_layers": 6, "first_k_dense_replace": 1, "intermediate_size": 32, "moe_intermediate_size": 256},
    # Three of linear attention and one of attention, and again.
    "qwen3_next": {"num_hidden_layers": 8, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2},
}


def test_a_kind_of_layer_that_cannot_be_measured_is_left_out():
    """Gemma 4's layers of full attention have other heads, and so other rotary angles than those of the first layer."""
    model, ids = small_model("gemma4_text", hidden_size_per_layer_input=0), tokens(1, 9)
    batch = {"input_ids": ids, "labels": ids}
    with no_float32():
        expected = run_step(model, batch)
        assert_same_step(run_step(streamgrad.enable(model, memory_budget="1GiB"), batch), expected, 1e-9)


def test_scans_that_fill_up_blocks_are_measured_over_several():
    model = small_model("granitemoehybrid", mamba_chunk_size=256).float()
    ids = tokens(1, 1024)
    streamgrad.enable(model, memory_budget="1GiB", keep="input", chunk_size=256, head_chunk_size=64)
    counted_step(model, ids)  # in which a layer is run on more tokens than a chunk has here
    used, plan = counted_step(model, ids)
    assert used < 1.05 * plan.peak_bytes, f"{used / 1e6:.2f} MB: {plan}"


@pytest.mark.parametrize("family", [pytest.param(f, marks=more if f == "deepseek_v3" else ()) for f in KINDS_OF_LAYERS])
def test_layers_of_several_kinds_are_all_measured(family):
    model = small_model(family, **KINDS_OF_LAYERS[family])
    ids = tokens(1, 512)
    batch = {"input_ids": ids, "labels": ids}
    seen = set()
    with no_float32():
        expected = run_step(model, batch)
        for megabytes in (800, 56, 26):
            streamgrad.enable(model, memory_budget=f"{megabytes}MB", head_chunk_size=64)
            assert_same_step(run_step(model, batch), expected, 1e-9)
            used, plan = counted_step(model, ids)
            # What experts hold depends on where the router sends tokens: in a step and in the trial not to the same.
            assert used <= 1.05 * megabytes * 1e6, f"{used / 1e6:.2f} MB of {megabytes}: {plan}"
            seen.add(str(plan))
            streamgrad.disable(model)
    assert len(seen) == 3


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_a_layer_keeps_what_its_kind_does(keep):
    """Three of four layers have no keys and no attention to keep, and graphs of another size."""
    model = small_model("qwen3_next", **KINDS_OF_LAYERS["qwen3_next"])
    streamgrad.enable(model, memory_budget="1GiB", head_chunk_size=64, keep=keep)
    counted_step(model, ids := tokens(1, 512))
    used, plan = counted_step(model, ids)
    assert used < plan.peak_bytes < 1.08 * used, f"{used / 1e6:.2f} MB: {plan}"


@pytest.mark.parametrize("chunk_size", [24, 96])
def test_gradients_of_experts_are_counted(chunk_size):
    """In 16 bits, with all experts trained: beside the sums, which are in float32, a chunk's gradient in 16 bits alone."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 32, "num_experts_per_tok": 2, "vocab_size": 256}
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16, **sizes)
    model.set_experts_implementation("grouped_mm")  # as on a GPU; a loop over experts holds more
    streamgrad.enable(model, keep="input", chunk_size=chunk_size, memory_budget="1TB")
    counted_step(model, ids := tokens(1, 96))
    peak, plan = counted_step(model, ids)
    assert 0.95 * peak < plan.peak_bytes < 1.07 * peak


def test_router_logits_are_counted():
    """Those of all layers stay for the balance loss, with their gradients: also when the first steps had none."""
    model = tiny_model("qwen3_moe", dtype=torch.float32, num_experts=24, moe_intermediate_size=4)
    ids = tokens(1, 768)
    streamgrad.enable(model, memory_budget="1GiB", keep="input", chunk_size=384, head_chunk_size=16)
    counts = []
    for asked in (False, True):
        model.config.output_router_logits = asked
        counted_step(model, ids)  # in which layers are measured and tried
        counts.append(counted_step(model, ids))
    (before, plan), (used, with_logits) = counts
    one = 2 * ids.numel() * 24 * 4
    assert one <= used - before <= with_logits.peak_bytes - plan.peak_bytes <= 2 * one


# --- Gradients that are freed in backward -------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["ours", "another's"])
def test_gradients_that_hooks_free_are_not_counted(whose):
    """A budget without room for all gradients: refused with an ordinary optimizer, and kept to, counted, with hooks."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=8, hidden_size=64, intermediate_size=256)
    weights, ids = sum(parameter.nbytes for parameter in model.parameters()), tokens(1, 32)
    budget = 1.5 * weights
    streamgrad.enable(model, memory_budget=int(budget), chunk_size=16, head_chunk_size=16)
    with pytest.raises(ValueError, match="cannot hold 1 x 32 tokens"):
        model(input_ids=ids, labels=ids)
    if whose == "ours":
        optimizer = streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1e-3)
    else:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    for is_first in (True, False):  # in the first one layers are also tried
        used, plan = counted_step(model, ids)
        assert is_first or used <= budget, f"{used / weights:.2f} of the weights: {plan}"
        if whose == "ours":
            optimizer.step()
    assert InstalledForward.on(model.model).stream.planner.hooks_free is (None if whose == "ours" else True)


def test_hooks_that_leave_gradients_are_noticed():
    """The first step is planned as if gradients stayed, where that fits; later ones by what was seen."""
    model, ids = tiny_model("llama", dtype=torch.float32), tokens(1, 8)
    streamgrad.enable(model, memory_budget="1GiB")
    _, plain = counted_step(model, ids)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: None)
    plans = [counted_step(model, ids)[1] for _ in range(2)]
    assert InstalledForward.on(model.model).stream.planner.hooks_free is False
    assert all(plan.peak_bytes == plain.peak_bytes for plan in plans)


def test_states_that_the_first_update_makes_are_counted():
    """AdamW's two states of every parameter: in the first step they come one by one, in later ones they are there."""
    model, ids = tiny_model("llama", dtype=torch.float32, hidden_size=64, intermediate_size=256), tokens(1, 32)
    optimizer = streamgrad.optimizer_in_backward(model, torch.optim.AdamW, lr=1e-3)
    streamgrad.enable(model, memory_budget="1GiB", keep="input", chunk_size=16)
    plans = []
    for _ in range(2):
        plans.append(counted_step(model, ids)[1].peak_bytes)
        optimizer.step()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert 3 * weights < plans[0] <= plans[1]
