"""Compares the training step of a case with plain backpropagation; `make fuzz` and tests/project/test_fuzz.py run many."""

from __future__ import annotations

import copy
import dataclasses
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import streamgrad
from families import small_model
from fuzz_cases import Case, is_meant
from gradients import Step, assert_same_step, assert_step_as_exact_as_plain, no_float32
from lora import inner_of, with_lora
from streamgrad.engine.policy import LayerPolicy
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.step_plan import Planner
from streamgrad.memory.planner import Plan
from streamgrad.objectives import dpo_loss, grpo_loss
from stretches import chunks_in_forward
from tiny import FAMILIES, tiny_model, tokens

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = 1e-9


# --- model ---------------------------------------------------------------------------------------------------------------


@functools.cache
def _pristine(family: str, changes: tuple[tuple[str, Any], ...]) -> nn.Module:
    if family in FAMILIES:
        return tiny_model(family, **dict(changes))
    torch.manual_seed(0)
    return small_model(family)


def model_of(case: Case, dtype: torch.dtype) -> nn.Module:
    """Return a fresh model of the case. Its weights are those of `case.dtype`, whatever dtype holds them."""
    model = copy.deepcopy(_pristine(case.family, case.changes))
    if case.adapter != "none":
        targets = None if case.family in FAMILIES else "all-linear"
        model = with_lora(model, targets=targets, use_dora=case.adapter == "dora")
    rounded = DTYPES.get(case.dtype, torch.float32)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.dtype == torch.float64:
            tensor.data = tensor.data.to(rounded).to(dtype)
    freeze(model, case)
    return model


def freeze(model: nn.Module, case: Case) -> None:
    inner = inner_of(model)
    head = {id(parameter) for parameter in inner.get_output_embeddings().parameters()}
    last = {id(parameter) for parameter in decoder_layers(inner.get_decoder())[-1].parameters()}
    lower = [inner.get_input_embeddings(), decoder_layers(inner.get_decoder())[0]]
    below = {id(parameter) for module in lower for parameter in module.parameters()} - head
    drawn = random.Random(case.seed)
    for parameter in model.parameters():
        stays = {
            "nothing": True, "half": drawn.random() < 0.5 or id(parameter) in last, "lower layers": id(parameter) not in below,
            "head": id(parameter) not in head, "all but norms": parameter.ndim == 1, "all but head": id(parameter) in head,
        }[case.frozen]  # fmt: skip
        parameter.requires_grad_(parameter.requires_grad and stays)
    if not any(parameter.requires_grad for parameter in model.parameters()):  # as some norms have no weight
        decoder_layers(inner.get_decoder())[-1].requires_grad_(True)


# --- batches -------------------------------------------------------------------------------------------------------------


def batch_of(case: Case, model: nn.Module, index: int) -> dict[str, Tensor]:
    """Return the arguments of micro-batch `index`. A label is -100 where it would be predicted from a token that sees no key."""
    rows, length, seed = case.rows, case.lengths[index], 10 * case.seed + index
    generator = torch.Generator().manual_seed(seed)
    ids = tokens(rows, length, seed=seed)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
    labels[:, -1] = ids[:, -1]
    arguments, labels = _mask_of(case, labels, generator, next(model.parameters()).dtype)
    if case.embedded:
        width = inner_of(model).get_input_embeddings().weight.shape[1]
        embeds = torch.randn(rows, length, width, generator=generator, dtype=torch.float64)
        arguments["inputs_embeds"] = embeds.to(DTYPES.get(case.dtype, torch.float32)).to(next(model.parameters()).dtype)
    else:
        arguments["input_ids"] = ids
    return arguments | {"labels": labels, "use_cache": False}


