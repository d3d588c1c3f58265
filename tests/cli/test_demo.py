"""The demo on its quick settings, the command line around it, and the README's code."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import streamgrad
from streamgrad.cli import CheckFailed
from streamgrad.cli import demo_run as demo
from streamgrad.cli.app import app
from tiny import tiny_model, tokens

ROOT = Path(__file__).parents[2]


def test_the_quick_demo_writes_its_plots(tmp_path):
    plot, memory = tmp_path / "new" / "demo.png", tmp_path / "memory"
    result = CliRunner().invoke(app, ["demo", "--quick", "--out", str(plot), "--memory-image", str(memory)])
    assert result.exit_code == 0, result.output
    assert "worst relative error" in result.output and f"Plot: {plot}" in result.output
    assert re.search(r"each further token costs \d+ times less memory than with ordinary backprop, \d times less", result.output)
    for path in (plot, memory):
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG") and 10_000 < len(content) < 150_000


def test_memory_grows_several_times_more_slowly():
    """What the README's picture shows; bytes are counted, so the machine does not matter."""
    peaks = demo.peak_bytes(demo.demo_model(), demo.QUICK, torch.device("cpu"))
    slopes = {name: demo.bytes_per_token(values, demo.QUICK.memory_lengths) for name, values in peaks.items()}
    assert 3 * slopes[demo.STREAMED] < slopes[demo.CHECKPOINTING]
    assert 10 * slopes[demo.STREAMED] < slopes[demo.ORDINARY]


@pytest.fixture
def pair():
    """Two equal models with equal gradients."""
    model = tiny_model("qwen3", dtype=torch.float32)
    ids = tokens(1, 9)
    model(input_ids=ids, labels=ids).loss.backward()
    other = copy.deepcopy(model)
    for parameter, original in zip(other.parameters(), model.parameters(), strict=True):
        parameter.grad = original.grad.clone()
    return other, model


def test_equal_gradients_pass_the_check(pair):
    assert demo.worst_gradient_error(*pair) == (0.0, "none")


@pytest.mark.parametrize("which", ["streamed", "reference"])
@pytest.mark.parametrize("damage", ["nan", "missing", "scaled"])
def test_bad_gradients_fail_the_check(pair, damage, which):
    weight = pair[0 if which == "streamed" else 1].model.layers[1].mlp.up_proj.weight
    if damage == "nan":
        weight.grad[0, 0] = float("nan")
    elif damage == "missing":
        weight.grad = None
    else:
        weight.grad.mul_(1.001)
    with pytest.raises(CheckFailed, match=r"gradient check failed: .*layers\.1\.mlp\.up_proj\.weight"):
        demo.worst_gradient_error(*pair)


def test_a_failed_check_ends_the_demo_with_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "LARGEST_ERROR", -1.0)
    monkeypatch.setattr(sys, "argv", ["streamgrad", "demo", "--quick", "--out", str(tmp_path / "demo.png")])
    with pytest.raises(SystemExit) as stopped:
        streamgrad.cli.main()
    assert stopped.value.code.startswith("streamgrad: the gradient check failed") and "\n" not in stopped.value.code


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.output.startswith(f"streamgrad {streamgrad.__version__}")


@pytest.mark.parametrize("command", [[], ["demo"], ["bench"]])
def test_help_has_examples(command):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0 and "Examples" in result.output and "python -m streamgrad" in result.output


def run_without(packages: list[str], code: str) -> subprocess.CompletedProcess:
    """`code` in a fresh interpreter in which importing any of `packages` fails as if it were not installed."""
    blocked = f"import sys; sys.modules.update(dict.fromkeys({packages!r})); "
    return subprocess.run([sys.executable, "-c", blocked + code], capture_output=True, text=True, check=False, cwd=ROOT)


def test_the_library_imports_without_the_command_lines_packages():
    done = run_without(["typer", "rich", "matplotlib"], "import streamgrad; streamgrad.StreamConfig()")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["typer", "matplotlib"])
def test_a_missing_package_is_one_line(package):
    done = run_without([package], "sys.argv = ['streamgrad', 'demo', '--quick']; import streamgrad.cli; streamgrad.cli.main()")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"streamgrad: the command line needs {package}")
    assert 'pip install "streamgrad[cli]"' in done.stderr and "Traceback" not in done.stderr


def test_the_readmes_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
