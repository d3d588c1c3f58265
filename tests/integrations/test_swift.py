"""ms-swift's own `swift sft` on a CPU, with the callback and without: the same losses and gradient norms.

`make test-plugs` installs ms-swift, with the versions in swift.txt, into out/plugs/swift; without it, this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiny import tiny_model
from trainers import sentences, tokenizer

ROOT = Path(__file__).parents[2]
SWIFT = Path(os.environ.get("STREAMGRAD_PLUGS", ROOT / "out/plugs")) / "swift"
pytestmark = pytest.mark.skipif(not SWIFT.exists(), reason="ms-swift is not in out/plugs: make test-plugs installs it")

ARGUMENTS = {
    "model": "model", "model_type": "qwen3", "template": "dummy", "dataset": "data.jsonl", "split_dataset_ratio": "0",
    "tuner_type": "full", "torch_dtype": "float32", "max_steps": "3", "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "1", "learning_rate": "1e-3", "logging_steps": "1", "save_strategy": "no", "report_to": "none",
    "seed": "1", "dataloader_num_workers": "0", "dataset_num_proc": "1", "use_hf": "true", "gradient_checkpointing": "true",
    "add_version": "false",
}  # fmt: skip


def swift(folder: Path, module: str, options: dict[str, str], **environment: str) -> str:
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=600,
        env=os.environ | environment | {
            "PYTHONPATH": f"{SWIFT}{os.pathsep}{ROOT / 'src'}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "MODELSCOPE_CACHE": str(folder / "cache"),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_swift_sft_trains_as_without_the_callback(tmp_path):
    tiny_model("qwen3", dtype=torch.float32).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [[{"role": "user", "content": "t5 t6"}, {"role": "assistant", "content": text}] for text in sentences(8, 12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    swift(tmp_path, "swift.cli.sft", ARGUMENTS | {"output_dir": "plain"})
    plugin = swift(tmp_path, "streamgrad.integrations.swift", {}).strip()
    plugged = {"external_plugins": plugin, "callbacks": "streamgrad", "output_dir": "streamed"}
    swift(tmp_path, "swift.cli.sft", ARGUMENTS | plugged, STREAMGRAD='{"chunk_size": 5}')
    plain, streamed = steps(tmp_path / "plain"), steps(tmp_path / "streamed")
    assert len(plain) == 3
    assert [step["streamgrad/chunk_tokens"] for step in streamed] == [5, 5, 5]
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in streamed] == pytest.approx([step[name] for step in plain], rel=1e-4)
