"""The step benchmark, as far as a machine without a GPU can go: presets, errors and the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from benchmarks import lengths, step, subject
from benchmarks.commands import app
from benchmarks.peers import use_flash
from benchmarks.records import Session, append_records, rows_in, versions
from benchmarks.subject import Subject
from benchmarks.tables import step_table
from streamgrad.config import StreamConfig
from streamgrad.hf import presets as names
from streamgrad.hf.configs import preset_config, preset_model
from streamgrad.hf.presets import preset_names

ROOT = Path(__file__).parents[2]


def test_every_preset_has_a_configuration_of_its_published_shape():
    assert "qwen3-8b" in preset_names()
    for name in preset_names():
        assert preset_config(name).hidden_size >= 512
    config = preset_config("qwen3-8b")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (4096, 36, 151936)


def test_a_preset_is_built_where_and_as_asked():
    before = torch.get_default_dtype()
    model = preset_model("qwen3-0.6b", device=torch.device("meta"))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(0.6e9, rel=0.01)
    assert model.training
    assert torch.get_default_dtype() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "qwen9"}, "'qwen9' is not a preset.*qwen3-4b"),
        ({"methods": ["hf", "magic"]}, "'magic' is not a choice.*streamgrad"),
        ({"objective": "ppo"}, "'ppo' is not a choice.*dpo"),
        ({"objective": "dpo"}, "'hf' has steps of sft only.*'dpo'"),
        pytest.param({}, "torch sees none", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")),
    ],
)
def test_errors_name_the_value(change, words):
    options = {"model": "qwen3-4b", "lengths": [100], "methods": ["hf"], "config": StreamConfig(), "runs": 1, "command": ""}
    with pytest.raises(ValueError, match=words):
        list(step.measure_steps(**(options | change)))


def test_kernels_are_sorted_by_their_names():
    assert step.kernel_kind("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma") == "attention"
    assert step.kernel_kind("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>") == "attention"
    assert step.kernel_kind("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN") == "gemm"
    assert step.kernel_kind("Memcpy DtoH (Device -> Pinned)") == "copy"
    assert step.kernel_kind("_norm_backward_kernel") == "other"


def test_the_latest_peak_of_a_method_is_found(tmp_path):
    path = tmp_path / "step.jsonl"
    rows = [{"method": "liger", "model": "m", "seq_len": 9, "peak_bytes": peak} for peak in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert step.peaks_in(path, method="liger", model="m", lengths=[9]) == {9: 2}
    with pytest.raises(ValueError, match="no record of liger with m at 10 tokens"):
        step.peaks_in(path, method="liger", model="m", lengths=[9, 10])


def record(**changes) -> step.StepRecord:
    fields = {
        "benchmark": "memory", "method": "streamgrad", "model": "qwen3-8b", "seq_len": 9, "layers": 2, "step_ms": 1.0,
        "peak_bytes": 1, "reserved_bytes": 1, "host_bytes": 0, "policy": {}, "error": None, "device": "a GPU", "versions": {},
        "command": "",
    }  # fmt: skip
    return step.StepRecord(**(fields | changes))


def test_slope_is_between_the_shortest_and_the_longest():
    lengths_and_peaks = [(300, 9000), (100, 1000), (200, 7000), (400, None)]
    records = [record(seq_len=length, peak_bytes=peak) for length, peak in lengths_and_peaks]
    assert lengths.slope_bytes(records) == 40.0
    assert lengths.slope_bytes(records[:1]) is None


@pytest.mark.parametrize(
    ("offload", "tokens", "kept_bytes"),
    [("host", 1000, None), ("none", 1000, None), ("none", 100_000, 34 * 100_000 * 4096 * 2)],
)
@pytest.mark.parametrize("has_copy", [False, True])
def test_ballast_stands_for_the_missing_layers(offload, tokens, kept_bytes, has_copy):
    """Weights, a reference's weights, and the larger of inputs that stay on the device and the gradients that follow them."""
    whole = sum(p.nbytes for p in preset_model("qwen3-8b", device=torch.device("meta")).parameters())
    cut = preset_model("qwen3-8b", device=torch.device("meta"), layers=2)
    missing = whole - sum(p.nbytes for p in cut.parameters())
    ballast = lengths.ballast_of_missing_layers("qwen3-8b", offload=offload, has_copy=has_copy)
    assert ballast(cut, tokens) == (2 if has_copy else 1) * missing + (missing if kept_bytes is None else kept_bytes)


