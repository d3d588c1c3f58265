"""The model that a method is measured with, set up as the method needs it, and its step.

The peers are configured as their authors would: transformers' gradient checkpointing with SDPA, and on top of it Liger's kernels
(with its fused linear cross entropy), or mini-sequences.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

import streamgrad
from benchmarks.objective import OBJECTIVES
from benchmarks.peers import (
    HEAD_PIECES,
    MLP_PIECE_TOKENS,
    apply_liger,
    compile_layers,
    mini_sequence_loss,
    save_products,
    shard_for_one_rank,
    split_mlps,
    zero3_for_one_rank,
)
from streamgrad.attention.backends import preferred
from streamgrad.config import StreamConfig
from streamgrad.hf.configs import preset_config, preset_model
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.costs import KEYS_AT_ONCE


@dataclass
class Subject:
    """Holds a method's model, with the reference and the engine that its steps need.

    `reference` is the frozen copy that DPO and GRPO in full training compare with. `engine` is DeepSpeed's.
    """

    method: str
    objective: str
    network: PreTrainedModel
    reference: PreTrainedModel | None
    engine: Any

    @classmethod
    def build(
        cls, method: str, model: str, *, training: str, objective: str, layers: int | None, device: torch.device
    ) -> Subject:
        """Build the preset's model, or its first `layers` layers, from the seed that all methods share."""
        torch.manual_seed(0)
        if "liger" in method:
            apply_liger(preset_config(model).model_type, fused_loss=method.startswith("liger"))
        network = preset_model(model, device=device, layers=layers)
        reference = None
        if training == "lora":
            _attach_lora(network)
        elif objective != "sft":
            reference = copy.deepcopy(network).requires_grad_(False)
        if "streamgrad" not in method and not method.endswith("-nockpt"):
            contexts = {"context_fn": save_products} if method == "hf-sac" else {}
            network.gradient_checkpointing_enable({"use_reentrant": False} | contexts, offload=method == "liger-offload")
        if method.startswith("hf-compile"):
            compile_layers(network)
        if method == "mst":
            split_mlps(network)
        if method.startswith("streamgrad-fsdp2"):
            shard_for_one_rank(network, device, on_host=method.endswith("-host"))
        engine = zero3_for_one_rank(network, device) if method == "streamgrad-zero3" else None
        return cls(method, objective, network, reference, engine)

    @property
    def streams(self) -> bool:
        return "streamgrad" in self.method

    @contextmanager
    def enabled(self, config: StreamConfig) -> Iterator[None]:
        """Stream the model and its reference within the block, where the method streams."""
        networks = [network for network in (self.network, self.reference) if network is not None and self.streams]
        for network in networks:
            streamgrad.enable(network, config)
        try:
            yield
        finally:
            for network in networks:
                streamgrad.disable(network)

    def step_on(self, ids_BT: torch.Tensor, *, accumulates: bool) -> Callable[[], None]:
        """Return a function that runs forward and backward; without `accumulates` it drops earlier gradients first."""

        def step() -> None:
            if not accumulates:
                self.network.zero_grad(set_to_none=True)
            if self.method == "mst":
                loss = mini_sequence_loss(self.network, ids_BT)
            else:
                loss = OBJECTIVES[self.objective](self.engine or self.network, ids_BT, self.reference)
            (self.engine.backward if self.engine else torch.autograd.backward)(loss)

        return step

    def outcome(self, config: StreamConfig) -> dict[str, Any]:
        """Return what a record says about the steps so far: pinned host bytes and the policy."""
        installed = InstalledForward.on(self.network.get_decoder())
        if installed is None:
            return {"host_bytes": 0, "policy": _peers_policy(self.method)}
        return {"host_bytes": installed.stream.host_store.total_bytes, "policy": _policy_of(config, installed)}


def _policy_of(config: StreamConfig, installed: InstalledForward) -> dict[str, Any]:
    """Return the options, what they came to, and what the first records lack: a kernel's bound, and what the host keeps."""
    plan = installed.stream.planner.latest
    sizes = list(plan.chunk_sizes) if plan else []
    keeps_projection = plan is not None and any(policy.projection for policy in plan.policies)
    outcome = {"plan": str(plan), "chunk_sizes": sizes, "kernel": preferred(installed.stream.backends)[0].name}
    return vars(config) | outcome | {"keys_at_once": KEYS_AT_ONCE, "host_keeps_projection": keeps_projection}


def _peers_policy(method: str) -> dict[str, Any]:
    policy = {"gradient_checkpointing": not method.endswith("-nockpt"), "attention": "sdpa"}
    return policy | {"mlp_piece_tokens": MLP_PIECE_TOKENS, "head_pieces": HEAD_PIECES} if method == "mst" else policy


def _attach_lora(network: PreTrainedModel) -> None:
    peft = importlib.import_module("peft")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    network.add_adapter(peft.LoraConfig(r=32, lora_alpha=32, target_modules=targets))
    network.enable_input_require_grads()
