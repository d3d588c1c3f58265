"""README and docs: every Python block runs, every command exists, generated pages are up to date, and the site builds."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from typer.testing import CliRunner

from streamgrad.cli.app import COMMANDS, app, loaded
from streamgrad.config import ATTENTION_BACKENDS, FUSED_KERNEL_MODES, KEEP_POLICIES, OFFLOAD_PLACES, StreamConfig

ROOT = Path(__file__).parents[2]
FILES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
# A block, with the line before it.
BLOCK = re.compile(r"(?:^(?P<before>[^\n]*)\n)?^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- not run(?P<reason>:.*)? -->")


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """`(line before, code)` of every block in the language."""
    return [(found["before"] or "", found["code"]) for found in BLOCK.finditer(text) if found["language"] == language]


def runnable(text: str) -> list[str]:
    """The Python blocks that run; one that is marked as not run must say why."""
    code = []
    for before, block in blocks(text, "python"):
        marker = MARKER.search(before)
        if marker is None:
            code.append(block)
            continue
        reason = (marker["reason"] or "").removeprefix(":").strip()
        assert len(reason.split()) >= 3, f"a block is marked as not run without a reason: {before}"
    return code


def run_blocks(name: str, code: list[str]) -> None:
    """In order, in one namespace, as a reader would type them."""
    namespace: dict = {"__name__": "__main__"}
    for block in code:
        exec(compile(block, name, "exec"), namespace)


@pytest.mark.parametrize("name", [name for name in FILES if runnable((ROOT / name).read_text())])
def test_python_blocks_run(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_blocks(name, runnable((ROOT / name).read_text()))


def test_blocks_are_found_and_a_failing_one_fails():
    hidden = "<!-- not run: needs a GPU -->\n```python\nassert False\n```\n"
    text = f"a\n\n```python\nx = 1\n```\n\n{hidden}\n```python\nassert x == 2\n```\n"
    assert runnable(text) == ["x = 1\n", "assert x == 2\n"]
    with pytest.raises(AssertionError):
        run_blocks("text", runnable(text))


@pytest.mark.parametrize("marker", ["<!-- not run -->", "<!-- not run: -->", "<!-- not run: slow -->"])
def test_a_marker_needs_a_reason(marker):
    with pytest.raises(AssertionError, match="without a reason"):
        runnable(f"{marker}\n```python\nx = 1\n```\n")


@pytest.mark.parametrize("name", FILES)
def test_no_page_installs_from_an_index_where_the_package_is_not(name):
    assert not re.search(r"pip install[^\n`]*[ \"']streamgrad\b", (ROOT / name).read_text())


def commands() -> list[tuple[str, ...]]:
    """The arguments of every `streamgrad ...` command of a shell block, up to where options begin."""
    found = {}
    for name in FILES:
        for _, code in blocks((ROOT / name).read_text(), "sh"):
            for line in code.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:3] == ["python", "-m", "streamgrad"] or words[:1] == ["streamgrad"]:
                    found[tuple(words[3 if words[0] == "python" else 1 :])] = name
    return sorted(found)


def subcommand_of(arguments: tuple[str, ...]) -> list[str]:
    """The leading words that name a command."""
    path: list[str] = []
    commands = {name: loaded(name) for name in COMMANDS if name == arguments[0]}
    for word in arguments:
        if word not in commands:
            break
        path.append(word)
        commands = getattr(commands[word], "commands", {})
    return path


@pytest.mark.parametrize("arguments", commands(), ids=" ".join)
def test_commands_exist_and_know_their_options(arguments):
    path = subcommand_of(arguments)
    assert path, f"streamgrad has no command {arguments[0]}"
    if path[0] == "train":  # whose options are TRL's
        assert len(path) == 2
        return
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert re.search(rf"{option}\b", result.output), f"streamgrad {' '.join(path)} has no {option}"


def test_there_are_commands_to_check():
    assert len(commands()) >= 8


def test_the_table_of_options_is_that_of_the_configuration():
    """A row for each option, with its default and every choice."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert set(rows) == {option.name for option in dataclasses.fields(StreamConfig)}
    choices = {
        "keep": KEEP_POLICIES,
        "offload": OFFLOAD_PLACES,
        "attention": ATTENTION_BACKENDS,
        "fused_kernels": FUSED_KERNEL_MODES,
    }
    for option in dataclasses.fields(StreamConfig):
        default = "what is free" if option.default is None else f"`{option.default!r}`".replace("'", '"')
        assert rows[option.name].startswith(f"{default} | ")
        assert all(f'`"{choice}"`' in rows[option.name] for choice in choices.get(option.name, ()))


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_api_page_is_up_to_date():
    api = generator("generate_api")
    assert api.page() == api.PAGE.read_text(), "run `python docs/generate_api.py`"


@pytest.mark.parametrize("module", ["streamgrad", "streamgrad.objectives", "streamgrad.trl", "streamgrad.parallel"])
def test_every_public_name_is_on_the_api_page(module):
    text = (ROOT / "docs/api.md").read_text()
    for name in importlib.import_module(module).__all__:
        assert f"### {name}\n\n```py\n{name}(" in text


def test_the_compatibility_page_is_up_to_date(monkeypatch):
    text = (ROOT / "docs/compatibility.md").read_text()
    if f"transformers {transformers.__version__}." not in text:
        pytest.skip("the page is that of another version of transformers, whose families differ")
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert generator("generate_compatibility").page() == text, "run `python docs/generate_compatibility.py`"


def test_the_site_builds_without_a_warning(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=900, env={"NO_MKDOCS_2_WARNING": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    start = (tmp_path / "site/index.html").read_text()
    assert "how-it-works.html" in start and "exactness.html" in start
    assert (tmp_path / "site/benchmarks/plots/time.png").exists()
    # Nothing that a page loads comes from outside.
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link rel=.stylesheet.)[^>]*(?:src|href)=.?(https?:[^\s>\"]+)", page.read_text())
        assert not loaded, (page.name, loaded)


def test_a_link_to_nothing_fails_the_build():
    hooks = generator("site_hooks")
    assert hooks.linked_from("docs/limits.md", "../README.md") == "README.md"
    with pytest.raises(hooks.PluginError, match="the repository has no docs/nothing.md"):
        hooks.linked_from("docs/limits.md", "nothing.md")
