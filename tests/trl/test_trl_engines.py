"""Token scores and TRL's trainers with streamed models on two processes, under DDP, FSDP2 and ZeRO-3."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import z3_leaf_module
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl.trainer.utils import add_fused_lm_head

import streamgrad.trl.scoring
from engine_worker import Case, Zero, launch, optimizer_for, prepare_deepspeed
from gradients import no_float32, worst_gradient_error
from lora import with_lora
from streamgrad import StreamConfig
from streamgrad.parallel import make_zero3_leaves
from streamgrad.trl.scoring import add_streamed_head
from tiny import tiny_model, tokens
from trainers import history, tokenizer, trl_on_full_logits

FIELDS = ("log_probs", "entropy", "is_top1")


def trained(saved: str) -> list[list[list[dict]]]:
    """On one rank, under DDP: for each trainer, the history of stock and of the streamed one."""
    from trainer_kinds import build, load

    warnings.simplefilter("ignore")
    results = []
    for name, method in (("sft", "full"), ("dpo", "lora"), ("grpo", "full")):
        histories = []
        for streamed in (False, True):
            with no_float32(), trl_on_full_logits():
                trainer = build(
                    name, saved, load(saved), streamed=streamed, method=method, ddp_backend="gloo", learning_rate=1e-3,
                    max_steps=2, gradient_accumulation_steps=1,
                )  # fmt: skip
                histories.append(history(trainer))
                assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
        results.append(histories)
    return results


def test_trainers_under_ddp(tmp_path):
    """They log what stock TRL logs on two processes, the norms of reduced gradients among it."""
    tiny_model("qwen3").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    first, second = launch(trained, str(tmp_path))
    assert first == second, "ranks log different things"
    assert len(first) == 3
    for stock, streamed in first:
        assert len(streamed) == len(stock) == 2
        for ours, theirs in zip(streamed, stock, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-10)


def scored_loss(model, rank: int) -> torch.Tensor:
    """A loss of log-probabilities and entropies, on a batch of this rank's own length; rows of rank 0 have one prompt."""
    ids = tokens(2, (20, 9)[rank], seed=rank)
    if rank == 0:
        ids[1, :3] = ids[0, :3]
    labels = ids.clone()
    labels[:, :3] = -100
    outputs = model(input_ids=ids, labels=labels, fused_lm_head=True)
    return (outputs.log_probs.sin() + 0.3 * outputs.entropy).sum()


def scored_model(family: str, head: str):
    """`head` is "of the root", "of its own" (a unit of FSDP2's), or "saved": also of its own, and trained as a copy by PEFT."""
    model = tiny_model(family)
    return with_lora(model, targets=["q_proj"], modules_to_save=["lm_head"]).base_model.model if head == "saved" else model


def sharded_gradients(cases: list[tuple[str, str]]) -> list[dict[str, torch.Tensor]]:
    """On one rank: the gradients of `scored_loss` for each case of `scored_model`, gathered."""
    results = []
    for family, head in cases:
        model = scored_model(family, head)
        add_streamed_head(model, StreamConfig(chunk_size=4, head_chunk_size=3), outputs=FIELDS, share_prompts=True)
        for unit in (*model.model.layers, *([] if head == "of the root" else [model.lm_head]), model):
            fully_shard(unit)
        with no_float32():
            scored_loss(model, dist.get_rank()).backward()
        trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert all(isinstance(parameter.grad, DTensor) for parameter in trainable.values())
        results.append({name: parameter.grad.full_tensor() for name, parameter in trainable.items()})
    return results


def test_scores_under_fsdp2():
    """Weights exist only while their module runs; the head's are read inside its own call."""
    cases = [("qwen3", "of the root"), ("llama", "of the root"), ("llama", "of its own"), ("llama", "saved")]
    first, _ = launch(sharded_gradients, cases)
    for case, gradients in zip(cases, first, strict=True):
        model = scored_model(*case)
        with no_float32(), trl_on_full_logits():
            add_fused_lm_head(model, outputs=FIELDS)
            (sum(scored_loss(model, rank) for rank in range(2)) / 2).backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
        worst, name = worst_gradient_error(gradients, expected)
        assert worst < 1e-10, name


def partitioned_parameters(families: list[str]) -> list[dict[str, torch.Tensor]]:
    """On one rank: the parameters after one step of ZeRO-3 on `scored_loss`."""
    warnings.simplefilter("ignore")
    prepare_deepspeed()
    results = []
    for family in families:
        model = make_zero3_leaves(tiny_model(family, dtype=torch.float32))
        add_streamed_head(model, StreamConfig(chunk_size=4, head_chunk_size=3), outputs=FIELDS, share_prompts=True)
        zero = Zero(model, Case("zero3"))
        zero.engine.backward(scored_loss(zero.engine, dist.get_rank()))
        zero.engine.step()
        results.append(zero.parameters())
    return results


def test_scores_under_zero_3():
    families = ["qwen3", "llama"]
    first, _ = launch(partitioned_parameters, families)
    for family, parameters in zip(families, first, strict=True):
        model = tiny_model(family, dtype=torch.float32)
        start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        add_fused_lm_head(model, outputs=FIELDS)
        (sum(scored_loss(model, rank) for rank in range(2)) / 2).backward()
        optimizer_for(model).step()
        moved, expected = (
            {name: side[name] - start[name] for name in start} for side in (parameters, dict(model.named_parameters()))
        )
        worst, name = worst_gradient_error(moved, {name: value.detach() for name, value in expected.items()})
        assert worst < 1e-4, name  # differences of parameters, in float32: 2.9e-6 was seen


def test_under_zero_3_layers_become_leaves(monkeypatch):
    """Trainers make their engine themselves, so nobody else could mark the layers in time."""
    plain, marked = tiny_model("qwen3"), tiny_model("qwen3")
    add_streamed_head(plain, None)
    monkeypatch.setattr(streamgrad.parallel.zero3, "is_deepspeed_zero3_enabled", lambda: True)
    add_streamed_head(marked, None)
    assert [z3_leaf_module(layer) for layer in plain.model.layers] == [False, False]
    assert [z3_leaf_module(layer) for layer in marked.model.layers] == [True, True]
