"""Unsloth beside streamgrad: what it makes of models on a GPU is refused, and what it trains on a CPU is streamed exactly."""

from __future__ import annotations

import pytest

from plugged import needs, python, save_tiny_model

pytestmark = needs("unsloth")

# Unsloth's patches for a GPU, which its loader makes before it asks for one, on models that transformers makes.
ON_A_GPU = """
import unsloth, unsloth.models.llama, unsloth.models.qwen3, torch, sys
from transformers import AutoConfig, AutoModelForCausalLM
import streamgrad
if sys.argv[1] == "patched":
    unsloth.models.qwen3.FastQwen3Model.pre_patch()
    unsloth.models.llama.get_current_device = lambda: "cpu"
model = AutoModelForCausalLM.from_pretrained("model")
try:
    streamgrad.enable(model)
except ValueError as error:
    print("refused:", error, streamgrad.is_enabled(model))
"""
# One step of a model that Unsloth loads, streamed and not, in Unsloth's own way to train on a CPU.
ON_A_CPU = """
import sys, unsloth, torch, streamgrad
model, _ = unsloth.FastLanguageModel.from_pretrained(
    "model", max_seq_length=64, dtype=torch.float32, load_in_4bit=False, full_finetuning=sys.argv[1] == "full"
)
if sys.argv[1] == "lora":
    model = unsloth.FastLanguageModel.get_peft_model(model, r=4, lora_dropout=0.0)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
def step():
    model.train()
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
expected_loss, expected = step()
streamgrad.enable(model, chunk_size=7)
loss, gradients = step()
assert "chunks of at most 7" in str(streamgrad.status(model)), streamgrad.status(model)
assert abs(loss - expected_loss) < 1e-5, (loss, expected_loss)
assert expected and gradients.keys() == expected.keys()
errors = [((gradients[name] - exact).norm() / exact.norm()).item() for name, exact in expected.items()]
assert max(errors) < 1e-4, errors
print("same step", len(errors))
"""


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("patched", "Qwen3DecoderLayer has a forward of unsloth.models.llama, which does not call transformers' attention"),
        ("imported", "has a function of unsloth_zoo.temporary_patches."),  # for every model of the process
    ],
)
def test_what_unsloth_makes_of_models_on_a_gpu_is_refused(tmp_path, how, told):
    save_tiny_model(tmp_path / "model")
    out = python("unsloth", tmp_path, "-c", ON_A_GPU, how, UNSLOTH_ALLOW_CPU="1")
    (line,) = [line for line in out.splitlines() if line.startswith("refused:")]
    assert told in line and "in a process that does not import unsloth" in line and line.endswith("False")


@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_unsloth_trains_on_a_cpu_is_streamed(tmp_path, method):
    save_tiny_model(tmp_path / "model")
    assert "same step" in python("unsloth", tmp_path, "-c", ON_A_CPU, method, UNSLOTH_FORCE_CPU="1")
