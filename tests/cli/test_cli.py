"""The command line as a whole: what it imports, what its list of commands says, and that no wrong value ends in a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

import streamgrad
from streamgrad.cli import CheckFailed, main, one_line_errors
from streamgrad.cli.app import COMMANDS, app, loaded
from streamgrad.cli.chosen_device import chosen_device

# --- What is imported -----------------------------------------------------------------------------------------------------------


def imported_by(*words: str) -> set[str]:
    """The packages that a command imports, in a fresh interpreter."""
    code = f"""
import atexit, json, sys
from streamgrad.cli import main
atexit.register(lambda: print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}}))))
sys.argv = {["streamgrad", *words]!r}
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


HEAVY = {"trl", "datasets", "matplotlib", "PIL", "deepspeed", "torchvision", "pandas"}
SECONDS = {"torch", "transformers", "peft", "numpy"}


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_needs_neither_torch_nor_transformers(words):
    assert not imported_by(*words) & (HEAVY | SECONDS)


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


def test_a_plan_of_a_directory_needs_what_runs_its_layers(tmp_path):
    AutoConfig.for_model("olmo2", num_hidden_layers=2).save_pretrained(tmp_path / "model")
    imported = imported_by("plan", str(tmp_path / "model"), "--seq-len", "1000,2000")
    assert {"torch", "transformers"} <= imported and not imported & (HEAVY - {"PIL"})


def test_public_names_are_found_when_they_are_asked_for():
    code = (
        "import sys, streamgrad; streamgrad.StreamConfig(); assert 'torch' not in sys.modules; "
        "assert {*streamgrad.__all__, 'objectives'} <= {*dir(streamgrad)}; streamgrad.parallel.make_zero3_leaves; "
        "assert streamgrad.distributed.make_zero3_leaves is streamgrad.parallel.make_zero3_leaves"
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


@pytest.mark.parametrize("given", ["", "max_split_size_mb:64"])
def test_the_allocators_segments_may_grow_unless_it_was_set_up(given):
    code = """
import atexit, os, sys
from streamgrad.cli import main
atexit.register(lambda: print(sorted(v for k, v in os.environ.items() if k in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))))
sys.argv = ["streamgrad", "--version"]
main()
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environment |= {"PYTORCH_CUDA_ALLOC_CONF": given} if given else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == str([given or "expandable_segments:True"]), done.stderr


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
    "bench": {"--seq-len": 1, "--layers": 1, "--runs": 1},
}  # fmt: skip


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e400", "many", ""])
@pytest.mark.parametrize(
    ("command", "option", "count"), [(c, o, n) for c, options in NUMBERS.items() for o, n in options.items()]
)
def test_a_number_that_is_none_says_which_option_it_was(outcome, command, option, count, value):
    words = ["qwen3-0.6b", *([] if option == "--seq-len" else ["--seq-len", "512"])] if command in ("plan", "bench") else []
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
    [["--seq-len", "9" * 30], ["--seq-len", "8", "--batch", "9" * 30], ["--max", "--engine", "zero3", "--gpus", "8" * 30]],
)
def test_a_plan_can_be_made_of_any_size(outcome, options):
    assert outcome("plan", "qwen3-0.6b", *options) == 0


def test_a_picture_lies_where_it_is_said_to_lie(outcome, tmp_path):
    """matplotlib would add an ending of its own."""
    assert outcome("plan", "qwen3-0.6b", "--max", "--out", "picture") == 0
    assert [file.name for file in tmp_path.iterdir()] == ["picture"]
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
    said = outcome("plan", "qwen3-0.6b", "--max", "--out", str(tmp_path))
    assert said == f"streamgrad: {tmp_path} cannot be written: Is a directory. Pass another place to write to."


def test_a_preset_has_only_so_many_layers(outcome):
    said = outcome("profile", "--model", "qwen3-0.6b", "--layers", "999", "--seq-len", "8")
    assert said == "streamgrad: layers=999, but the model has only 28. Pass at most that many."


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "./nodir", "--max"], "'./nodir' is neither a directory that exists nor a preset. The presets are qwen3-0.6b"),
        (["check", "nodir"], "'nodir' is neither a directory that exists nor a preset"),
        (["plan", "t5", "--max"], "a t5 model is not a causal language model: it is an encoder-decoder"),
        (["check", "t5"], "a t5 model is not a causal language model: it is an encoder-decoder"),
        (["check", "empty"], "'empty' has no configuration that transformers can load"),
        (["plan", "qwen3-0.6b", "--max", "--out", "t5/config.json/plan.png"], "cannot be written: a part of its path is a file"),
    ],
)
def test_models_and_files_that_are_refused(outcome, tmp_path, words, said):
    AutoConfig.for_model("t5").save_pretrained(tmp_path / "t5")
    (tmp_path / "empty").mkdir()
    line = str(outcome(*words))
    assert line.startswith("streamgrad: ") and said in line and "\n" not in line


QWEN = {
    "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 61,
}  # fmt: skip


@pytest.mark.parametrize("command", [["plan", "--max"], ["plan", "--max", "--method", "lora"], ["check"]], ids=" ".join)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        *((json.dumps(QWEN | {name: 0}), f"{name}=0 leaves nothing to train in a qwen3 model. Set it to at least 1")
          for name in QWEN if name != "model_type"),
        (json.dumps(QWEN | {"hidden_size": -1}), "hidden_size=-1 leaves nothing to train in a qwen3 model"),
        (json.dumps(QWEN | {"hidden_size": "wide"}), "'hidden_size' expected int, got str .value: 'wide'.. Pass a directory"),
        (json.dumps(QWEN | {"vocab_size": None}), "'vocab_size' expected int, got NoneType"),
        (json.dumps(QWEN | {"num_hidden_layers": 1.5}), "'num_hidden_layers' expected int, got float"),
        (json.dumps(QWEN | {"model_type": "qwen9"}), "model type `qwen9` but Transformers does not recognize"),
        (json.dumps({name: QWEN[name] for name in QWEN if name != "model_type"}), "Should have a `model_type` key"),
        ("{}", "Should have a `model_type` key"),
        ("", "is not a valid JSON file. Pass a directory whose config.json was written by save_pretrained"),
        ("hello", "is not a valid JSON file"),
        (json.dumps(QWEN)[:-9], "is not a valid JSON file"),
        ("null", "no configuration that transformers can load: .*Pass a directory whose config.json was written"),
        ("[" * 100_000, "no configuration that transformers can load"),
        ("\x00", "is not a valid JSON file"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(outcome, tmp_path, command, text, said):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(text)
    line = str(outcome(command[0], "model", *command[1:]))
    assert re.fullmatch(rf"streamgrad: .*{said}.*", line), line


@pytest.mark.parametrize("command", [["plan", "--max"], ["check"]], ids=" ".join)
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 in config.json is more than any model has: at most 4,096"),
        ({"hidden_size": 10**12}, "hidden_size=1000000000000 in config.json is more than any model has"),
        ({"num_attention_heads": 10**9}, "num_attention_heads=1000000000"),
        ({"vocab_size": 1 << 62}, f"vocab_size={1 << 62}"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer=1000000000"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers=1000000000"),
        ({"model_type": "qwen3_moe", "num_experts": 10**9}, "num_experts=1000000000"),
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_refused_before_anything_is_built(outcome, tmp_path, monkeypatch, command, values, said):
    """transformers would make a list of 10**9 layers while it loads the configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN | values))
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("it was loaded"))
    line = str(outcome(command[0], "model", *command[1:]))
    assert said in line and line.startswith("streamgrad: "), line


