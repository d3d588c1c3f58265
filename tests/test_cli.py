"""The command line as a whole: what it imports, what its list of commands says, and that no wrong value ends in a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

import streamgrad
from streamgrad.cli import CheckFailed, main, one_line_errors
from streamgrad.cli.app import COMMANDS, app, loaded
from streamgrad.cli.device import chosen_device

# --- What is imported -----------------------------------------------------------------------------------------------------------


def imported_by(*words: str, **environment: str) -> set[str]:
    """The packages that a command imports, in a fresh interpreter."""
    code = f"""
import atexit, json, sys
from streamgrad.cli import main
atexit.register(lambda: print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}}))))
sys.argv = {["streamgrad", *words]!r}
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"trl", "datasets", "matplotlib", "PIL", "deepspeed", "torchvision", "pandas"}
SECONDS = {"torch", "transformers", "peft", "numpy"}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_list_of_commands_needs_neither_torch_nor_transformers(option):
    assert not imported_by(option) & (HEAVY | SECONDS)


@pytest.mark.parametrize(
    "options",
    [
        ["--seq-len", "65536", "--json"],
        ["--max", "--method", "lora", "--objective", "dpo", "--engine", "zero3", "--gpus", "8"],
    ],
)
def test_a_plan_of_a_preset_needs_neither_torch_nor_transformers(options):
    assert not imported_by("plan", "qwen3-8b", *options) & (HEAVY | SECONDS)


def test_a_plan_with_a_picture_needs_what_draws_it(tmp_path):
    imported = imported_by("plan", "qwen3-8b", "--max", "--out", str(tmp_path / "plan.png"))
    assert "matplotlib" in imported and not imported & {"torch", "transformers"}


def test_a_directory_is_planned_with_transformers_once(tmp_path):
    AutoConfig.for_model("qwen3", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    words, cache = ["plan", str(tmp_path / "model"), "--seq-len", "1000"], {"STREAMGRAD_CACHE": str(tmp_path / "cache")}
    first, second = imported_by(*words, **cache), imported_by(*words, **cache)
    assert {"torch", "transformers"} <= first and not first & (HEAVY - {"PIL"})
    assert not second & (HEAVY | SECONDS)


def test_public_names_are_found_when_they_are_asked_for():
    code = (
        "import sys, streamgrad; streamgrad.StreamConfig(); assert 'torch' not in sys.modules; "
        "assert {*streamgrad.__all__, 'objectives'} <= {*dir(streamgrad)}; streamgrad.distributed.make_zero3_leaves"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(callable(getattr(streamgrad, name)) for name in streamgrad.__all__)
    with pytest.raises(AttributeError, match="'streamgrad' has no attribute 'enabled'"):
        _ = streamgrad.enabled  # type: ignore[attr-defined]


# --- The list of commands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name):
    assert loaded(name).help.split("\n\n")[0] == COMMANDS[name]
    result = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "160"})
    assert result.exit_code == 0 and COMMANDS[name].split(",")[0] in result.output


def test_a_command_that_does_not_exist():
    result = CliRunner().invoke(app, ["plann"])
    assert result.exit_code == 2 and "plan" in result.output


def test_small_models_on_a_cpu_take_one_thread():
    """Two threads on two busy cores take six times as long for `check`."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert chosen_device("cpu") == torch.device("cpu") and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


# --- Errors ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (CheckFailed("it differs"), "streamgrad: it differs"),
        (ValueError("size: overflow\nException raised from somewhere.h:79\nframe #0: c10"), "streamgrad: size: overflow"),
        (ValueError("two\n  lines"), "streamgrad: two lines"),
        (PermissionError(13, "Permission denied", "/plan.png"), "streamgrad: [Errno 13] Permission denied: '/plan.png'"),
        (torch.OutOfMemoryError("CUDA out of memory."), "streamgrad: out of memory: CUDA out of memory."),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "streamgrad: out of memory: Default.* 9 bytes"),
    ],
)
def test_what_a_user_can_act_on_is_one_line(error, line):
    with pytest.raises(SystemExit) as stopped, one_line_errors():
        raise error
    assert re.fullmatch(line.replace("[", r"\["), stopped.value.code)


@pytest.mark.parametrize("bug", [RuntimeError("shapes differ"), TypeError("an argument is missing"), KeyError("h")])
def test_a_bug_keeps_its_traceback(bug):
    with pytest.raises(type(bug)), one_line_errors():
        raise bug


@pytest.fixture
def outcome(monkeypatch, capsys, tmp_path):
    """Runs the command with these words in an empty directory: 0, 2 with what was printed, or the one line of exit code 1."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> object:
        monkeypatch.setattr(sys, "argv", ["streamgrad", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        code, printed = stopped.value.code, capsys.readouterr().err
        return printed if code == 2 else code

    return run


NUMBERS = {
    "plan": {
        "--seq-len": 1, "--batch": 1, "--gpus": 1, "--lora-rank": 1, "--gemm-tflops": 1, "--attention-tflops": 2,
        "--gpu-memory": 1, "--host-memory": 1,
    },
    "profile": {"--seq-len": 1, "--layers": 1, "--chunk-size": 1},
}  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e400", "many", ""])
@pytest.mark.parametrize(
    ("command", "option", "count"), [(c, o, n) for c, options in NUMBERS.items() for o, n in options.items()]
)
def test_a_number_that_is_none_says_which_option_it_was(outcome, command, option, count, value):
    words = ["qwen3-0.6b", *([] if option == "--seq-len" else ["--seq-len", "512"])] if command == "plan" else []
    said = str(outcome(command, *words, option, *[value] * count))
    name = option.removeprefix("--").removesuffix("-tflops")
    assert re.search(name.replace("-", "[-_]"), said), said
    assert said.startswith(("streamgrad: ", "Usage: ")) and "Traceback" not in said


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "qwen3-0.6b", "--max", "--method", "lora", "--lora-rank", "9" * 30],
        ["profile", "--seq-len", "9" * 30],
    ],
    ids=lambda words: words[-2],
)
def test_a_number_that_is_too_large_says_so(outcome, words):
    said = str(outcome(*words))
    assert f"Invalid value for '{words[-2]}'" in said


@pytest.mark.parametrize(
    "options",
    [["--seq-len", "9" * 30], ["--seq-len", "8", "--batch", "9" * 30], ["--max", "--engine", "zero3", "--gpus", "9" * 30]],
)
def test_a_plan_can_be_made_of_any_size(outcome, options):
    assert outcome("plan", "qwen3-0.6b", *options) == 0


def test_a_preset_has_only_so_many_layers(outcome):
    said = outcome("profile", "--model", "qwen3-0.6b", "--layers", "999", "--seq-len", "8")
    assert said == "streamgrad: layers=999, and the model has 28. Pass at most that many."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "./nodir", "--max"], "'./nodir' is neither a directory that exists nor a preset. The presets are qwen3-0.6b"),
        (["check", "nodir"], "'nodir' is neither a directory that exists nor a preset"),
        (["plan", "t5", "--max"], "a t5 model is not a causal language model: it is an encoder-decoder"),
        (["check", "t5"], "a t5 model is not a causal language model: it is an encoder-decoder"),
        (["check", "empty"], "'empty' has no configuration that transformers can load"),
        (["plan", "qwen3-0.6b", "--max", "--out", "t5/config.json/plan.png"], "File exists: 't5/config.json'"),
    ],
)
def test_models_and_files_that_will_not_do(outcome, tmp_path, words, said):
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    (tmp_path / "empty").mkdir()
    line = str(outcome(*words))
    assert line.startswith("streamgrad: ") and said in line and "\n" not in line
