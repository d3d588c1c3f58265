"""Packages that options of a trainer need: looked for before a model is loaded, and named with the command that installs them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from streamgrad.trl.optimizer_place import is_by_bitsandbytes

# The module of each tracker that `report_to` may name, where it differs from the name, and what pip calls it.
_TRACKERS = {"azure_ml": "azureml", "flyte": "flytekit"}
_PIP_NAMES = {"azureml": "azureml-sdk", "comet_ml": "comet-ml", "liger_kernel": "liger-kernel", "flash_attn": "flash-attn"}


def check_installed(training: Any, model: Any) -> None:
    """Raise `ValueError` for an option of TRL's arguments that needs a package which is not installed."""
    for option, modules, remedy in _needed(training, model):
        if all(find_spec(module) is None for module in modules):
            pip = _PIP_NAMES.get(modules[0], modules[0])
            raise ValueError(f"{option} needs {pip}, which is not installed. Run: pip install {pip}{remedy}")


def _needed(training: Any, model: Any) -> Iterator[tuple[str, list[str], str]]:
    """Yield options that are on, modules any of which they need, and what else could be done."""
    for tracker in training.report_to or ():
        if tracker not in ("none", "all", "kubeflow"):
            modules = ["tensorboard", "tensorboardX"] if tracker == "tensorboard" else [_TRACKERS.get(tracker, tracker)]
            yield f"--report_to {tracker}", modules, ", or pass --report_to none"
    for option in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, option):
            yield f"--{option}", ["bitsandbytes"], ""
    if is_by_bitsandbytes(training):
        yield f"--optim {getattr(training.optim, 'value', training.optim)}", ["bitsandbytes"], ""
    if model.use_peft:
        yield "--use_peft", ["peft"], ""
    if training.use_liger_kernel:
        yield "--use_liger_kernel", ["liger_kernel"], ", or leave it out: streamgrad fuses the same operations (--fused_kernels)"
    if str(model.attn_implementation).startswith("flash_attention"):
        option = f"--attn_implementation {model.attn_implementation}"
        yield option, ["flash_attn", "flash_attn_interface", "kernels"], ", or leave it out: --attention chooses streamed kernels"
    if getattr(training, "use_vllm", False):
        yield "--use_vllm", ["vllm"], ""
    if training.deepspeed:
        yield "--deepspeed", ["deepspeed"], ""
