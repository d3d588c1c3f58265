"""`streamgrad plan` and `streamgrad.estimate`: the arithmetic against the probe, against measured steps, and against itself.

The measured steps are the records in benchmarks/results, made on a GPU by `streamgrad bench`. Each must be predicted or be of a
kind that is named here with the reason why it is not.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig
from typer.testing import CliRunner

import streamgrad
from streamgrad.cli.app import app
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config, with_layers
from streamgrad.hf.dry_run import meta_model, model_shape, profile_layer
from streamgrad.hf.estimate import FILLED, FILLED_BESIDE_HOST
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.costs import COMPONENTS, KEYS_AT_ONCE, LayerPolicy
from streamgrad.memory.model_shape import ModelShape
from streamgrad.memory.phases import Workload, checkpointing_phases, host_parts, streamed_phases
from streamgrad.memory.seconds import Rates, streamed_seconds
from tiny import FAMILIES, tiny_config, tiny_model, tokens

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
GB = 1e9


@cache
def shape_of(model: str, *, layers: int | None = None, lora_rank: int | None = None) -> ModelShape:
    config = preset_config(model)
    return model_shape(config if layers is None else with_layers(config, layers), lora_rank=lora_rank)


# --- The dry run against the runtime's probe, and against formulas ----------------------------------------------------------


def probed_costs(model, ids, *, fused_parts: bool):
    """What the planner measures on the first layer of a real model."""
    options = {"keep": "attention", "memory_budget": "1TB", "fused_kernels": "on" if fused_parts else "off"}
    streamgrad.enable(model, StreamConfig(**options))
    model(input_ids=ids, labels=ids)
    costs, *_ = InstalledForward.on(model.get_decoder()).stream.planner._costs.values()  # of the first kind of layer
    streamgrad.disable(model)
    return costs


# In the tiny models experts are run by a loop, over as many tokens as come. Softcap's only kernel lays its output out otherwise,
# and rotary embedding's reference leaves Gemma 3's layout where the GPU's kernel puts the heads of a token together.
OTHERWISE_ON_CPU = {"gpt_oss", "qwen3_moe", "gemma2", "gemma3_text"}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - OTHERWISE_ON_CPU))
@pytest.mark.parametrize("fused_parts", [True, False])
def test_a_layer_without_data_costs_what_the_probe_measures(family, fused_parts):
    config = tiny_config(family)
    costs = profile_layer(meta_model(config, dtype=torch.float32), fused_parts=fused_parts).costs
    probed = probed_costs(tiny_model(family, dtype=torch.float32), tokens(1, 256), fused_parts=fused_parts)
    # On a CPU the fused parts are computed by their references, and windows by masks: both make more tensors on the way.
    moments = {"widest", "at_attention"} if fused_parts or family == "mistral" else set()
    for name, count in vars(costs).items():
        assert name in moments or count == pytest.approx(getattr(probed, name), rel=2e-3), name


def test_bytes_and_products_of_a_known_shape():
    """Qwen3-8B written out: width 4096, 32 query and 8 key heads of 128, MLP of 12288, in bf16."""
    shape = shape_of("qwen3-8b")
    profile, costs = shape.profile, shape.profile.costs
    assert (costs.input, costs.keys_and_values, costs.attention) == (8192, 4096, 2 * 4096 + 4 * 32)
    norms = 4 * (2 + 32 + 8)  # a factor for each row
    # Normed input, queries and keys before norm and after rotary, angles, values, attention's output, residual, normed, MLP.
    saved = 8192 + 2 * (8192 + 2048) + 2 * 256 + 2048 + costs.attention + 2 * 8192 + 3 * 2 * 12288 + norms
    assert costs.graph == 8192 + saved
    matrices = 4096 * (4096 + 2 * 1024 + 4096 + 3 * 12288)
    assert profile.forward_flops == 2 * matrices and profile.backward_flops == 4 * matrices
    assert profile.projection_flops == 2 * 4096 * (4096 + 2 * 1024)
    assert costs.graph < costs.widest < 2 * costs.graph and costs.at_attention < costs.widest
    assert shape.layers * shape.layer_parameters + shape.outside_parameters == pytest.approx(8.19e9, rel=1e-3)


def test_experts_count_as_far_as_they_work():
    """Of 128 experts a token visits 8: the products of those, and the gradients of all."""
    shape = shape_of("qwen3-30b-a3b")
    expert, router = 3 * 2048 * 768, 2048 * 128
    attention = 2048 * 128 * (32 + 2 * 4 + 32)
    assert shape.profile.forward_flops == 2 * (8 * expert + router + attention)
    assert shape.layer_trainable == pytest.approx(128 * expert + router + attention, rel=1e-4)


def test_adapters_are_what_peft_attaches():
    shape = shape_of("qwen3-4b", lora_rank=32)
    widths = [(2560, 4096), (2560, 1024), (2560, 1024), (4096, 2560), (2560, 9728), (2560, 9728), (9728, 2560)]
    assert shape.layer_trainable == sum(32 * (inputs + outputs) for inputs, outputs in widths)
    assert shape.outside_trainable == shape.head_trainable == 0
    assert shape.profile.costs.gradients == 2 * shape.layer_trainable


def test_a_dry_run_leaves_the_model_as_it_was():
    model = meta_model(tiny_config("llama"), dtype=torch.float32)
    before = dict(model.named_parameters())
    profile_layer(model, fused_parts=True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert not streamgrad.is_enabled(model) and "forward" not in vars(model.get_decoder())


# --- Measured steps ---------------------------------------------------------------------------------------------------------


def records() -> list[dict]:
    lines = [line for name in ("memory", "max_length", "step") for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in lines]


def why_not(record: dict) -> str | None:
    """Why a record says nothing about the estimator."""
    if record["peak_bytes"] is None:
        return "it did not fit"
    if "liger" in record["method"]:
        return "Liger's kernels are not estimated"
    if record["method"] == "mst":
        return "mini-sequences are not estimated"
    if record["method"] in ("streamgrad-fsdp2", "streamgrad-zero3"):
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
    """Before backward took a bounded number of keys at a time, it took them all.

    Records name the bound. The first ones under it do not, but are known by chunks of more than 8,192 tokens, which were new too.
    """
    if "keys_at_once" in record["policy"]:
        return record["policy"]["keys_at_once"]
    has_bound = record["method"] == "streamgrad" and max(plan_in(record["policy"])[1]) > 8192
    return KEYS_AT_ONCE if has_bound else float("inf")


def plan_in(policy: dict) -> tuple[list[LayerPolicy], list[int]]:
    """The plan that a record spells out; where it does not list sizes of chunks, layers with larger ones are the last."""
    text = policy["plan"]
    kinds = re.findall(r"(\d+) x (input|attention|all)( on host)?", text)
    policies = [LayerPolicy(keep, on_host=bool(host)) for count, keep, host in kinds for _ in range(int(count))]
    if "chunk_sizes" in policy:
        return policies, policy["chunk_sizes"]
    small, large, count = re.search(r"chunks of (\d+) tokens(?:, of (\d+) in (\d+) layers)?", text).groups()
    layers = int(count or 0)
    return policies, [int(small)] * (len(policies) - layers) + [int(large or 0)] * layers


def predicted(record: dict) -> float:
    load = workload_of(record)
    if record["method"] == "hf":
        return max(moment.total_bytes for moment in checkpointing_phases(load))
    policies, chunk_sizes = plan_in(record["policy"])
    assert len(policies) == load.shape.layers
    return max(moment.total_bytes for moment in streamed_phases(load, policies, chunk_sizes, head_rows=4096))


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


# --- Estimates ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    sequence=st.integers(1, 1_000_000),
    memory=st.integers(20, 160),
    host=st.integers(1, 512),
    method=st.sampled_from(["full", "lora"]),
    offload=st.sampled_from(["auto", "none", "host"]),
    batch=st.sampled_from([1, 3]),
)
def test_what_is_longer_than_the_longest_does_not_fit(sequence, memory, host, method, offload, batch):
    """And what is not, does: the planner's own arithmetic is nowhere below the bytes of the moments."""
    report = streamgrad.estimate(
        "qwen3-4b", sequence, method=method, optimizer="none", gpu_memory=f"{memory}GiB", host_memory=f"{host}GiB",
        offload=offload, batch=batch,
    )  # fmt: skip
    streamed, plain = report.streamed, report.checkpointing
    assert streamed.fits == (sequence <= streamed.longest_tokens) or abs(sequence - streamed.longest_tokens) < 128
    assert plain.longest_tokens <= streamed.longest_tokens or offload == "host"  # of which there may be little
    assert streamed.peak_bytes == sum(streamed.device_bytes.values()) == streamed.plan.peak_bytes
    assert sum(streamed.host_bytes.values()) == pytest.approx(streamed.plan.host_bytes)
    assert set(streamed.device_bytes) | set(streamed.host_bytes) | set(plain.device_bytes) <= set(COMPONENTS)


