"""LLaMA-Factory's own `run_exp` on a CPU, with the callback and without: the same losses and gradient norms."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from plugged import PLUGS, ROOT, assert_same_steps, needs, python, save_tiny_model
from trainers import sentences

pytestmark = needs("llamafactory")

ARGUMENTS = {
    "model_name_or_path": "model", "stage": "sft", "do_train": True, "finetuning_type": "full", "dataset": "rows",
    "dataset_dir": ".", "template": "default", "cutoff_len": 64, "max_steps": 3, "logging_steps": 1, "save_strategy": "steps",
    "save_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "report_to": "none", "seed": 1,
    "flash_attn": "sdpa", "use_cpu": True,
}  # fmt: skip
PLAIN = "from llamafactory.train.tuner import run_exp\nrun_exp()"


def documented(section: str) -> str:
    """Return the program that docs/frameworks.md gives under a heading, in chunks of five tokens."""
    text = (ROOT / "docs/frameworks.md").read_text().partition(f"\n## {section}\n")[2]
    return text.partition("```python\n")[2].partition("```")[0].replace("chunk_size=4096", "chunk_size=5")


def trained(folder: Path, name: str, program: str, arguments: dict) -> list[dict]:
    (folder / f"{name}.py").write_text(program)
    (folder / f"{name}.yaml").write_text(json.dumps(ARGUMENTS | arguments | {"output_dir": name}))  # which is YAML as well
    (folder / "torchaudio.py").touch()  # which it imports for sound alone, and whose wheels need CUDA's libraries
    path = os.pathsep.join(map(str, (folder, PLUGS / "llamafactory", ROOT / "src")))
    python("llamafactory", folder, f"{name}.py", f"{name}.yaml", PYTHONPATH=path)
    state = json.loads((folder / name / "checkpoint-3/trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


@pytest.mark.parametrize("arguments", [{}, {"packing": True, "neat_packing": True}], ids=["padded", "packed"])
def test_llamafactory_trains_as_without_the_callback(tmp_path, arguments):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "t5 t6", "output": text} for text in sentences(16, 12)]))
    columns = {"prompt": "instruction", "response": "output"}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json", "columns": columns}}))
    plain = trained(tmp_path, "plain", PLAIN, arguments)
    assert_same_steps(trained(tmp_path, "streamed", documented("LLaMA-Factory"), arguments), plain)
