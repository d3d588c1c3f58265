"""Programs started as users start them, in processes of their own: `accelerate launch` and `torchrun` on CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "accelerate_example.py"
ON_CPU = ROOT / "tests" / "support" / "accelerate_on_cpu.py"
CONFIGS = ROOT / "examples" / "accelerate_configs"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def _process(command: tuple[object, ...], environment: dict[str, str]) -> dict[str, Any]:
    """`python *command` with this checkout's modules, one thread, and DeepSpeed told that there is no GPU."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests/support"))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"} | environment
    return {"args": [sys.executable, *map(str, command)], "env": environment, "text": True}


def run(*command: object, timeout_s: float = 900.0) -> subprocess.CompletedProcess:
    return subprocess.run(**_process(command, {}), capture_output=True, timeout=timeout_s, check=False)


def begun(*command: object, environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(**_process(command, environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
