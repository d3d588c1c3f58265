"""Runs a script with processors in the place of GPUs: Accelerate starts FSDP and DeepSpeed only where it finds an accelerator.

accelerate launch --config_file some.yaml tests/support/accelerate_on_cpu.py script.py --its --options
"""

from __future__ import annotations

import os
import runpy
import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from transformers import training_args

from leaving import leave

torch.set_num_threads(1)
sharded = any(os.environ.get(f"ACCELERATE_USE_{engine}") == "true" for engine in ("FSDP", "DEEPSPEED"))


def on_gloo(self, *args, **kwargs):
    return "gloo", DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU


def cpu_device(self):
    self.device = torch.device("cpu")


PartialState._prepare_backend = on_gloo
PartialState.set_device = cpu_device
training_args.is_torch_bf16_gpu_available = lambda: True  # which a processor computes as well
if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for a minute

sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
    if end.code:
        raise
leave()
