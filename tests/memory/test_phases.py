"""The bytes of each phase, and the time, against measured steps.

The measured steps are the records in benchmarks/results, made on a GPU. Each must be predicted, or be of a kind that is named
here with the reason why it is not.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import streamgrad
from streamgrad.hf.configs import preset_config, with_layers
from streamgrad.hf.estimates import shapes
from streamgrad.hf.presets import presets
from streamgrad.memory.costs import KEYS_AT_ONCE, LayerPolicy, ModelShape
from streamgrad.memory.phases import Workload, checkpointing_phases, host_parts, streamed_phases
from streamgrad.memory.seconds import Rates, streamed_seconds

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@cache
def shape_of(preset: str, *, layers: int | None, lora_rank: int | None) -> ModelShape:
    whole = layers in (None, presets()[preset]["num_hidden_layers"])
    return shapes.shape_of(preset if whole else with_layers(preset_config(preset), layers), lora_rank=lora_rank)


def records() -> list[dict]:
    lines = [
        line
        for name in ("memory", "max_length", "step", "partition")
        for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()
    ]
    return [json.loads(line) for line in lines]


def why_not(record: dict) -> str | None:
    """Return why a record says nothing about the estimator."""
    if record["peak_bytes"] is None:
        return "it did not fit"
    if "liger" in record["method"]:
        return "Liger's kernels are not estimated"
    if record["method"] in ("mst", "hf-nockpt", "hf-compile", "hf-compile-nockpt", "hf-sac"):
        return "mini-sequences and other peers than checkpointing are not estimated"
    if record["method"].startswith(("streamgrad-fsdp2", "streamgrad-zero3")):
        return "what an engine holds where one rank is all there is is not estimated"
    if record.get("accumulates"):
        return "its gradients were there before"
    if record.get("objective", "sft") != "sft":
        return "its loss and its reference pass are the benchmark's own"
    if record["method"] == "streamgrad" and "plan" not in record["policy"]:
        return "it was made before plans and fused kernels"
    return None


def workload_of(record: dict) -> Workload:
    layers = record.get("layers")
    shape = shape_of(record["model"], layers=layers, lora_rank=32 if record.get("training") == "lora" else None)
    weights = shape.itemsize * (shape.layers * shape.layer_parameters + shape.outside_parameters)
    resident = {"weights": weights, "other": float(record.get("ballast_bytes", 0))}
    return Workload(shape, record.get("batch", 1), record["seq_len"], resident, keys_at_once=keys_at_once(record))


def keys_at_once(record: dict) -> float:
    """Return the bound on keys in backward. Before there was one, backward took them all.

    Records name the bound. The first ones under it do not, but are known by chunks of more than 8,192 tokens, which were new too.
    """
    if "keys_at_once" in record["policy"]:
        return record["policy"]["keys_at_once"]
    has_bound = record["method"] == "streamgrad" and max(plan_in(record["policy"])[1]) > 8192
    return KEYS_AT_ONCE if has_bound else float("inf")


def plan_in(policy: dict) -> tuple[list[LayerPolicy], list[int]]:
    """Return the plan that a record spells out. Where it does not list sizes of chunks, layers with larger ones are the last.

    Records say whether the host kept attention's projection too. The first ones where it did do not, but are known by whole
    graphs beside attention on the host, which were new too.
    """
    text = policy["plan"]
    projection = policy.get("host_keeps_projection", re.search(r"attention on host, \d+ x all", text) is not None)
    kinds = re.findall(r"(\d+) x (input|attention|all)( on host)?", text)
    policies = [
        LayerPolicy(keep, bool(host), projection=projection and bool(host) and keep == "attention")
        for count, keep, host in kinds
        for _ in range(int(count))
    ]
    if "chunk_sizes" in policy:
        return policies, policy["chunk_sizes"]
    small, large, count = re.search(r"chunks of (\d+) tokens(?:, of (\d+) in (\d+) layers)?", text).groups()
    layers = int(count or 0)
    return policies, [int(small)] * (len(policies) - layers) + [int(large or 0)] * layers


def predicted(record: dict) -> float:
    load = workload_of(record)
    if record["method"] == "hf":
        return max(phase.total_bytes for phase in checkpointing_phases(load))
    policies, chunk_sizes = plan_in(record["policy"])
    assert len(policies) == load.shape.layers
    return max(phase.total_bytes for phase in streamed_phases(load, policies, chunk_sizes, head_rows=4096))


def identity(record: dict) -> str:
    return "-".join(str(record.get(key)) for key in ("method", "model", "training", "batch", "seq_len", "layers"))


@pytest.mark.parametrize("record", [record for record in records() if why_not(record) is None], ids=identity)
def test_predicted_peak_is_within_5_per_cent_of_the_measured_one(record):
    assert predicted(record) == pytest.approx(record["peak_bytes"], rel=0.05)


@pytest.mark.parametrize(
    "record",
    [r for r in records() if r["benchmark"] == "max-length" and r["ballast_bytes"] and r.get("objective", "sft") == "sft"],
    ids=identity,
)
def test_what_ran_on_a_card_is_said_to_fit_it(record):
    """Layers that were not built had their weight in ballast, so the step is that of the whole model."""
    policy = record["policy"]
    report = streamgrad.estimate(
        record["model"], record["seq_len"], method=record["training"], optimizer="none", keep=policy["keep"],
        offload=policy["offload"], gpu_memory=re.search(r"--gpu-memory (\S+)", record["command"])[1], host_memory="4TiB",
    )  # fmt: skip
    assert report.streamed.fits == (record["error"] is None) == (record["seq_len"] <= report.streamed.longest_tokens)


def test_enough_was_measured_and_little_is_left_out():
    """At least 12 configurations, full and LoRA, with every policy; and only for the reasons above."""
    used = [record for record in records() if why_not(record) is None]
    assert len({identity(record) + str(record["policy"].get("offload")) for record in used}) >= 12
    assert {record.get("training") for record in used} >= {"full", "lora"}
    plans = " ".join(record["policy"].get("plan", "") for record in used)
    assert all(f"x {kind}" in plans for kind in ("input;", "input on host", "attention,", "attention on host", "all"))
    assert sum(why_not(record) == "it was made before plans and fused kernels" for record in records()) <= 2


@pytest.mark.parametrize("record", [r for r in records() if r["method"] == "streamgrad" and why_not(r) is None], ids=identity)
def test_host_bytes_are_those_that_were_pinned(record):
    policies, _ = plan_in(record["policy"])
    assert sum(host_parts(workload_of(record), policies).values()) == pytest.approx(record["host_bytes"], rel=0.05)


@pytest.mark.parametrize("record", [r for r in records() if r["method"] == "streamgrad" and why_not(r) is None], ids=identity)
def test_a_long_step_takes_a_little_longer_than_its_flops(record):
    """Where attention is most of the step. A first step also compiles its kernels and pins host memory, which takes seconds."""
    load = workload_of(record)
    policies, chunk_sizes = plan_in(record["policy"])
    products = 3 if load.shape.head_trainable else 2
    least = streamed_seconds(load, policies, chunk_sizes, Rates(), head_products=products, reference=False).total
    assert least < record["step_ms"] / 1e3
    if record["benchmark"] == "memory" and record["seq_len"] > 100_000:  # after a step that warmed up
        assert record["step_ms"] / 1e3 < 1.15 * least