def test_without_a_length_the_longest_is_taken():
    report = streamgrad.estimate("qwen3-4b", gpu_memory="40GiB", optimizer="none")
    assert report.seq_len == report.streamed.longest_tokens > 5 * report.checkpointing.longest_tokens > 0
    assert report.streamed.fits and not report.checkpointing.fits
    assert report.streamed.peak_bytes > 0.8 * 40 * 2**30, "memory is left over at the longest sequence"


def test_what_each_option_adds():
    def total(component: str, **options) -> float:
        return streamgrad.estimate("qwen3-4b", 4096, **options).streamed.device_bytes.get(component, 0.0)

    parameters = 4.022e9
    assert total("weights") == pytest.approx(2 * parameters, rel=1e-3)
    states = {name: total("optimizer state", optimizer=name) for name in ("none", "sgd", "adamw8bit", "adamw")}
    assert states == pytest.approx({"none": 0, "sgd": 0, "adamw8bit": 2 * parameters, "adamw": 4 * parameters}, rel=1e-3)
    assert total("optimizer state", method="lora") < 0.02 * states["adamw"]
    # A second, frozen model; with adapters the reference is the model without them.
    assert total("weights", objective="dpo") == pytest.approx(4 * parameters, rel=1e-3)
    assert total("weights", objective="dpo", method="lora") < 2.1 * parameters
    # Engines: shares of what they shard. DeepSpeed keeps fp32 moments and a copy of the weights.
    assert total("weights", engine="zero3", gpus=8) == pytest.approx(2 * parameters / 8, rel=1e-3)
    assert total("optimizer state", engine="zero2", gpus=8) == pytest.approx(12 * parameters / 8, rel=1e-3)
    assert total("optimizer state", engine="fsdp2", gpus=8) == pytest.approx(4 * parameters / 8, rel=1e-3)
    assert total("weights", engine="ddp", gpus=8) == pytest.approx(2 * parameters, rel=1e-3)


