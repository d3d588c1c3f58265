"""Runs a script with processors in the place of GPUs: Accelerate starts FSDP and DeepSpeed only where it finds an accelerator.

accelerate launch --config_file some.yaml tests/support/accelerate_on_cpu.py script.py --its --options

Each process prints the bytes that it holds after the first step of a torch optimizer.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import training_args

from leaving import leave

torch.set_num_threads(1)
sharded = any(os.environ.get(f"ACCELERATE_USE_{engine}") == "true" for engine in ("FSDP", "DEEPSPEED"))


def on_gloo(self, *args, **kwargs):
    return "gloo", DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU


def cpu_device(self):
    self.device = torch.device("cpu")


def held_bytes(tensors) -> int:
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def note_held(optimizer, args, kwargs):
    printing.remove()
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # ZeRO-3 steps a copy of its shards.
    parameters = [item for item in gc.get_objects() if issubclass(type(item), torch.nn.Parameter)]
    shards = [parameter.ds_tensor for parameter in parameters if hasattr(parameter, "ds_tensor")]
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, torch.Tensor)]
    held = {"weights": shards or stepped, "masters": stepped if shards else [], "state": state}
    held["gradients"] = [parameter.grad for parameter in stepped if parameter.grad is not None]
    print(f"held: {json.dumps({name: held_bytes(tensors) for name, tensors in held.items()})}\n", end="", flush=True)


printing = register_optimizer_step_post_hook(note_held)
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
