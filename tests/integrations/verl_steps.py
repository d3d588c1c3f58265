"""Three steps of verl's own FSDP2 engine on a CPU, in a process of its own: `python verl_steps.py OPTIONS`, which are JSON.

verl has no platform for CPUs; this registers one, in which verl's code runs as it is.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform


class OnCPU(PlatformCUDA):
    device_name, vendor_name, device_module = "cpu", "none", torch.cpu

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_available(self) -> bool:
        return True


set_platform(OnCPU())  # before the engine is imported

from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.base import EngineRegistry  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402


def make_engine(model: dict, engine: dict) -> FSDPEngineWithLMHead:
    """As verl's workers make it: the model's configuration first, which imports `external_lib`."""
    EngineRegistry.register("language_model", ["fsdp2"], device="cpu")(FSDPEngineWithLMHead)
    model_config = HFModelConfig(path="model", override_config={"attn_implementation": "sdpa"}, **model)
    settings = {
        "strategy": "fsdp2",
        "mixed_precision": {"param_dtype": "fp32"},
        "model_dtype": "fp32",
        "use_torch_compile": False,
    }
    engine_config = FSDPEngineConfig(**settings | engine)
    optimizer = FSDPOptimizerConfig(lr=1e-3, total_training_steps=3)
    torch.manual_seed(0)
    made = EngineRegistry.new(
        "language_model", engine_config.strategy, model_config, engine_config, optimizer, CheckpointConfig()
    )
    made.initialize()
    return made


def batch(options: dict) -> object:
    """Four sequences of different lengths, in verl's form."""
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (length,), generator=draw) for length in (23, 17, 31, 12)]
    columns = {
        "input_ids": rows,
        "position_ids": [torch.arange(len(row)) for row in rows],
        "loss_mask": [(torch.arange(len(row)) > 4).long() for row in rows],
    }
    settings = {
        "temperature": 0.7, "calculate_entropy": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2,
        "pad_token_id": 0, "return_model_output": True,
    }  # fmt: skip
    nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    return tensordict_utils.get_tensordict(nested, non_tensor_dict=settings | options)


def loss_function(model_output: dict, data: dict, dp_group: object) -> tuple[torch.Tensor, dict]:
    """An objective on log-probabilities and entropies, as those of policies are."""
    mask = data["loss_mask"].values()
    gain = model_output["log_probs"].values() + 0.01 * model_output["entropy"].values()
    return -(gain * mask).sum() / mask.sum(), {}


def main() -> None:
    options = json.loads(sys.argv[1])
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    engine = make_engine(options["model"], options.get("engine", {}))
    for _ in range(3):
        with engine.train_mode():
            engine.optimizer_zero_grad()
            output = engine.forward_backward_batch(batch(options["batch"]), loss_function)
            step = {"loss": output["loss"], "grad_norm": float(engine.optimizer_step())}
        step |= {name: output["model_output"][name].values().tolist() for name in ("log_probs", "entropy")}
        print("STEP", json.dumps(step))
    with engine.eval_mode():
        scored = engine.forward_backward_batch(batch(options["batch"]), None, forward_only=True)
    print("STEP", json.dumps({"scored": scored["model_output"]["log_probs"].values().tolist()}))
    if os.environ.get("STREAMGRAD"):
        import streamgrad

        print(streamgrad.status(engine.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