def test_pairs_are_two_sequences_and_take_a_reference_pass():
    sft = streamgrad.estimate("qwen3-4b", 8192, batch=2, keep="input", offload="none").streamed
    dpo = streamgrad.estimate("qwen3-4b", 8192, batch=1, keep="input", offload="none", objective="dpo").streamed
    assert dpo.device_bytes["kept inputs"] == sft.device_bytes["kept inputs"]
    assert dpo.seconds.attention == sft.seconds.attention and dpo.seconds.layers == sft.seconds.layers
    assert dpo.seconds.head == pytest.approx(4 / 3 * sft.seconds.head)  # logits are made twice
    assert 0 < dpo.seconds.reference < sft.seconds.total / 3
    assert sft.seconds.reference == 0


def test_keeping_more_takes_less_time():
    options = {"gpu_memory": "4TiB", "offload": "none"}
    seconds = [
        streamgrad.estimate("qwen3-4b", 65_536, keep=keep, **options).streamed.seconds for keep in ("input", "attention", "all")
    ]
    assert seconds[0].attention > seconds[1].attention == seconds[2].attention
    assert seconds[0].layers > seconds[1].layers > seconds[2].layers


def test_windows_are_counted():
    """Gemma 3 1B: of 26 layers, every sixth sees everything, the others 512 tokens."""
    shape = shape_of("gemma-3-1b")
    assert (shape.layers, shape.full_attention_layers, shape.window) == (26, 4, 512)
    seconds = [
        streamgrad.estimate("gemma-3-1b", length, keep="input").streamed.seconds.attention for length in (100_000, 200_000)
    ]
    assert 3.5 < seconds[1] / seconds[0] < 4.0