def test_cells_are_the_papers_and_trls():
    assert [(c.model, c.training, c.tokens, c.rows, c.layers) for c in lengths.cells("dpo")] == [
        ("qwen3-4b", "full", 57_200, 2, 2), ("qwen3-4b", "lora", 100_200, 2, 2), ("qwen3-8b", "lora", 60_900, 2, 2),
        ("qwen3-14b", "lora", 36_900, 2, 2), ("qwen3-32b", "lora", 7_800, 2, 2),
    ]  # fmt: skip
    assert [(c.model, c.tokens, c.rows) for c in lengths.cells("grpo", model="qwen3-4b")] == [
        ("qwen3-4b", 18_200, 8), ("qwen3-4b", 27_500, 8),
    ]  # fmt: skip
    assert len(lengths.cells("sft")) == 6
    tokens = [lengths.cells(name, model="gemma-3-1b")[0].tokens for name in ("sft", "dpo", "grpo")]
    assert tokens == [107_520, 59_392, 114_688]
    (small,) = lengths.cells("sft", card="24GiB")
    assert (small.model, small.training, small.tokens, small.layers) == ("qwen3-8b", "lora", 15_000, None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "ppo"}, "'ppo' is not a choice.*grpo"),
        ({"objective": "sft", "card": "12GiB"}, "'12GiB' is not a choice.*24GiB"),
        ({"objective": "grpo", "model": "qwen3-32b"}, "no longest sequence of qwen3-32b with grpo in 80GiB.*qwen3-14b"),
        ({"objective": "dpo", "card": "24GiB"}, "no longest sequence of any model with dpo in 24GiB.*qwen3-8b with sft"),
    ],
)
def test_cells_that_nobody_reached(options, words):
    with pytest.raises(ValueError, match=words):
        lengths.cells(**options)


def test_steps_of_every_method_and_batch(tiny_preset):
    made = list(step.measure_steps(**tiny_preset | {"methods": ["streamgrad", "mst", "hf"], "batches": [1, 3]}))
    assert [(r.method, r.batch) for r in made] == [(m, batch) for m in ("hf", "mst", "streamgrad") for batch in (1, 3)]
    assert all(r.error is None and r.step_ms > 0 and r.peak_bytes > 0 and r.seq_len == 33 for r in made)
    console = Console(width=200, record=True)
    console.print(step_table(made))
    assert "3 x 33" in console.export_text()


def test_a_method_is_measured_without_the_model_of_the_one_before(tiny_preset, monkeypatch):
    """Some recorded peaks are too large because the model of the method before was still on the device."""
    stock, built = subject.preset_model, []

    def build(*args, **options):
        assert not [reference for reference in built if reference() is not None]
        network = stock(*args, **options)
        built.append(weakref.ref(network))
        return network

    monkeypatch.setattr(subject, "preset_model", build)
    assert len(list(step.measure_steps(**tiny_preset | {"methods": ["streamgrad", "mst", "hf"]}))) == len(built) == 3


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_steps_of_every_objective(tiny_preset, objective, training):
    rows = lengths.ROWS[objective]
    (made,) = step.measure_steps(**tiny_preset | {"objective": objective, "training": training, "batches": [rows]})
    assert (made.error, made.objective, made.training, made.batch) == (None, objective, training, rows)
    assert made.policy["plan"].startswith("2 x input; chunks of 16 tokens")


def test_out_of_memory_is_a_record(tiny_preset, monkeypatch):
    def exhausted(*args):
        raise torch.OutOfMemoryError

    monkeypatch.setitem(step.OBJECTIVES, "sft", exhausted)
    (made,) = step.measure_steps(**tiny_preset)
    assert (made.error, made.step_ms, made.peak_bytes) == ("out of memory", None, None)


def test_a_cut_model_is_named_so():
    console = Console(width=200, record=True)
    console.print(step_table([record(ballast_bytes=1, training="lora"), record(layers=36, method="liger-offload")]))
    text = console.export_text()
    assert "qwen3-8b lora, 2 layers + ballast" in text and "liger-offload" in text


def test_records_and_table(tmp_path):
    shared = {"benchmark": "step", "model": "qwen3-4b", "device": "a GPU", "policy": {}, "versions": versions(), "command": ""}
    shared["layers"] = 36
    made = [
        step.StepRecord(
            method="hf", seq_len=9, step_ms=200.0, peak_bytes=10**9, reserved_bytes=2, host_bytes=0, error=None, **shared,
        ),
        step.StepRecord(
            method="streamgrad", seq_len=9, step_ms=None, peak_bytes=None, reserved_bytes=None, host_bytes=0,
            error="out of memory", **shared,
        ),
    ]  # fmt: skip
    append_records(tmp_path / "a" / "step.jsonl", made)
    append_records(tmp_path / "a" / "step.jsonl", made[:1])
    assert len((tmp_path / "a" / "step.jsonl").read_text().splitlines()) == 3
    assert step_table(made).row_count == 2