OWN_CLASSES = {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.MyModel"}


@pytest.mark.parametrize("command", [["plan", "--max"], ["check"], ["bench", "--seq-len", "8"]], ids=" ".join)
def test_code_that_comes_with_a_configuration_is_not_run(outcome, tmp_path, monkeypatch, command):
    """Nor does anybody ask whether to run it, which would wait for an answer."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "code.py").write_text("raise SystemExit('this was run')")
    file = tmp_path / "model" / "config.json"
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    file.write_text(json.dumps(QWEN | {"model_type": "mine", "auto_map": OWN_CLASSES}))
    line = str(outcome(command[0], "model", *command[1:]))
    assert re.fullmatch(r"streamgrad: .*class of its own .*is not run here, and transformers has no model_type 'mine'.*", line)
    file.write_text(json.dumps(QWEN | {"auto_map": OWN_CLASSES}))
    assert outcome(command[0], "model", *command[1:]) == 0, "transformers knows qwen3"


@pytest.mark.parametrize(
    ("command", "values"),
    [
        *(
            (command, values)
            for command in (["plan", "--max"], ["check"])
            for values in ({"hidden_act": "x"}, {"rope_theta": None})
        ),
        (["check"], {"dtype": 7}),  # `plan` counts in the dtype that it is given
    ],
    ids=str,
)
def test_models_that_cannot_be_built(outcome, tmp_path, command, values):
    """Configurations that load, of which transformers makes no model: for reasons in its code's own words."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN | values))
    line = str(outcome(command[0], "model", *command[1:]))
    words = "could not be built" if "dtype" in values else "transformers cannot build a qwen3 model of this configuration: "
    assert line.startswith("streamgrad: ") and words in line and "\n" not in line


@pytest.mark.parametrize("command", [["plan", "--max"], ["check"]], ids=" ".join)
def test_sizes_that_cannot_be_streamed(outcome, tmp_path, command):
    """A small copy of this model, with heads of its own, could be."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(QWEN | {"num_attention_heads": 3}))
    line = str(outcome(command[0], "model", *command[1:]))
    reason = "its 3 query heads cannot share 2 key/value heads evenly"
    assert line.startswith(f"streamgrad: Qwen3ForCausalLM cannot be streamed: {reason}. Train it without streamgrad, with ")


def test_commands_do_not_pass_on_that_a_product_falls_back(monkeypatch):
    """25 lines of C++ frames, once a process, on a processor without bf16 instructions."""

    def run() -> None:
        warnings.warn(f"mkldnn_matmul failed, switching to BLAS gemm: {FALLBACK_FRAMES}", UserWarning, stacklevel=1)
        warnings.warn("what a user should see", UserWarning, stacklevel=1)

    monkeypatch.setattr("streamgrad.cli.app.app", run)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        main()
    assert [str(warning.message) for warning in seen] == ["what a user should see"]


FALLBACK_FRAMES = "needs a cpu with bf16 support\nException raised from mkldnn_matmul\nframe #0: c10::Error::Error"