def test_a_configuration_a_directory_and_a_model_will_do(tmp_path):
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    reports = [
        streamgrad.estimate(model, 1000, dtype="float32") for model in (config, str(tmp_path), tmp_path, tiny_model("llama"))
    ]
    assert len({report.streamed.peak_bytes for report in reports}) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "qwen9"}, "'qwen9' is neither a directory that exists nor a preset.*qwen3-8b"),
        ({"model": "./nowhere"}, "'./nowhere' is neither a directory that exists nor a preset.*qwen3-8b.*Qwen/Qwen3-8B"),
        ({"model": "some/where/else"}, "'some/where/else' is neither a directory that exists"),
        ({"method": "half"}, "method='half' is not a choice.*'lora'"),
        ({"engine": "zero3"}, "engine='zero3' with gpus=1"),
        ({"gpus": 2}, "engine='none' with gpus=2"),
        ({"gpu_memory": "80 apples"}, "gpu_memory: '80 apples' is not an amount of memory"),
        ({"seq_len": None, "batch": 1 << 30}, "nothing fits 80GiB, not even batch=1073741824 of 128 tokens"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"seq_len": 1000.5}, "seq_len=1000.5 will not do.*whole number"),
        ({"seq_len": "100"}, "seq_len='100' will not do.*whole number"),
        ({"batch": True}, "batch=True will not do.*whole number"),
        ({"lora_rank": 8}, "lora_rank=8 is for method='lora'"),
        ({"seq_len": None, "gpu_memory": "20GiB"}, "nothing fits 20GiB.* alone take 22.5 GiB.*method='lora'"),
    ],
)
def test_errors_name_the_value(options, words):
    arguments = {"model": "qwen3-4b", "seq_len": 1000} | options
    with pytest.raises(ValueError, match=words):
        streamgrad.estimate(**arguments)


