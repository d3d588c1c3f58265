"""`streamgrad.estimate`: what each option adds, what fits, and which models and values are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

import streamgrad
from families import small_model
from streamgrad.hf.estimates.shapes import shape_of
from streamgrad.hf.small_copy import reduced_config
from streamgrad.memory import this_machine
from streamgrad.memory.costs import COMPONENTS
from streamgrad.memory.fit import FILLED, FILLED_BESIDE_HOST
from streamgrad.memory.seconds import Rates
from tiny import tiny_config, tiny_model


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """Plans for this machine's GPU would say something else on every machine."""
    monkeypatch.setattr(this_machine, "this_gpu", lambda: None)


@settings(max_examples=25)
@given(
    sequence=st.integers(1, 1_000_000),
    memory=st.integers(20, 160),
    host=st.integers(1, 512),
    method=st.sampled_from(["full", "lora"]),
    offload=st.sampled_from(["auto", "none", "host"]),
    batch=st.sampled_from([1, 3]),
)
def test_what_is_longer_than_the_longest_does_not_fit(sequence, memory, host, method, offload, batch):
    """And what is not, does: the planner's own arithmetic is nowhere below the bytes of the phases."""
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
    assert total("optimizer state", engine="fsdp2", gpus=8) == pytest.approx(8 * parameters / 8, rel=1e-3)
    pure = total("optimizer state", engine="fsdp2", gpus=8, master_dtype="bf16")
    assert pure == pytest.approx(4 * parameters / 8, rel=1e-3)
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
    """In several chunks. A layer of one chunk makes its keys once in backward, however little it keeps."""
    options = {"gpu_memory": "4TiB", "offload": "none"}
    seconds = [
        streamgrad.estimate("qwen3-4b", 131_072, keep=keep, **options).streamed.seconds for keep in ("input", "attention", "all")
    ]
    assert seconds[0].attention > seconds[1].attention == seconds[2].attention
    assert seconds[0].layers > seconds[1].layers > seconds[2].layers


def test_windows_are_counted():
    """Gemma 3 1B has 26 layers: every sixth sees everything, the others 512 tokens."""
    shape = shape_of("gemma-3-1b")
    assert (shape.layers, shape.full_attention_layers, shape.window) == (26, 4, 512)
    seconds = [
        streamgrad.estimate("gemma-3-1b", length, keep="input").streamed.seconds.attention for length in (100_000, 200_000)
    ]
    assert 3.5 < seconds[1] / seconds[0] < 4.0


def test_a_configuration_a_directory_and_a_model_are_taken(tmp_path):
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
        ({"method": "half"}, "method must be one of 'full', 'lora', got 'half'"),
        ({"method": "qlora"}, "QLoRA is method='lora' with quantization='nf4'"),
        ({"engine": "zero3"}, "engine='zero3' with gpus=1"),
        ({"gpus": 2}, "engine='none' with gpus=2"),
        ({"gpu_memory": "80 apples"}, "gpu_memory: '80 apples' is not an amount of memory"),
        (
            {"seq_len": None, "batch": 1 << 30},
            "nothing fits 78.7 GiB, not even batch=1073741824 of 128 tokens.*What fits: batch=1, or a la",
        ),
        ({"seq_len": 0}, "seq_len must be a whole number of at least 1, got 0"),
        ({"seq_len": 1000.5}, "seq_len must be a whole number of at least 1, got 1000.5"),
        ({"seq_len": "100"}, "seq_len must be a whole number of at least 1, got '100'"),
        ({"batch": True}, "batch must be a whole number of at least 1, got True"),
        ({"lora_rank": 8}, "lora_rank=8 is for method='lora'"),
        (
            {"seq_len": None, "gpu_memory": "20GiB"},
            "nothing fits 20.0 GiB.* alone take 30.0 GiB.*Adapters need less: method='lora'",
        ),
        (
            {"seq_len": None, "gpu_memory": "9GiB", "optimizer": "in-backward"},
            "What fits: optimizer='host' with weights='host', or a larger GPU",
        ),
        ({"keep": "all", "recompute_layers": 4}, "recompute_layers=4 with keep='all'"),
        ({"gpu_memory": 80}, "gpu_memory: 80 counts bytes.*Pass a unit, such as '80GiB'"),
    ],
)
def test_errors_name_the_value(options, words):
    arguments = {"model": "qwen3-4b", "seq_len": 1000} | options
    with pytest.raises(ValueError, match=words):
        streamgrad.estimate(**arguments)


