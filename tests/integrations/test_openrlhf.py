"""OpenRLHF's own actor on a CPU, with the lines of docs/frameworks.md and without: the same log-probabilities and gradients."""

from __future__ import annotations

import os
import shutil

import torch

from plugged import PLUGS, ROOT, needs, python, save_tiny_model

pytestmark = needs("openrlhf")

# The functions of flash-attn that it imports for packing, which the CPU cannot run.
FLASH = {
    "bert_padding": "index_first_axis = pad_input = rearrange = unpad_input = None",
    "utils/distributed": "all_gather = None",
}
STEP = """
import sys, torch, streamgrad
from openrlhf.models import Actor, PolicyLoss
torch.manual_seed(0)
actor = Actor("model", attn_implementation="sdpa", lora_rank=4, target_modules="all-linear", temperature=0.7).float()
assert streamgrad.is_enabled(actor.model) == (sys.argv[1] == "patched")
for name, weight in actor.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(weight, std=0.1)
actor.gradient_checkpointing_enable()
actor.train()
draw = torch.Generator().manual_seed(0)
sequences = torch.randint(3, 60, (3, 30), generator=draw)
seen = torch.ones_like(sequences)
seen[0, :7], seen[1, 25:] = 0, 0
actions = seen[:, -12:].bool()
log_probs, output = actor(sequences, actions, seen, return_output=True, return_entropy=True)
advantages = torch.randn(log_probs.shape, generator=draw)
loss = PolicyLoss()(log_probs, log_probs.detach() + 0.1, advantages, action_mask=actions)[0]
loss = loss - 0.01 * output.entropy[:, -12:].mean()
loss.backward()
grads = {name: weight.grad for name, weight in actor.named_parameters() if weight.grad is not None}
torch.save({"loss": loss.detach(), "log_probs": log_probs.detach(), "entropy": output.entropy.detach(), **grads}, sys.argv[1])
"""


def documented_patch() -> tuple[str, str]:
    """Return the text of the diff in docs/frameworks.md, without its new lines and with them."""
    section = (ROOT / "docs/frameworks.md").read_text().partition("\n## OpenRLHF\n")[2]
    lines = section.partition("```diff\n")[2].partition("```")[0].splitlines(keepends=True)
    return "".join(line[1:] for line in lines if line[0] == " "), "".join(line[1:] for line in lines)


def test_openrlhf_takes_the_same_step_with_the_documented_lines(tmp_path):
    save_tiny_model(tmp_path / "model")
    for name, text in FLASH.items():
        file = tmp_path / "stubs/flash_attn" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    shutil.copytree(PLUGS / "openrlhf/openrlhf", tmp_path / "patched_package/openrlhf")
    actor = tmp_path / "patched_package/openrlhf/models/actor.py"
    before, after = documented_patch()
    assert actor.read_text().count(before) == 1
    actor.write_text(actor.read_text().replace(before, after.replace("chunk_size=4096", "chunk_size=7")))
    for name, first in (("stock", "stubs"), ("patched", "patched_package")):
        path = os.pathsep.join(map(str, (tmp_path / first, tmp_path / "stubs", PLUGS / "openrlhf", ROOT / "src")))
        python("openrlhf", tmp_path, "-c", STEP, name, PYTHONPATH=path)
    expected, actual = (torch.load(tmp_path / name) for name in ("stock", "patched"))
    assert actual.keys() == expected.keys() and len(expected) > 10
    for name, exact in expected.items():
        assert ((actual[name] - exact).norm() / exact.norm()).item() < 1e-4, name