def test_small_chunks_take_as_long_as_their_launches():
    """A card that holds only small ones: time is what their launches take, and not what their products do."""
    crowded = streamgrad.estimate("gemma-3-1b", method="lora", gpu_memory="4GiB", optimizer="none").streamed
    parts = crowded.seconds
    chunks = sum(-(-crowded.longest_tokens // size) for size in crowded.plan.chunk_sizes)
    assert parts.total == parts.launches == pytest.approx(5.4e-3 * chunks)
    assert parts.launches > parts.attention + parts.layers + parts.head
    roomy = streamgrad.estimate("qwen3-8b", 65_536, optimizer="none", gpu_memory="140GiB").streamed.seconds
    assert roomy.total == roomy.attention + roomy.layers + roomy.head > roomy.launches > 0


def test_less_of_a_gpu_is_filled_beside_host_memory():
    for offload, share in (("none", FILLED), ("host", FILLED_BESIDE_HOST)):
        longest = streamgrad.estimate("gemma-3-1b", gpu_memory="8GiB", offload=offload, keep="input", optimizer="none").streamed
        assert share - 0.01 < longest.peak_bytes / (8 * 2**30) <= share and longest.fits


def test_heads_that_cannot_be_shared_are_refused():
    """By `plan`, `check` and `enable` alike: transformers builds such a model, and its attention fails."""
    config = tiny_config("qwen3", num_attention_heads=3, num_key_value_heads=2)
    with pytest.raises(ValueError, match="its 3 query heads cannot share 2 key/value heads evenly"):
        streamgrad.estimate(config, 100)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_a_positive_number(rate):
    with pytest.raises(ValueError, match=r"attention_backward=.* TFLOP/s.* Pass a finite one above 0"):
        Rates(attention_backward=rate)


def test_a_directory_without_a_configuration_says_so(tmp_path):
    with pytest.raises(ValueError, match="no configuration that transformers can load: .*config.json"):
        streamgrad.estimate(tmp_path, 100)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden_size": "wide"}')
    with pytest.raises(ValueError, match="no configuration that transformers can load: .*'hidden_size' expected int, got str"):
        streamgrad.estimate(tmp_path, 100)


@pytest.mark.parametrize(
    ("kind", "reason"), [("t5", "encoder-decoder"), ("bart", "encoder-decoder"), ("clip", "knows no CLIPConfig")]
)
def test_what_is_no_causal_language_model_is_refused_in_one_line(kind, reason, tmp_path):
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    for model in (config, tmp_path):
        with pytest.raises(ValueError, match=rf"a {kind} model is not a causal language model: .*{reason}") as refused:
            streamgrad.estimate(model, 100)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_a_model_that_cannot_be_streamed_is_refused():
    config = AutoConfig.for_model("bloom", hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
    with pytest.raises(ValueError, match="cannot be streamed"):
        streamgrad.estimate(config, 100)


# --- The command --------------------------------------------------------------------------------------------------------------


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})


def test_the_table_says_what_the_report_says(tmp_path):
    picture = tmp_path / "plots" / "plan.png"
    result = run("qwen3-8b", "--seq-len", "65536", "--optimizer", "none", "--out", str(picture))
    assert result.exit_code == 0, result.output
    report = streamgrad.estimate("qwen3-8b", 65_536, optimizer="none")
    assert f"{report.streamed.longest_tokens:,}" in result.output and str(report.streamed.plan) in result.output
    for component, count in report.streamed.device_bytes.items():
        if count:
            assert re.search(rf"{component} .*{count / 2**30:,.2f} GiB", result.output), component
    assert all(line in result.output for line in report.assumptions)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen3-4b", "--seq-len", "4000000"], r"This does not fit. Up to [\d,]+ tokens would.*Smallest plan: "),
        (["qwen3-8b", "--seq-len", "1000", "--gpu-memory", "24GiB"], "No length fits: weights .* take 45.77 GiB.*--method lora"),
    ],
)
def test_what_does_not_fit_says_what_would(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 0 and re.search(words, " ".join(result.output.split()))


def test_json_is_the_report():
    result = run("qwen3-4b", "--max", "--method", "lora", "--json", "--gpu-memory", "24GiB", "--gemm-tflops", "100")
    row = json.loads(result.output)
    expected = streamgrad.estimate("qwen3-4b", method="lora", gpu_memory="24GiB", rates=Rates(gemm=100e12)).to_dict()
    assert row == json.loads(json.dumps(expected))
    assert row["streamed"]["seconds"]["total"] > 0 and row["streamed"]["plan"].startswith(("36 x", "1", "2", "3"))


def test_a_length_or_the_longest():
    for arguments in ([], ["--max", "--seq-len", "9"]):
        result = run("qwen3-4b", *arguments)
        assert isinstance(result.exception, ValueError) and "--max" in str(result.exception)


def test_the_table_in_the_documentation_is_what_the_command_prints():
    text = (RESULTS.parents[1] / "docs" / "plan.md").read_text()
    command = re.search(r"^python -m streamgrad plan (.*)$", text, flags=re.MULTILINE)
    shown = re.search(r"^```\n(qwen3-8b.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert command is not None and shown is not None
    result = CliRunner().invoke(app, ["plan", *command[1].split()], env={"COLUMNS": "100"})
    printed = "\n".join(line.rstrip() for line in result.output.splitlines())
    assert printed.startswith(shown[1]), (
        "run the command with COLUMNS=100 and --out docs/images/plan.png, and show what it prints"
    )


def test_the_code_in_the_documentation_runs():
    blocks = re.findall(r"```python\n(.*?)```", (RESULTS.parents[1] / "docs" / "plan.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/plan.md", "exec"), {})