def test_weights_on_the_host_are_planned_as_fsdp2_has_them():
    """The optimizer is with them, whichever place was asked for, and no layer runs out of its turn."""
    options = {"gpu": "rtx4090", "host_memory": "128GiB", "weights": "host"}
    reports = [streamgrad.estimate("qwen3-8b", optimizer=optimizer, **options) for optimizer in ("adamw", "host")]
    for report in reports:
        assert "optimizer state" not in {name for name, count in report.streamed.device_bytes.items() if count}
        assert "recomputed" not in str(report.streamed.plan)
    assert reports[0].streamed.longest_tokens == reports[1].streamed.longest_tokens
    for refused in ({"optimizer": "in-backward"}, {"optimizer": "adamw8bit"}, {"method": "lora", "quantization": "nf4"}):
        with pytest.raises(ValueError, match="weights='host' with optimizer=.*Pass optimizer='host'"):
            streamgrad.estimate("qwen3-8b", **options | refused)
    with pytest.raises(ValueError, match="recompute_layers=2 with engine='none', weights='host'"):
        streamgrad.estimate("qwen3-8b", recompute_layers=2, **options)


def test_small_chunks_take_as_long_as_their_launches():
    """A card that holds only small ones: time is what their launches take, of which many share those of forward."""
    crowded = streamgrad.estimate("gemma-3-1b", method="lora", gpu_memory="4GiB", optimizer="none").streamed
    parts = crowded.seconds
    chunks = sum(-(-crowded.longest_tokens // size) for size in crowded.plan.chunk_sizes)
    assert parts.total == parts.launches and 3.9e-3 * chunks < parts.launches < 4.3e-3 * chunks
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


def test_quantised_weights():
    """bitsandbytes packs the linear maps of the layers; embeddings, head and norms stay in 16 bits."""
    reports = {
        kind: streamgrad.estimate(
            "qwen3-8b", 32_768, method="lora", optimizer="none", quantization=kind, gpu_memory="24GiB", keep="attention"
        )
        for kind in ("none", "nf4", "int8")
    }
    weights = {kind: report.streamed.device_bytes["weights"] for kind, report in reports.items()}
    packed = 36 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12_288)
    assert weights["none"] - weights["nf4"] == pytest.approx(packed * (2 - 0.5625))
    assert weights["none"] - weights["int8"] == pytest.approx(packed)
    # A product makes one weight of 16 bits at a time, with checkpointing too.
    held = {kind: report.streamed.device_bytes["workspace"] for kind, report in reports.items()}
    assert held["nf4"] - held["none"] == pytest.approx(2 * 4096 * 12_288, rel=0.01)
    # Small ones would cost launches and dequantisations.
    assert set(streamgrad.estimate("qwen3-8b", 4096, method="lora", quantization="nf4").streamed.plan.chunk_sizes) == {4096}
    assert reports["nf4"].streamed.longest_tokens > reports["none"].streamed.longest_tokens
    assert "lora of rank 32 on nf4" in reports["nf4"].setup and any("nf4" in said for said in reports["nf4"].assumptions)


def test_quantised_weights_are_not_trained():
    with pytest.raises(ValueError, match="quantization='nf4' is for method='lora'"):
        streamgrad.estimate("qwen3-8b", 1024, quantization="nf4")


@pytest.mark.parametrize("options", [{}, {"head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 1}])
def test_a_model_whose_layers_differ_is_refused(options):
    """Gemma 4, whose kinds of attention have heads of their own, and layers that share keys."""
    config = small_model("gemma4_text", **options).config
    with pytest.raises(ValueError, match="gemma4_text model cannot be planned for: its layers differ"):
        streamgrad.estimate(config, 1000)
    with pytest.raises(ValueError, match="gemma4_text model cannot be made small: its layers differ"):
        reduced_config(config)
