"""axolotl's own `axolotl train` on a CPU, with the plugin and without: the same losses, gradient norms and weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora import with_lora
from plugged import assert_same_steps, needs, python, save_tiny_model
from tiny import tiny_model
from trainers import sentences

pytestmark = needs("axolotl")

SETTINGS = {
    "base_model": "model", "datasets": [{"path": "data.jsonl", "ds_type": "json", "type": "completion"}], "sequence_len": 64,
    "pad_to_sequence_len": False, "attn_implementation": "sdpa", "micro_batch_size": 2, "gradient_accumulation_steps": 1,
    "max_steps": 3, "optimizer": "adamw_torch", "lr_scheduler": "constant", "learning_rate": 1e-3, "bf16": False, "fp16": False,
    "tf32": False, "float32": True, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "seed": 1,
    "gradient_checkpointing": True,
}  # fmt: skip
PLUGIN = {"plugins": ["streamgrad.integrations.axolotl.StreamgradPlugin"], "streamgrad": {"chunk_size": 5}}
LORA = {
    "adapter": "lora", "lora_model_dir": "adapter", "lora_mlp_kernel": False, "lora_qkv_kernel": False, "lora_o_kernel": False,
    "lora_embedding_kernel": False,
}  # fmt: skip
# Validates a configuration as `axolotl train` does first, and prints why it is refused.
VALIDATE = """
import json, sys
from axolotl.cli.config import load_cfg
for extra in json.loads(sys.argv[1]):
    open("tried.yml", "w").write(json.dumps(json.load(open("settings.yml")) | extra))
    try:
        print("accepted with", load_cfg("tried.yml").sdpa_varlen)
    except ValueError as error:
        print("refused:", str(error).replace("\\n", " "))
"""


def axolotl(folder: Path, *words: str) -> str:
    return python("axolotl", folder, *words, AXOLOTL_DO_NOT_TRACK="1")


def trained(folder: Path, name: str, settings: dict) -> tuple[list[dict], dict[str, torch.Tensor]]:
    output = folder / name
    settings = settings | {"output_dir": str(output), "dataset_prepared_path": str(output / "prepared")}
    (folder / f"{name}.yml").write_text(json.dumps(settings))  # which is YAML as well
    axolotl(folder, "-m", "axolotl.cli.train", f"{name}.yml")
    state = json.loads((output / "checkpoint-3/trainer_state.json").read_text())
    (weights,) = (output / "checkpoint-3").glob("*model.safetensors")
    return [entry for entry in state["log_history"] if "loss" in entry], load_file(weights)


@pytest.mark.parametrize("settings", [{"sample_packing": False}, {"sample_packing": True} | LORA], ids=["padded", "packed-lora"])
def test_axolotl_trains_as_without_the_plugin(tmp_path, settings):
    save_tiny_model(tmp_path / "model")
    with_lora(tiny_model("qwen3", dtype=torch.float32)).save_pretrained(tmp_path / "adapter")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences(16, 12)))
    plain_steps, plain_weights = trained(tmp_path, "plain", SETTINGS | settings)
    steps, weights = trained(tmp_path, "streamed", SETTINGS | settings | PLUGIN)
    assert_same_steps(steps, plain_steps)
    assert weights.keys() == plain_weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, plain_weights[name], rtol=1e-3, atol=1e-5, msg=name)


def test_what_cannot_be_streamed_is_refused_with_the_configuration(tmp_path):
    save_tiny_model(tmp_path / "model")
    (tmp_path / "settings.yml").write_text(json.dumps(SETTINGS | PLUGIN))
    cases = [
        ({"streamgrad": {"chunks": 3}}, "'chunks' is not a streamgrad option"),
        ({"streamgrad": {"chunk_size": -3}}, "chunk_size=-3 leaves no tokens in a chunk"),
        ({"streamgrad": 4096}, "Input should be a valid dictionary"),
        ({"activation_offloading": True}, "write `streamgrad: {offload: host}`"),
        ({"gradient_checkpointing": "offload"}, "gradient_checkpointing: offload does not go together with streamgrad"),
        ({"tiled_mlp": True}, "tiled_mlp: True does not go together with streamgrad"),
        ({"sample_packing": True}, "accepted with False"),  # where None would let axolotl replace attention
    ]
    lines = axolotl(tmp_path, "-c", VALIDATE, json.dumps([extra for extra, _ in cases])).splitlines()
    told = [line for line in lines if line.startswith(("refused:", "accepted"))]
    assert len(told) == len(cases)
    for line, (extra, expected) in zip(told, cases, strict=True):
        assert expected in line, extra