def _mask_of(case: Case, labels: Tensor, generator: torch.Generator, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    rows, length = labels.shape
    position = torch.arange(length).expand(rows, length)
    real = torch.randint(1, length + 1, (rows, 1), generator=generator)
    if case.mask in ("right", "left", "mixed"):
        left = torch.arange(rows)[:, None] % 2 == 1 if case.mask == "mixed" else torch.tensor(case.mask == "left")
        seen = torch.where(left, position >= length - real, position < real)
        first = left & (position == length - real)  # it would be predicted from padding
        return {"attention_mask": seen.long()}, labels.masked_fill(~seen | first, -100)
    if case.mask == "holes":
        holes = torch.rand(labels.shape, generator=generator) < 0.3
        holes[:, 0] = False
        after_a_hole = nn.functional.pad(holes[:, :-1], (1, 0))
        return {"attention_mask": (~holes).long()}, labels.masked_fill(after_a_hole, -100)
    if case.mask.startswith("packed"):
        starts = torch.rand(labels.shape, generator=generator) < 0.25
        starts[:, 0] = True
        arguments = {"position_ids": position - torch.where(starts, position, 0).cummax(dim=1).values}
        if case.mask == "packed flat":
            ends = torch.tensor([*starts[0].nonzero().flatten().tolist(), length], dtype=torch.int32)
            longest = int(ends.diff().max())
            arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        return arguments, labels
    if case.mask.startswith("dense"):
        seen = torch.rand(rows, 1, length, length, generator=generator) < 0.6
        seen = (seen | torch.eye(length, dtype=torch.bool)).tril()
        bias = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        return {"attention_mask": seen if case.mask == "dense bool" else bias}, labels
    return {}, labels


# --- objectives ----------------------------------------------------------------------------------------------------------


def loss_of(case: Case, model: nn.Module, batch: dict[str, Tensor], *, streamed: bool) -> Tensor:
    """Return the loss of one micro-batch. Only how token log-probabilities are made differs between the two sides."""
    labels = batch["labels"]
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if case.balance:
        batch = batch | {"output_router_logits": True}
    if case.objective == "labels":
        return model(**batch).loss
    if case.objective.startswith("counted"):
        return model(**batch, num_items_in_batch=torch.tensor(17) if case.objective == "counted tensor" else 17).loss
    if case.objective == "shifted":
        return model(**batch, shift_labels=targets, num_items_in_batch=17).loss
    counts = (targets != -100).double()
    generator = torch.Generator().manual_seed(case.seed)
    if case.objective in ("logits", "hidden"):
        decoder = inner_of(model).get_decoder()
        out = model(**inputs).logits if case.objective == "logits" else decoder(**inputs).last_hidden_state
        weights = torch.randn(out.shape, generator=generator, dtype=torch.float64) * counts.unsqueeze(-1)
        return (out * weights.to(out.dtype)).sum() / 17
    logprobs = _logprobs(case, model, inputs, targets, streamed=streamed)
    others = -torch.rand(targets.shape, generator=generator, dtype=torch.float64) * counts
    others = others.to(logprobs.dtype)
    if case.objective == "dpo":
        (chosen, rejected), masks = logprobs.chunk(2), counts.chunk(2)
        return dpo_loss(chosen, rejected, *others.chunk(2), *masks)
    advantages = torch.randn(len(labels), generator=generator, dtype=torch.float64).to(logprobs.dtype)
    return grpo_loss(logprobs, advantages, counts, ref_logprobs=others, beta=0.1)


def _logprobs(case: Case, model: nn.Module, inputs: dict, targets: Tensor, *, streamed: bool) -> Tensor:
    inner = inner_of(model)
    if not streamed:
        logprobs = model(**inputs).logits.float().log_softmax(-1)
        return logprobs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) * (targets != -100)
    scale = getattr(inner.config, "logit_scale", None) or 1 / (getattr(inner.config, "logits_scaling", None) or 1)
    return streamgrad.token_logprobs(
        inner.get_decoder()(**inputs).last_hidden_state, inner.get_output_embeddings().weight, targets, logit_scale=scale,
        softcap=getattr(inner.config, "final_logit_softcapping", None), chunk_size=case.head_chunk_size,
    )  # fmt: skip


# --- comparison ----------------------------------------------------------------------------------------------------------


def step_of(case: Case, model: nn.Module, *, streamed: bool) -> Step:
    """Return the summed loss and the gradients after every micro-batch has run forward and backward."""
    total, gradients = 0.0, {}
    for index in range(len(case.lengths)):
        batch = batch_of(case, model, index)
        if not streamed:  # boundaries, which position_ids tell too, and stock eager attention looks away from
            batch = {name: value for name, value in batch.items() if "_seq_lens_" not in name and "max_length_" not in name}
        if case.embedded:
            leaf = batch["inputs_embeds"].requires_grad_()
            batch["inputs_embeds"] = leaf.clone()  # some models scale them in place
        with torch.autocast("cpu", torch.bfloat16) if case.dtype == "autocast" and not _is_exact(model) else nullcontext():
            loss = loss_of(case, model, batch, streamed=streamed)
        loss.backward()
        total = total + loss.detach()
        if case.embedded:
            gradients[f"input {index}"] = leaf.grad
    gradients |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return Step(total, gradients)