def test_help_has_an_example():
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, ["step", "--help"])
    assert result.exit_code == 0
    assert "--methods hf,liger,streamgrad" in result.output


def test_batches_from_the_command_line(on_cpu, tmp_path):
    out = tmp_path / "step.jsonl"
    result = on_cpu(f"step --model tiny --seq 33 --batch 1,2 --methods hf,mst --runs 1 --warm-ups 0 --out {out}")
    assert result.exit_code == 0, result.output
    assert [(row["method"], row["batch"]) for row in rows_in(out)] == [("hf", 1), ("hf", 2), ("mst", 1), ("mst", 2)]
    assert "--batch 1,2" in rows_in(out)[0]["command"]
    assert rows_in(out)[2]["policy"]["head_pieces"] == 16


def test_partitions_from_the_command_line(on_cpu, tmp_path):
    out = tmp_path / "partition.jsonl"
    result = on_cpu(f"partition --model tiny --seq 33 --chunk-sizes 8,16 --runs 1 --out {out}")
    assert result.exit_code == 0, result.output
    assert [row["policy"]["plan"].split(" tokens")[0] for row in rows_in(out)] == [
        "2 x input; chunks of 8",
        "2 x input; chunks of 16",
    ]


def test_memory_of_adapters_from_the_command_line(on_cpu, tmp_path):
    out = tmp_path / "memory.jsonl"
    options = "--model tiny --seq 32,64 --methods hf,streamgrad --training lora --offload none --chunk-size 16"
    result = on_cpu(f"memory {options} --out {out}")
    assert result.exit_code == 0, result.output
    assert [(row["training"], row["error"]) for row in rows_in(out)] == [("lora", None)] * 4
    assert rows_in(out)[-1]["policy"]["chunk_sizes"] == [16, 16] and rows_in(out)[-1]["command"].endswith("--chunk-size 16")
    assert "streamgrad: " in result.output and "KB of device memory a token" in result.output


def test_an_interrupted_run_is_resumed_where_it_stopped(on_cpu, tmp_path, monkeypatch):
    out, measured = tmp_path / "step.jsonl", []
    command = f"step --model tiny --seq 16,32,48 --methods hf,streamgrad --runs 1 --warm-ups 0 --out {out}"
    stock = step.OBJECTIVES["sft"]

    def interrupted(network, ids_BT, reference):
        measured.append(ids_BT.shape[1])
        loss = stock(network, ids_BT, reference)
        if len(measured) == 5:  # each cell is two steps: one is timed, one is counted
            raise KeyboardInterrupt
        return loss

    monkeypatch.setitem(step.OBJECTIVES, "sft", interrupted)
    result = on_cpu(command)
    assert result.exit_code == 130
    before = out.read_text()
    assert before.endswith("\n")
    assert [(row["method"], row["seq_len"], row["error"]) for row in rows_in(out)] == [("hf", 16, None), ("hf", 32, None)]

    measured[:] = range(5)
    result = on_cpu(command + " --resume")
    assert result.exit_code == 0, result.output
    assert measured[5:] == [48, 48, 16, 16, 32, 32, 48, 48]
    assert out.read_text().startswith(before) and len(rows_in(out)) == 6

    result = on_cpu(command + " --resume")
    assert "All 6 cells" in result.output and len(rows_in(out)) == 6


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("command", "another"), ("versions", {}), ("device", "a GPU"), ("batch", 2), ("objective", "dpo"), ("layers", 1),
        ("policy", {"chunk_size": 8}),
    ],
)  # fmt: skip
def test_a_record_of_something_else_is_not_resumed_from(tiny_preset, field, value):
    (made,) = step.measure_steps(**tiny_preset)
    row = json.loads(json.dumps(asdict(made)))
    changed = row | {field: row["policy"] | value if field == "policy" else value}
    assert not list(step.measure_steps(**tiny_preset, session=Session([row])))
    assert len(list(step.measure_steps(**tiny_preset, session=Session([changed])))) == 1


def test_numbers_that_are_none(on_cpu):
    result = on_cpu("step --seq 6k")
    assert isinstance(result.exception, ValueError) and "--seq must be whole numbers" in str(result.exception)


def test_a_step_with_layers_compiled(tiny_preset):
    ours, compiled = step.measure_steps(**tiny_preset | {"methods": ["streamgrad-compile", "streamgrad"]})
    assert (ours.method, compiled.method) == ("streamgrad", "streamgrad-compile")
    assert [record.policy["compile_layers"] for record in (ours, compiled)] == [False, True]


