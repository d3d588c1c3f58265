"""What the ranks of a sequence-parallel test run, on slices of sequences, and the reference on whole ones."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import engine_worker
import streamgrad
from engine_worker import Collectives, base_of, optimizer_for, prepare_deepspeed
from gradients import Step, no_float32, relative_error
from lora import with_lora
from streamgrad.hf.patching import InstalledForward
from streamgrad.memory.live_bytes import LiveBytes
from streamgrad.parallel import make_zero3_leaves, sequence_loss, sequence_parallel
from tiny import tiny_config, tiny_model, tokens


@dataclass(frozen=True)
class Case:
    """One model and one batch of 2 sequences of `length` tokens, the ranks' tokens together."""

    family: str = "qwen3"
    length: int = 24
    chunk_size: int | str = 4
    keep: str = "input"
    kind: str = "plain"
    lora: bool = False
    balance: bool = False
    scored: bool = False  # as TRL's trainers call a model
    ranks: int = 2
    ring: int = 1  # of the ranks
    key_heads: int | None = None  # as many as ranks, or 2
    options: dict[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        every_head = self.ranks >= 4 or self.family == "deepseek_v3"  # whose keys are made for each
        heads = {"num_attention_heads": 8} if self.ranks == 8 * self.ring else {}
        model = tiny_model(self.family, num_key_value_heads=self.key_heads or (4 if every_head else 2), **heads)
        if self.balance:
            model.config.output_router_logits = True
            model.config.router_aux_loss_coef = model.router_aux_loss_coef = 0.5
        if self.lora:
            model = with_lora(model)
            base_of(model).enable_input_require_grads()
        return model

    def batch(self) -> dict[str, Tensor]:
        """The whole sequences, with labels that are shifted."""
        ids = tokens(1 if self.kind == "flash" else 2, self.length)
        labels, batch = ids.clone(), {"input_ids": ids}
        if self.kind in ("padded", "left padded"):
            mask = torch.ones_like(ids)
            if self.kind == "padded":
                mask[1, 2 * self.length // 5 :] = 0  # the second rank has no token of the second row
                labels[1, 2 * self.length // 5 :] = -100
            else:
                mask[1, : self.length - 5] = 0
                labels[1, : self.length - 5] = -100  # the first real token is predicted from padding
            batch["attention_mask"] = mask
        elif self.kind == "packed":
            first, half = self.length // 3, self.length // 2
            lengths = [[first, 1, self.length - first - 1], [half, self.length - half]]  # the second row's at the end of a slice
            batch["position_ids"] = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            labels = labels.masked_fill(batch["position_ids"] == 0, -100)
        elif self.kind == "flash":  # which takes a mask without padding for none, and goes by positions
            batch["attention_mask"] = torch.ones_like(ids)
            first = self.length // 3
            batch["position_ids"] = torch.cat([torch.arange(first), torch.arange(self.length - first)])[None]
        elif self.kind == "prompt":
            labels[:, : self.length // 2 + 3] = -100  # the first rank has no label
        elif self.kind == "positions":
            batch["position_ids"] = torch.arange(7, 7 + self.length).expand(2, -1)
        elif self.kind == "embedded":
            del batch["input_ids"]
            generator = torch.Generator().manual_seed(2)
            batch["inputs_embeds"] = torch.randn(2, self.length, 24, generator=generator, dtype=torch.float64)
        return batch | {"shift_labels": nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}


def plain_step(case: Case, device: str = "cpu") -> Step:
    """Stock, one process, the whole sequence. The step is on the CPU, wherever it ran."""
    model, batch = case.model().to(device), {name: tensor.to(device) for name, tensor in case.batch().items()}
    if case.kind == "flash":
        del batch["attention_mask"]  # with which SDPA would not look at the positions
    embeds = batch["inputs_embeds"].requires_grad_() if case.kind == "embedded" else None
    with no_float32():
        loss = model(**batch, labels=batch["shift_labels"], use_cache=False).loss
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    if embeds is not None:
        gradients |= {"input": embeds.grad}
    return Step(loss.detach().cpu(), {name: None if grad is None else grad.cpu() for name, grad in gradients.items()})


@dataclass
class Outcome:
    """`step` after averaging over ranks, as engines do; `exchanged`: all-to-alls of this rank, and elements put into them.

    `gathered` and `summed` are the same of the ring's all-gathers and reduce-scatters. `kept` says by layer what the plan was.
    """

    step: Step
    exchanged: tuple[int, int]
    gathered: tuple[int, int]
    summed: tuple[int, int]
    kept: list[str]


def slice_of(batch: dict[str, Tensor], group: Any) -> dict[str, Tensor]:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return {name: tensor.chunk(ranks, dim=1)[rank].contiguous() for name, tensor in batch.items()}


def run_case(case: Case, device: str = "cpu") -> Outcome:
    group = dist.group.WORLD
    options = dict(case.options)
    if "budgets" in options:
        options["memory_budget"] = options.pop("budgets")[dist.get_rank(group)]
    model = case.model().to(device)
    streamgrad.enable(model, chunk_size=case.chunk_size, head_chunk_size=3, keep=case.keep, **options)
    if case.kind == "flash":
        model.config._attn_implementation = "flash_attention_2"  # as in a model that runs on a GPU
    if case.scored:
        from streamgrad.trl.scoring import add_streamed_head

        add_streamed_head(model, None)
    sequence_parallel(model, group, ring=case.ring)
    batch = {name: tensor.to(device) for name, tensor in slice_of(case.batch(), group).items()}
    asked = {"fused_lm_head": True} if case.scored else {}
    embeds = batch["inputs_embeds"].requires_grad_() if case.kind == "embedded" else None
    with no_float32(), Collectives() as seen:
        loss = sequence_loss(model(**batch, **asked, labels=batch["shift_labels"]).loss, batch["shift_labels"], group)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for gradient in gradients.values():
        if gradient is not None:
            dist.all_reduce(gradient, group=group)
            gradient /= dist.get_world_size(group)
    if embeds is not None:
        parts = [torch.empty_like(embeds.grad) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, embeds.grad, group=group)
        gradients["input"] = torch.cat(parts, dim=1) / dist.get_world_size(group)
    plan = InstalledForward.on(base_of(model).get_decoder()).stream.planner.latest
    return Outcome(
        Step(loss.detach().cpu(), {name: None if gradient is None else gradient.cpu() for name, gradient in gradients.items()}),
        put_into("alltoall", seen, 1 / 2),
        put_into("allgather_base", seen, 1 / (case.ring + 1)),
        put_into("reduce_scatter_base", seen, case.ring / (case.ring + 1)),
        [str(policy) for policy in plan.policies],
    )


def put_into(kind: str, seen: Collectives, share: float) -> tuple[int, int]:
    """Collectives of a kind, and the elements put into them: a share of those that go in and come out."""
    sizes = [(times, round(elements * share)) for (name, elements), times in seen.counts.items() if kind in name]
    return sum(times for times, _ in sizes), sum(times * size for times, size in sizes)


def on_two_ranks(cases: list[Case]) -> dict[str, Any]:
    """All that two ranks are for: starting processes takes longer than any of it."""
    return {
        "steps": [run_case(case) for case in cases],
        "other calls": other_calls(),
        "refusals": refusals(),
        "disagreement": refusals_of_disagreement(),
    }


def on_four_ranks(cases: list[Case]) -> dict[str, Any]:
    return {
        "steps": [run_case(case) for case in cases],
        "live bytes": live_bytes(),
        "training": {name: train(name) for name in ENGINES} | {"a ring under fsdp2": train("fsdp2", ring=2)},
    }


def on_more_ranks(cases: list[Case]) -> dict[str, Any]:
    return {"steps": [run_case(case) for case in cases]}


def on_one_gpu(cases: list[Case]) -> dict[str, Any]:
    """The ranks share a GPU over gloo, which takes its memory for the host's in two collectives of the ring: others stand in."""

    def gather(arrived: Tensor, own: Tensor, *, group: Any, async_op: bool) -> Any:
        return dist.all_gather(list(arrived.chunk(dist.get_world_size(group))), own, group=group, async_op=async_op)

    def reduce_scatter(own: Tensor, sent: Tensor, *, group: Any, async_op: bool) -> Any:
        dist.all_reduce(sent, group=group)
        own.copy_(sent.chunk(dist.get_world_size(group))[dist.get_rank(group)])
        return mock.Mock()

    with mock.patch.multiple("streamgrad.engine.ring", _all_gather=gather, _reduce_scatter=reduce_scatter):
        return {"steps": [run_case(case, "cuda" if torch.cuda.is_available() else "cpu") for case in cases]}


# --- memory ------------------------------------------------------------------------------------------------------------


LENGTH, CHUNKS = 1024, 8
# Ranks that share the sequence, their ring, key heads of four, and what layers keep.
COUNTED = [
    *((ranks, ring, 4, "input") for ranks, ring in ((1, 1), (2, 1), (4, 1), (4, 2), (4, 4))),
    (4, 2, 1, "attention"),
    (4, 2, 4, "all"),
]


def counted_config(key_heads: int) -> Any:
    return tiny_config("llama", num_key_value_heads=key_heads, num_hidden_layers=4)


def live_bytes() -> tuple[dict[tuple[int, int, int, str], int], int]:
    """Peak bytes of a step on one rank, by the cases of `COUNTED`; bytes of a layer's parameters.

    The least of three steps: gloo's thread lets go of a collective's tensors some time after the collective ends, and where the
    machine is busy that is late enough to be counted.
    """
    peaks: dict[tuple[int, int, int, str], int] = {}
    for ranks, ring, key_heads, keep in COUNTED:
        group = init_device_mesh("cpu", (4 // ranks, ranks), mesh_dim_names=("data", "sequence"))["sequence"].get_group()
        model = tiny_model("llama", dtype=torch.float32, num_key_value_heads=key_heads, num_hidden_layers=4)
        size = LENGTH // ranks // CHUNKS
        sequence_parallel(streamgrad.enable(model, chunk_size=size, head_chunk_size=size, keep=keep), group, ring=ring)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        ids, steps = tokens(1, LENGTH // ranks), []
        for _ in range(3):
            with LiveBytes() as live:
                model(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
            steps.append(live.peak_bytes)
        peaks[ranks, ring, key_heads, keep] = min(steps)
    return peaks, sum(parameter.nbytes for parameter in model.model.layers[0].parameters())


# --- engines -----------------------------------------------------------------------------------------------------------

ENGINES = ("ddp", "fsdp2", "zero3")
STEPS = 3


def training_batch(replica: int, step: int) -> dict[str, Tensor]:
    """Return a batch whose length differs between the two pairs of ranks, with labels that the two of a pair share unequally."""
    ids = tokens(2, (24, 10)[replica], seed=10 * step + replica)
    labels = ids.masked_fill(torch.arange(ids.shape[1]) < 4, -100)
    return {"input_ids": ids, "shift_labels": nn.functional.pad(labels[:, 1:], (0, 1), value=-100)}


def training_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return tiny_model("qwen3", dtype=dtype, tie_word_embeddings=False)


def plain_training(dtype: torch.dtype) -> dict[str, Tensor]:
    model = training_model(dtype)
    optimizer = optimizer_for(model)
    for step in range(STEPS):
        for replica in (0, 1):
            batch = training_batch(replica, step)
            (model(**batch, labels=batch["shift_labels"]).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train(name: str, ring: int = 1) -> dict[str, Tensor]:
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))["sequence"].get_group()
    model = training_model()
    if name == "zero3":
        prepare_deepspeed()
        make_zero3_leaves(model)
    sequence_parallel(streamgrad.enable(model, chunk_size=5, head_chunk_size=3), group, ring=ring)
    engine: Any = engine_worker.ENGINES[name](model, engine_worker.Case(name))
    for step in range(STEPS):
        batch = slice_of(training_batch(dist.get_rank() // 2, step), group)
        wrapped = engine.engine if name == "zero3" else engine.wrapped
        loss = sequence_loss(wrapped(**batch, labels=batch["shift_labels"]).loss, batch["shift_labels"], group)
        if name == "zero3":
            engine.engine.backward(loss)
            engine.engine.step()
        else:
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return engine.parameters()


# --- other calls, and what is refused ----------------------------------------------------------------------------------


def other_calls() -> dict[str, float]:
    """Relative errors of logits."""
    group, case = dist.group.WORLD, Case(chunk_size=5)
    stock, batch = case.model(), case.batch()
    model = sequence_parallel(streamgrad.enable(case.model(), chunk_size=5), group)
    ids, mine = batch["input_ids"], slice_of(batch, group)
    with no_float32(), torch.no_grad():
        whole = stock(input_ids=ids).logits
        logits = {
            "no grad": model(**mine, labels=mine["shift_labels"]).logits,
            "tuple": model(input_ids=mine["input_ids"], return_dict=False)[0],
            "a copy": copy.deepcopy(model)(input_ids=mine["input_ids"]).logits,
        }
        own = slice_of({"logits": whole}, group)["logits"]
        errors = {name: relative_error(actual, own) for name, actual in logits.items()}
        errors["evaluation"] = relative_error(model.eval()(input_ids=ids).logits, whole)
        sequence_parallel(model.train(), None)
        errors["left"] = relative_error(model(input_ids=ids).logits, whole)
        stock, experts = tiny_model("qwen3_moe"), streamgrad.enable(tiny_model("qwen3_moe"), chunk_size=5)
        sequence_parallel(experts, group)
        whole, own = (
            net(input_ids=part, output_router_logits=True) for net, part in ((stock, ids), (experts, mine["input_ids"]))
        )
        pairs = zip(own.router_logits, whole.router_logits, strict=True)
        return errors | {"router logits": max(relative_error(ours, theirs) for ours, theirs in pairs)}


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError, match=".") as refused:
        function(*args, **kwargs)
    return str(refused.value)


def refusals() -> dict[str, str]:
    group, ids = dist.group.WORLD, tokens(1, 8)
    model = sequence_parallel(streamgrad.enable(tiny_model("llama"), chunk_size=4), group)
    ends = torch.tensor([0, 8], dtype=torch.int32)
    padded = sequence_parallel(streamgrad.enable(tiny_model("llama"), chunk_size=4), group)
    padded.set_attn_implementation("eager")
    # The second rank's slice begins with hidden tokens, which see those of the first; the first rank's sees nothing.
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[:, :3] = 0
    padded_batch = {"input_ids": ids, "attention_mask": mask, "shift_labels": ids}
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    dynamic = tiny_model("llama", rope_parameters=scaling)
    dynamic = sequence_parallel(streamgrad.enable(dynamic, chunk_size=4), group)
    few_heads = streamgrad.enable(tiny_model("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24))
    in_segments = streamgrad.enable(tiny_model("llama"), chunk_size=4, recompute_layers=2)
    in_ring = sequence_parallel(streamgrad.enable(tiny_model("llama", attention_dropout=0.1), chunk_size=4), group, ring=2)
    with torch.no_grad():
        cache = streamgrad.disable(copy.deepcopy(model))(input_ids=ids, use_cache=True).past_key_values
    return {
        "heads": message(sequence_parallel, few_heads, group),
        "ring": message(sequence_parallel, model, group, ring=3),
        "dropout": message(in_ring, input_ids=ids, labels=ids, shift_labels=ids),
        "empty": message(model, input_ids=ids[:, :0]),
        "segments": message(sequence_parallel(in_segments, group), input_ids=ids, labels=ids, shift_labels=ids),
        "labels": message(model, input_ids=ids, labels=ids),
        "dense mask": message(model, input_ids=ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool)),
        "boundaries": message(model, input_ids=ids, position_ids=torch.arange(8)[None], cu_seq_lens_q=ends, cu_seq_lens_k=ends),
        "hidden states": message(model, input_ids=ids, output_hidden_states=True),
        "whole mask": message(model, input_ids=ids, attention_mask=torch.ones(1, 16)),
        "cache": message(model, input_ids=ids, past_key_values=cache),
        "generation": message(model.generate, ids, max_new_tokens=2),
        "not enabled": message(sequence_parallel, tiny_model("llama"), group),
        "rotary": message(dynamic, input_ids=ids),
        "evaluation": message(model.eval(), input_ids=ids),
        "targets": message(padded, **padded_batch, labels=padded_batch["shift_labels"]),
    }


def refusals_of_disagreement() -> dict[str, str]:
    rank, group, ids = dist.get_rank(), dist.group.WORLD, tokens(1, 8)

    def model(**options: Any) -> nn.Module:
        return sequence_parallel(streamgrad.enable(tiny_model("llama"), **({"chunk_size": 4} | options)), group)

    positions = {"position_ids": torch.arange(8)[None]} if rank else {}
    experts = sequence_parallel(streamgrad.enable(tiny_model("qwen3_moe"), chunk_size=4), group)
    mask = {"attention_mask": torch.ones_like(ids)} if rank else {}
    alone = dist.new_group([0], use_local_synchronization=True) if rank == 0 else None
    groups = message(sequence_parallel, model(), group, ring=2)
    if alone is not None:
        dist.destroy_process_group(alone)
    return {
        "groups": groups,
        "length": message(model(), input_ids=ids[:, : 8 - rank]),
        "chunk_size": message(model(chunk_size=4 - rank), input_ids=ids),
        "positions": message(model(), input_ids=ids, **positions),
        "keep": message(model(keep=("input", "attention")[rank]), input_ids=ids),
        "mask": message(experts, input_ids=ids, output_router_logits=True, **mask),
        "ring": message(sequence_parallel, model(), group, ring=1 + rank),
    }
