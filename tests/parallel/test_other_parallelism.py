"""Tensor, pipeline and expert parallelism: exact by torch's own tools, refused by name where transformers makes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM

import streamgrad
from engine_worker import launch
from gradients import Step, assert_same_step, no_float32
from streamgrad.hf.patching import InstalledForward
from tiny import tiny_model, tokens

IDS = (4, 19)
CUT = [*(f"self_attn.{name}_proj" for name in "qkv"), "mlp.gate_proj", "mlp.up_proj"]
PLAN = dict.fromkeys(CUT, ColwiseParallel()) | dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel())
OPTIONS = [{"keep": keep, "chunk_size": 5} for keep in ("input", "attention", "all")] + [{"fused_kernels": "on", "chunk_size": 5}]


def model_of_two_key_heads() -> nn.Module:
    return tiny_model("llama", num_key_value_heads=2, tie_word_embeddings=False)


def whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def plain_step() -> Step:
    model, ids = model_of_two_key_heads(), tokens(*IDS)
    with no_float32():
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    return Step(loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()})


def in_tensors(options: dict[str, Any]) -> tuple[Step, list[str]]:
    """A step of a model whose layers torch has cut over both ranks, and what it kept."""
    model, ids, mesh = model_of_two_key_heads(), tokens(*IDS), init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        parallelize_module(layer, mesh, PLAN)
    streamgrad.enable(model, **options)
    with no_float32():
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    plan = InstalledForward.on(model.model).stream.planner.latest
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    return Step(loss.detach(), gradients), [str(policy) for policy in plan.policies]


class First(nn.Module):
    """The embeddings and the first layer; the decoder's last norm is not this stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of_two_key_heads()
        self.model.model.layers, self.model.model.norm = self.model.model.layers[:1], nn.Identity()
        self.model.lm_head = None
        streamgrad.enable(self.model.model, chunk_size=5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.model(input_ids=ids, use_cache=False).last_hidden_state


class Second(nn.Module):
    """The other layer, the norm and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model_of_two_key_heads()
        self.model.model.layers = self.model.model.layers[1:]
        self.model.model.embed_tokens = None
        streamgrad.enable(self.model, chunk_size=5)

    def forward(self, hidden: Tensor, *, labels: Tensor) -> Tensor:
        return self.model(inputs_embeds=hidden, labels=labels, use_cache=False).loss.unsqueeze(0)


def in_stages() -> dict[str, Tensor]:
    """Gradients of this rank's stage, with two micro-batches in flight; names are those of the whole model."""
    rank, ids = dist.get_rank(), tokens(*IDS)
    stage = First() if rank == 0 else Second()
    with no_float32():
        pipeline = PipelineStage(stage, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(pipeline, 2, loss_fn=lambda loss, target: loss.squeeze(0))
        _ = schedule.step(ids) if rank == 0 else schedule.step(labels=ids, target=ids)
    names = {name.removeprefix("model."): parameter.grad for name, parameter in stage.named_parameters()}
    return {name.replace("layers.0.", f"layers.{rank}."): gradient for name, gradient in names.items()}


def refusals(folder: str) -> dict[str, str]:
    from transformers.distributed import DistributedConfig

    said = {}
    for name, sizes in {
        "tensors": {"tp_size": 2},
        "experts": {"tp_size": 2, "ep_size": 2, "tp_plan": {}},
        "stages": {"pp_size": 2},
    }.items():
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
        with pytest.raises(ValueError, match="cannot be streamed") as refused:
            streamgrad.enable(model)
        said[name] = str(refused.value)
    model, ids = model_of_two_key_heads(), tokens(*IDS)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"lm_head": ColwiseParallel()})
    streamgrad.enable(model, chunk_size=5)
    with pytest.raises(ValueError, match="cannot be streamed") as refused:
        model(input_ids=ids, labels=ids)
    return said | {"head": str(refused.value)}


def on_two_ranks(folder: str) -> dict[str, Any]:
    budget = ("1GiB", "600KiB")[dist.get_rank()]
    return {
        "tensors": [in_tensors(options) for options in OPTIONS],
        "budgets": in_tensors({"memory_budget": budget, "chunk_size": 5}),
        "stages": in_stages(),
        "refusals": refusals(folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("experts")
    tiny_model("qwen3_moe", dtype=torch.float32, tie_word_embeddings=False).save_pretrained(folder)
    return launch(on_two_ranks, str(folder))


def test_tensor_parallelism_of_torch(subtests, ranks):
    expected = plain_step()
    for rank, results in enumerate(ranks):
        for options, (step, _) in zip(OPTIONS, results["tensors"], strict=True):
            with subtests.test(f"{options}, rank {rank}"):
                assert_same_step(step, expected, 1e-10)


def test_ranks_of_a_tensor_plan_alike(ranks):
    """Each runs the collectives of the other, so that what layers keep is decided by the smaller budget."""
    (first, kept), (second, kept_too) = (results["budgets"] for results in ranks)
    assert kept == kept_too and "all" not in kept[0], (kept, kept_too)
    for step in (first, second):
        assert_same_step(step, plain_step(), 1e-10)


def test_pipeline_of_torch(ranks):
    """The two micro-batches are half of the batch each, and their gradients averaged."""
    expected = plain_step()
    gradients = ranks[0]["stages"] | ranks[1]["stages"]
    assert not ranks[0]["stages"].keys() & ranks[1]["stages"].keys()
    assert_same_step(Step(expected.loss, gradients), expected, 1e-10)


def test_refusals(subtests, ranks):
    for name, needles in {
        "tensors": ["tp_size=2", "parallelize_module"],
        "experts": ["ep_size=2", "every chunk"],
        "stages": ["pp_size=2", "torch.distributed.pipelining"],
        "head": ["lm_head", "tensor parallelism"],
    }.items():
        for results in ranks:
            with subtests.test(name):
                assert all(needle in results["refusals"][name] for needle in needles), results["refusals"][name]