@pytest.mark.parametrize("method", ["streamgrad-fsdp2", "streamgrad-fsdp2-host"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_step_under_fsdp2(tied, method, tiny_preset):
    """With one rank. The step and its memory are there, and the group can be left."""
    names.presets()["tiny"]["tie_word_embeddings"] = tied
    try:
        alone, sharded = step.measure_steps(**tiny_preset | {"methods": ["streamgrad", method]})
    finally:
        torch.distributed.destroy_process_group()
    assert (alone.method, sharded.method) == ("streamgrad", method)
    assert sharded.error is None and sharded.step_ms > 0 and sharded.policy["plan"] == alone.policy["plan"]


def test_a_step_under_zero3(tiny_preset):
    """In a process of its own: DeepSpeed replaces torch's linear map in the one that it is started in."""
    script = f"""
import json, torch, deepspeed
from benchmarks import step, subject
from streamgrad.config import StreamConfig
from streamgrad.hf import presets as names
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for a minute
names.presets = lambda: {names.presets()!r}
options = dict(model="tiny", lengths=[33], runs=1, warm_ups=0, command="", device=torch.device("cpu"))
config = StreamConfig(chunk_size=16, keep="input")
for record in step.measure_steps(methods=["streamgrad", "streamgrad-zero3"], config=config, **options):
    print("ROW", json.dumps([record.method, record.error, record.step_ms, record.policy["plan"]]))
network = subject.preset_model("tiny", device=torch.device("cpu"))
weights = sum(parameter.nbytes for parameter in network.parameters())
optimizer = subject.zero3_for_one_rank(network, torch.device("cpu")).optimizer
held = [part for own in (optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat) for part in own]
print("HELD", json.dumps([weights, sum(part.nbytes for part in held), len(set(part.data_ptr() for part in held)) == len(held)]))
"""
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=ROOT)
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert [row[0] for row in rows] == ["streamgrad", "streamgrad-zero3"], done.stderr
    assert rows[1][1] is None and rows[1][2] > 0 and rows[1][3] == rows[0][3]
    # The report says that DeepSpeed's optimizer holds the weights a second time.
    weights, held, apart = next(json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("HELD "))
    assert held == 2 * weights and apart


def test_a_step_with_another_flash_attention(tiny_preset, monkeypatch):
    active = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", active.clear)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: active[-1] if active else None)
    found = []
    for flash in ("FA4", "FA2"):
        use_flash(flash)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (flash == "FA2")
        (record,) = step.measure_steps(**tiny_preset | {"methods": ["streamgrad"]})
        found.append((record.flash, record.policy["kernel"]))
    assert found == [("FA4", "flash"), ("FA2", "cudnn")]


@pytest.mark.parametrize("flash", ["FA3", "FA4"])
def test_a_flash_attention_that_is_missing_is_named(on_cpu, monkeypatch, flash):
    def missing(name):
        raise ModuleNotFoundError("No module named 'flash_attn'")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", missing)
    result = on_cpu(f"step --flash {flash}")
    assert isinstance(result.exception, ValueError) and f"needs the package flash-attn-{flash[-1]}" in str(result.exception)


def test_zero3_is_not_measured_beside_liger(on_cpu):
    result = on_cpu("step --methods liger,streamgrad-zero3")
    assert isinstance(result.exception, ValueError) and "two commands" in str(result.exception)


def test_peers_that_keep_more_are_the_same_model(tiny_preset, monkeypatch):
    """Gradients are those of full checkpointing, and nothing that is kept is run again."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: compiled.append(options))
    gradients, products = {}, {}
    for method in ("hf", "hf-nockpt", "hf-compile-nockpt", "hf-compile", "hf-sac"):
        built = {"training": "full", "objective": "sft", "layers": None, "device": torch.device("cpu")}
        peer = Subject.build(method, "tiny", **built)
        ids = torch.randint(0, 61, (1, 33), generator=torch.Generator().manual_seed(0))
        with FlopCounterMode(display=False) as flops:
            peer.step_on(ids, accumulates=False)()
        gradients[method] = torch.cat([parameter.grad.flatten().double() for parameter in peer.network.parameters()])
        products[method] = flops.get_total_flops()
        assert peer.outcome(StreamConfig())["policy"]["gradient_checkpointing"] == (not method.endswith("-nockpt"))
    assert compiled == [{"dynamic": True}] * 4
    for method, found in gradients.items():
        torch.testing.assert_close(found, gradients["hf"], rtol=0.05, atol=0.05 * gradients["hf"].abs().max().item(), msg=method)
    assert products["hf-sac"] == products["hf-nockpt"] < products["hf"] == products["hf-compile"]