def _is_exact(model: nn.Module) -> bool:
    return next(model.parameters()).dtype == torch.float64


@contextmanager
def enabled(case: Case, model: nn.Module) -> Iterator[None]:
    """Stream `model` within the block, by the case's options and plan."""
    checkpoint = {"gradient_checkpointing_kwargs": {"use_reentrant": case.checkpointing == "reentrant"}}
    with ExitStack() as patches:
        if case.keys_at_once:
            patches.enter_context(mock.patch("streamgrad.attention.streamed.KEYS_AT_ONCE", case.keys_at_once))
        if case.layers:
            plan = Plan(tuple(LayerPolicy(keep) for keep, _ in case.layers), tuple(size for _, size in case.layers), 0.0, 0.0)
            patches.enter_context(mock.patch.object(Planner, "plan_without_costs", return_value=plan))
        patches.enter_context(chunks_in_forward(case.chunks_in_forward))
        checkpointing = case.checkpointing if inner_of(model).supports_gradient_checkpointing else "off"
        if checkpointing == "before":
            model.gradient_checkpointing_enable(**checkpoint)
        streamgrad.enable(model, **case.options)
        if checkpointing in ("after", "reentrant"):
            model.gradient_checkpointing_enable(**checkpoint)
        yield


def check(case: Case) -> None:
    """Raise where the case's streamed step is not plain backpropagation's, nor refused for a reason that is known here."""
    dtype = DTYPES.get(case.dtype, torch.float32)
    exact = model_of(case, torch.float64)
    if case.mask == "dense bool" and exact.config._attn_implementation == "eager":
        with pytest.raises(ValueError, match="4-D attention mask is boolean, and eager attention"):
            _streamed_step(case, dtype)
        return
    with no_float32():
        truth = step_of(case, exact, streamed=False)
    if dtype == torch.float64:
        with no_float32():
            assert_same_step(_streamed_step(case, dtype), truth, TOLERANCE)
        return
    steps = _streamed_step(case, dtype), step_of(case, model_of(case, dtype), streamed=False), truth
    if truth.loss.isnan():  # the mean over no labels
        assert all(step.loss.isnan() for step in steps)
        steps = tuple(Step(torch.zeros(()), step.gradients) for step in steps)
    assert_step_as_exact_as_plain(*steps, rounding=torch.bfloat16 if case.dtype == "autocast" else dtype)


def _streamed_step(case: Case, dtype: torch.dtype) -> Step:
    model = model_of(case, dtype)
    with enabled(case, model):
        return step_of(case, model, streamed=True)


def failure(case: Case, check: Callable[[Case], None] = check) -> str | None:
    """Return how the case fails, or None where it does not."""
    try:
        check(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def failures(cases: Iterable[Case], check: Callable[[Case], None] = check) -> Iterator[str]:
    """Yield a program for each case that fails, reduced to what the failure needs."""
    for case in cases:
        if failure(case, check):
            small = smallest(case, check)
            yield snippet(small, failure(small, check) or "it failed once, and no more")


def smallest(case: Case, check: Callable[[Case], None] = check) -> Case:
    """Return a case that fails too, with every value that may be the simplest set to it."""
    for field in dataclasses.fields(case):
        for value in _simpler(field, case):
            simpler = dataclasses.replace(case, **{field.name: value})
            if simpler != case and is_meant(simpler) and failure(simpler, check):
                case = simpler
                break
    return case


def _simpler(field: dataclasses.Field, case: Case) -> list:
    lengths = [(length,) for length in (2, 5, 9) if length < max(case.lengths)] + [(length,) for length in case.lengths]
    return lengths if field.name == "lengths" else [field.default]


SNIPPET = """\
# Run in the repository's root. {why}
import sys

sys.path[:0] = ["src", "tests/support"]
from fuzz_cases import Case
from fuzzing import check

check({case})
"""


def snippet(case: Case, why: str) -> str:
    """Return a program that repeats the case, and fails as it does."""
    return SNIPPET.format(case=case, why=why.strip().splitlines()[0])
