"""ms-swift's own `swift sft` on a CPU, with the callback and without: the same losses and gradient norms."""

from __future__ import annotations

import json
from pathlib import Path

from plugged import assert_same_steps, needs, python, save_tiny_model
from trainers import sentences

pytestmark = needs("swift")

ARGUMENTS = {
    "model": "model", "model_type": "qwen3", "template": "dummy", "dataset": "data.jsonl", "split_dataset_ratio": "0",
    "tuner_type": "full", "torch_dtype": "float32", "max_steps": "3", "per_device_train_batch_size": "2",
    "gradient_accumulation_steps": "1", "learning_rate": "1e-3", "logging_steps": "1", "save_strategy": "no", "report_to": "none",
    "seed": "1", "dataloader_num_workers": "0", "dataset_num_proc": "1", "use_hf": "true", "gradient_checkpointing": "true",
    "add_version": "false",
}  # fmt: skip


def swift(folder: Path, module: str, options: dict[str, str], **environment: str) -> str:
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
    return python("swift", folder, "-m", module, *arguments, MODELSCOPE_CACHE=str(folder / "cache"), **environment)


def steps(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def test_swift_sft_trains_as_without_the_callback(tmp_path):
    save_tiny_model(tmp_path / "model")
    rows = [[{"role": "user", "content": "t5 t6"}, {"role": "assistant", "content": text}] for text in sentences(8, 12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    swift(tmp_path, "swift.cli.sft", ARGUMENTS | {"output_dir": "plain"})
    plugin = swift(tmp_path, "streamgrad.integrations.swift", {}).strip()
    plugged = {"external_plugins": plugin, "callbacks": "streamgrad", "output_dir": "streamed"}
    swift(tmp_path, "swift.cli.sft", ARGUMENTS | plugged, STREAMGRAD='{"chunk_size": 5}')
    assert_same_steps(steps(tmp_path / "streamed"), steps(tmp_path / "plain"))
