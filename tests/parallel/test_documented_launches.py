"""Every launch line of docs/distributed.md, as it stands there, with the shipped configuration file, on two processes.

Only the model is another, and small sizes are added. Accelerate is told that there is an accelerator. The yamls train in bf16 and
clip: what comes out is compared with plain fp32 training that clips as well, by the distance that it has gone.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState

from gradients import more, total_gradient_error
from launching import CONFIGS, EXAMPLE, ON_CPU, ROOT, run, weights
from streamgrad.hf.estimates.shapes import shape_of
from streamgrad.memory.training_state import Setup, training_state
from tiny import VOCABULARY, tiny_model

PAGE = (ROOT / "docs" / "distributed.md").read_text()
SMALL = ["--length", 32, "--chunk-size", 5]
SEVERAL = {"--nnodes", "--num_machines"}  # machines
LAUNCHERS = {"accelerate": ["-m", "accelerate.commands.launch"], "torchrun": ["-m", "torch.distributed.run"]}


def documented() -> dict[str, list[str]]:
    """The words of every line that starts examples on one machine, by configuration (or torchrun) and script."""
    lines = [line for code in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in code.splitlines()]
    lines += re.findall(r"`(torchrun [^`]+)`", PAGE)
    found = {}
    for words in map(shlex.split, lines):
        if words[:1] in (["accelerate"], ["torchrun"]) and not SEVERAL & set(words):
            script = next(word for word in words if word.startswith(("examples/", "streamgrad")) and not word.endswith("yaml"))
            config = next((Path(word).stem for word in words if word.endswith("yaml")), "torchrun")
            objective = words[words.index("train") + 1] if "train" in words else ""
            found[" ".join(filter(None, [config, Path(script).stem, objective]))] = words
    return found


def started(words: list[str], model: Path, *options: object):
    """Run a documented line; a script that uses Accelerate goes through what tells it of an accelerator."""
    launcher, *rest = words
    if launcher == "accelerate":
        rest = [word for word in rest[1:] if word != "-m"]
    line: list[object] = []
    for word in rest:
        if word.endswith(("accelerate_example.py", "ulysses_trainer.py")) or (launcher, word) == ("accelerate", "streamgrad"):
            line.append(ON_CPU)
        if (launcher, word) == ("accelerate", "streamgrad"):
            line.append(ROOT / "src" / "streamgrad" / "__main__.py")
        elif word not in ("...", "--model_name_or_path"):
            line.append(model if word == "Qwen/Qwen3-0.6B" else ROOT / word if word.startswith("examples/") else word)
    port = ["--main_process_port", "0"] if launcher == "accelerate" else ["--standalone"]
    port = [] if SEVERAL & set(words) else port
    return run(*LAUNCHERS[launcher], *port, *line, *options)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    tiny_model("qwen3", dtype=torch.float32, tie_word_embeddings=False).save_pretrained(folder)
    return folder


def trained(
    start: Path, batches: list[torch.Tensor], *, clipping: float, momentum: float, rate: float
) -> dict[str, torch.Tensor]:
    """What plain fp32 training in one process makes of the start."""
    model = tiny_model("qwen3", dtype=torch.float32, tie_word_embeddings=False)
    model.load_state_dict(weights(start))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
    for ids in batches:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def batches(script: str) -> list[torch.Tensor]:
    """The batches of an example, all ranks together."""
    seeded = torch.Generator().manual_seed(0)
    if script == "accelerate_example":
        return list(torch.randint(VOCABULARY, (3 * 4, 32), generator=seeded).split(4))
    if script == "sequence_parallel":
        return [torch.randint(VOCABULARY, (1, 32), generator=seeded) for _ in range(3)]
    ids = torch.randint(VOCABULARY, (4, 32), generator=seeded)
    return [ids[index : index + 1] for index in (2, 3, 0, 1)]  # the Trainer's order, for its default seed


def check_held(engine: str, stdout: str, parameters: int) -> None:
    """What two processes hold is what `streamgrad plan --engine ... --gpus 2` says, but for the rounding of shards."""
    ranks = [json.loads(text) for text in re.findall(r"^held: (.*)$", stdout, re.MULTILINE)]
    assert len(ranks) == 2
    held = {name: sum(rank[name] for rank in ranks) for name in ranks[0]}
    sizes = {"layers": 1, "layer_parameters": parameters, "layer_trainable": parameters}
    outside = dict.fromkeys(("outside_parameters", "outside_trainable", "head_parameters", "head_trainable"), 0)
    state = training_state(replace(shape_of("qwen3-8b"), **sizes, **outside), Setup(engine=engine, gpus=2))
    assert held["weights"] == pytest.approx(2 * state.device["weights"], rel=0.03)
    # The examples' optimizer has one moment, and AdamW two.
    assert held["masters"] + 2 * held["state"] == pytest.approx(2 * state.device["optimizer state"], rel=0.03)
    if engine == "fsdp2":  # ZeRO-3 makes its gradients fp32 for the step
        assert held["gradients"] == pytest.approx(2 * state.gradient_share * 2 * parameters, rel=0.03)


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2 accelerate_example",
        "ulysses ulysses_trainer",
        *(pytest.param(f"{config} accelerate_example", marks=more) for config in ("ddp", "zero2", "zero3", "torchrun")),
        pytest.param("torchrun sequence_parallel", marks=more),
    ],
)
def test_an_example_trains(name, start, tmp_path):
    config, script = name.split()
    words = documented()[name]
    if config in ("fsdp2", "zero3"):  # from 16 bits, as models are published
        start = tmp_path / "start"
        tiny_model("qwen3", dtype=torch.bfloat16, tie_word_embeddings=False).save_pretrained(start)
    rate = ["--learning-rate", 1.0] if script == "ulysses_trainer" else []  # to go further than 16 bits round
    done = started(words, start, *SMALL, *rate, "--output", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    if config in ("fsdp2", "zero3"):
        check_held(config, done.stdout, sum(value.numel() for value in weights(start).values()))
    clipping = 1.0 if config in ("ulysses", "zero2", "zero3") else 1e9
    momentum = 0.0 if script == "ulysses_trainer" else 0.9
    expected = trained(start, batches(script), clipping=clipping, momentum=momentum, rate=1.0 if rate else 0.1)
    result = {key: value.float() for key, value in weights(tmp_path).items()}
    gone = total_gradient_error(weights(start), expected)
    off = total_gradient_error(result, expected)
    assert gone > 0.01, "training hardly moved, so nothing would be compared"
    assert off < 0.25 * gone, f"off by {off:.1e} after a way of {gone:.1e}"


@more
@pytest.mark.parametrize("name", ["torchrun streamgrad sft", "zero3 streamgrad dpo"])
def test_train_trains(name, tmp_path):
    cpu = ["--use_cpu", "true" if name.startswith("torchrun") else "false"]
    # In bf16, TRL's default: `train` without a model would choose fp32, and the configuration says bf16.
    options = ["--output_dir", tmp_path, "--max_steps", 2, "--max_length", 65, "--chunk_size", 16, "--bf16", "true", *cpu]
    words = [word for word in documented()[name] if word != "Qwen/Qwen3-0.6B"]
    done = started(words, tmp_path, *options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count(f"Saved: {tmp_path}") == 1 and "Trained by 2 processes" in done.stdout


@more
@pytest.mark.parametrize(
    ("launcher", "sizes", "off"),
    [
        ("torchrun", {"--nproc_per_node 8": "--nproc_per_node 1"}, 1e-3),
        ("accelerate", {"--num_processes 16": "--num_processes 2"}, 0.25),  # in bf16
    ],
)
def test_two_machines(launcher, sizes, off, start, tmp_path):
    """The lines for two machines, by two launchers that meet on this one, with one process each."""
    lines = re.findall(rf"^{launcher} .*(?:--nnodes|--num_machines) 2 .*$", PAGE, re.MULTILINE)
    assert len(lines) == 2
    script = Path(lines[0].split()[-2]).stem
    for before, after in ({"10.77.0.1": "127.0.0.1"} | sizes).items():
        assert before in lines[0], f"{before} is not in the documented line any more"
        lines = [line.replace(before, after) for line in lines]
    with ThreadPoolExecutor(2) as machines:
        runs = [machines.submit(started, shlex.split(line), start, *SMALL, "--output", tmp_path) for line in lines]
        for done in (each.result() for each in runs):
            assert done.returncode == 0, done.stderr[-4000:]
    expected = trained(start, batches(script), clipping=1e9, momentum=0.9, rate=0.1)
    gone = total_gradient_error(weights(start), expected)
    assert total_gradient_error(weights(tmp_path), expected) < off * gone


def test_every_configuration_and_script_is_documented():
    names = documented()
    assert {name.split()[0] for name in names} == {path.stem for path in CONFIGS.glob("*.yaml")} | {"torchrun"}
    assert {name.split()[1] for name in names} == {"accelerate_example", "ulysses_trainer", "sequence_parallel", "streamgrad"}


@pytest.mark.parametrize("config", ["fsdp2", "zero3"])
def test_an_engine_on_processors_is_refused(config, start, monkeypatch):
    """Accelerate would train with DDP and say nothing. Without the launcher, which sets no more than this."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    engine = {"fsdp2": "FSDP", "zero3": "DEEPSPEED"}[config]
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(sys, "argv", ["example", str(start), "--length", "8"])
    PartialState._reset_state()
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match=f"asked for {engine}, .*ACCELERATE_USE_CPU"):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    PartialState._reset_state()
    AcceleratorState._reset_state(True)
