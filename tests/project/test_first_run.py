"""The first five minutes: from README and quickstart to a streamed LoRA run on a user's own file, each command as documented."""

from __future__ import annotations

import functools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import TrainingArguments
from trl import SFTConfig

from gradients import more
from streamgrad.cli import main
from streamgrad.cli.train import save_embedded_model

ROOT = Path(__file__).parents[2]
SLOW = ("check", "demo")
ROWS = [{"prompt": f"What is {n} + {n}?", "completion": f" It is {2 * n}."} for n in range(8)]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def commands(page: str) -> list[list[str]]:
    """The words after `streamgrad` of each command in the shell blocks of a page that are not marked as not run."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"(?:^(<!-- not run)[^\n]*\n)?^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line for marker, block in blocks if not marker for line in block.splitlines()]
    found = [re.sub("^(python -m )?streamgrad ", "", line) for line in lines if re.match("(python -m )?streamgrad ", line)]
    return [shlex.split(line, comments=True) for line in found]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs a command in an empty directory with the user's data.jsonl, and returns its output and errors."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))

    def run(words: list[str]) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["streamgrad", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, ended.value.code
        return tuple(capfd.readouterr())

    return run


def check_adapter(folder: Path) -> None:
    trained = load_file(folder / "adapter_model.safetensors")
    assert any("lora_B" in name for name in trained)
    assert all(tensor.isfinite().all() and tensor.any() for name, tensor in trained.items() if "lora_B" in name)


OF_README = [words for words in commands("README.md") if words[0] not in SLOW and "--dataset_name" not in words]


@pytest.mark.parametrize(
    "words", [*OF_README, *(words for words in commands("docs/quickstart.md") if words[0] not in SLOW)], ids=" ".join
)
def test_commands_of_readme_and_quickstart(run, tmp_path, words, caplog):
    caplog.set_level("INFO", logger="streamgrad")
    out, _ = run(words)
    if words[0] == "train":
        check_adapter(tmp_path / "out/sft")
        assert "Peak memory: " in out and "peak_memory_gib" in out
        assert sum("is streamed: " in record.getMessage() for record in caplog.records) == 1


@more
@pytest.mark.parametrize("words", [words for words in commands("docs/quickstart.md") if words[0] in SLOW], ids=" ".join)
def test_slow_commands_of_the_quickstart(run, words):
    run(words)


def test_the_readmes_command_with_a_model_that_is_there(run, tmp_path):
    """With a tiny model in the place of the named one, and on a CPU where there is no GPU."""
    (words,) = [words for words in commands("README.md") if "--dataset_name" in words]
    save_embedded_model(tmp_path / "model")
    words[words.index("--model_name_or_path") + 1] = "model"
    run([*words, "--max_steps", "1", "--output_dir", "out", *([] if torch.cuda.is_available() else ["--use_cpu"])])
    check_adapter(tmp_path / "out")


def test_the_readmes_plan_is_the_cell_of_its_table(run):
    (words,) = [words for words in commands("README.md") if words[0] == "plan"]
    longest = json.loads(run([*words, "--json"])[0])["streamed"]["longest_tokens"]
    rows = [line.split(" | ") for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| Qwen3-8B | LoRA")]
    assert rows[0][2].startswith(f"**{longest // 1000}k**")


@pytest.mark.parametrize("number", [0, 1], ids=["Trainer", "TRL"])
def test_the_readmes_lines_run(tmp_path, monkeypatch, number, caplog):
    """With a tiny model in the place of the named one, one step, and on a CPU where there is no GPU."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", logger="streamgrad")
    save_embedded_model(tmp_path / "model")
    blocks = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    code = "\n".join(line[2:] for line in blocks[number].splitlines() if not line.startswith("-"))
    one_step = {"output_dir": "out", "max_steps": 1, "report_to": "none", "use_cpu": not torch.cuda.is_available()}
    monkeypatch.setattr("trl.SFTConfig", functools.partial(SFTConfig, **one_step, bf16=torch.cuda.is_available()))
    rows = [{"input_ids": list(range(2, 42)), "labels": list(range(2, 42))}] * 8
    names = {"args": TrainingArguments(**one_step), "dataset": Dataset.from_list([ROWS, rows][number == 0])}
    exec(compile(code.replace("Qwen/Qwen3-8B", "model"), "README.md", "exec"), names)
    assert sum("is streamed: " in record.getMessage() for record in caplog.records) == 1


def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "examples/streamgrad_quickstart.ipynb").read_text())["cells"]
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        assert cell.get("outputs", []) == [], "outputs are made by whoever runs it"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "largest relative difference" in printed and printed.count("Qwen3ForCausalLM is streamed") == 2
