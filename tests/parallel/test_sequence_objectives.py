"""DPO and GRPO where ranks share sequences: loss, entropies and gradients of plain backpropagation on the whole, in float64.

Trainers that sample completions log and learn what stock TRL does in one process, on the same completions.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import streamgrad
from engine_worker import launch
from generation_worker import RUNS, trained_alone, trained_together
from gradients import Step, assert_same_step, no_float32, relative_error, worst_gradient_error
from sequence_worker import slice_of
from shared_batches import BATCHES
from streamgrad.objectives import dpo_loss, grpo_loss
from streamgrad.parallel import sequence_parallel, shared_slice, whole_sequence
from streamgrad.trl.scoring import add_streamed_head
from streamgrad.trl.shared_generations import SharedGenerations, _scores_of_own, rows_of_group
from streamgrad.trl.sliced_rows import rows_cut_inside
from tiny import tiny_model, tokens
from trainers import tokenizer

LENGTH = 22  # two slices of 11: chunks of 4 leave a ragged one
# Prompt, answer and padding of each row. The first rank has no token of the last answer, and the second none of the third row.
ROWS = [(5, 12, 5), (5, 17, 0), (3, 6, 13), (13, 9, 0)]


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole_batch(side: str) -> dict[str, Tensor]:
    """Rows that are padded on one side, with the next token of each as its target and which of those are of the answer."""
    ids, mask, answers = tokens(4, LENGTH), torch.zeros(4, LENGTH, dtype=torch.long), torch.zeros(4, LENGTH, dtype=torch.long)
    for row, (prompt, answer, padding) in enumerate(ROWS):
        start = padding if side == "left" else 0
        mask[row, start : start + prompt + answer] = 1
        answers[row, start + prompt : start + prompt + answer] = 1
    shifted = {"targets": ids, "answers": answers}
    return {"input_ids": ids, "attention_mask": mask} | {
        name: nn.functional.pad(tensor[:, 1:], (0, 1)) for name, tensor in shifted.items()
    }


def dpo(policy: Tensor, reference: Tensor, entropy: Tensor, answers: Tensor, **options: Any) -> Tensor:
    """The first two rows are the chosen answers."""
    pairs = [*policy.chunk(2), *reference.chunk(2), *answers.chunk(2)]
    return dpo_loss(*pairs, **options)


def grpo(policy: Tensor, reference: Tensor, entropy: Tensor, answers: Tensor, **options: Any) -> Tensor:
    old = policy.detach() + 0.1 * draw(4, LENGTH, seed=3)
    known = {"old_logprobs": old, "ref_logprobs": reference, "entropy": entropy}
    return grpo_loss(policy, draw(4, seed=4), answers, **known, **options)


@dataclass(frozen=True)
class Case:
    """A loss of whole sequences, and the side on which they are padded."""

    loss: Callable[..., Tensor]
    options: dict[str, Any]
    side: str = "right"
    family: str = "qwen3"

    def models(self) -> list[nn.Module]:
        policy = tiny_model(self.family)
        reference = copy.deepcopy(policy).eval().requires_grad_(False)
        for parameter in reference.parameters():
            parameter.add_(0.02 * draw(*parameter.shape, seed=5))
        return [policy, reference]


CASES = [
    Case(dpo, {"beta": 0.7}),
    Case(dpo, {"loss_type": ["sigmoid_norm", "sft"], "ld_alpha": 0.4}, "left"),
    Case(dpo, {"loss_type": "aot", "label_smoothing": 0.1}, family="mistral"),
    Case(grpo, {"beta": 0.3, "entropy_coef": 0.2, "top_entropy_quantile": 0.6}),
    Case(
        grpo,
        {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.1, "off_policy_mask_threshold": 0.01},
        "left",
    ),
    Case(grpo, {"loss_type": "vespo"}),
]


def plain_step(case: Case) -> tuple[Step, Tensor]:
    """Stock models, one process, full logits; the entropies of the policy as well."""
    policy, reference = case.models()
    batch = whole_batch(case.side)
    with no_float32():
        scores = []
        for model in (policy, reference):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
            logprobs = logits.log_softmax(dim=-1)
            scores.append(logprobs.gather(2, batch["targets"].unsqueeze(2)).squeeze(2))
            scores.append(-(logprobs.exp() * logprobs).sum(dim=-1))
        loss = case.loss(scores[0], scores[2], scores[1], batch["answers"], **case.options)
        loss.backward()
    return Step(loss.detach(), {name: each.grad for name, each in policy.named_parameters()}), scores[1].detach()


class Scorer(nn.Module):
    """What an engine wraps in one's own loop: log-probabilities and entropies of a slice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.model.get_decoder()(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return streamgrad.token_logprobs(hidden, self.model.lm_head.weight, targets, return_entropy=True, chunk_size=3)


def shared_step(case: Case, engine: str) -> tuple[Step, Tensor]:
    group = dist.group.WORLD
    policy, reference = (streamgrad.enable(model, chunk_size=4) for model in case.models())
    sequence_parallel(policy, group)
    sequence_parallel(reference, group, in_evaluation=True)
    batch = whole_batch(case.side)
    own = slice_of({name: batch[name] for name in ("input_ids", "attention_mask", "targets")}, group)
    scorer: nn.Module = Scorer(policy)
    if engine == "ddp":
        scorer = DistributedDataParallel(scorer)
    elif engine == "fsdp2":
        for unit in (*policy.model.layers, scorer):
            fully_shard(unit)
    with no_float32():
        logprobs, entropy = (whole_sequence(scores, group) for scores in scorer(**own))
        with torch.no_grad():
            known = whole_sequence(Scorer(reference)(**own)[0], group)
        loss = case.loss(logprobs, known, entropy, batch["answers"], **case.options)
        loss.backward()
    gradients = {name: each.grad for name, each in policy.named_parameters()}
    if engine == "none":
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    elif engine == "fsdp2":
        gradients = {name: gradient.full_tensor() for name, gradient in gradients.items()}
    return Step(loss.detach(), gradients), entropy.detach()


# Rows that begin alike, and a model. The second's window cuts through prompts, the third's rows are of an odd number of tokens.
SHARED = [("turns", "qwen3"), ("prompts padded at the left", "mistral"), ("nine completions", "llama")]


def loss_of_scores(logprobs: Tensor, mask: Tensor) -> Tensor:
    return (logprobs.masked_fill(~mask, 0.0).sum(dim=1).sin() * draw(len(mask), seed=7)).sum()


def separate_rows_step(name: str, family: str) -> Step:
    """The stock model, one process, each row for itself."""
    model, batch = tiny_model(family), BATCHES[name]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with no_float32():
        logprobs = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(dim=-1)
        loss = loss_of_scores(logprobs.gather(2, ids[:, 1:, None]).squeeze(2), batch["completion_mask"][:, 1:].bool())
        loss.backward()
    return Step(loss.detach(), {name: each.grad for name, each in model.named_parameters()})


def shared_rows_step(name: str, family: str) -> tuple[Step, int, str]:
    """The rows' beginnings once, a slice of that row on each rank; its length; and what is said where ranks are a ring."""
    group = dist.group.WORLD
    model = sequence_parallel(streamgrad.enable(tiny_model(family), chunk_size=4), group)
    shared = streamgrad.share_prefixes(**BATCHES[name])
    own = shared_slice(shared, group)
    with no_float32():
        hidden = own.hidden_states(model)
        logprobs = streamgrad.token_logprobs(hidden, model.lm_head.weight, own.targets, chunk_size=3)
        loss = loss_of_scores(own.unshared(logprobs), shared.mask)
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    with pytest.raises(ValueError, match="a ring of ranks shares its sequences") as refused:
        own.hidden_states(sequence_parallel(model, group, ring=2))
    return Step(loss.detach(), gradients), own.input_ids.shape[1], str(refused.value)


SCORES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def scored_step(group: Any) -> tuple[Step, dict[str, Tensor]]:
    """What TRL asks of a mixture of experts, of rows of an odd length, the last of which has no token on the first rank."""
    model = tiny_model("qwen3_moe")
    model.config.output_router_logits = True
    add_streamed_head(model, streamgrad.StreamConfig(chunk_size=4, head_chunk_size=3), outputs=SCORES, share_prompts=True)
    ids, mask = tokens(3, 21), torch.ones(3, 21, dtype=torch.long)
    mask[2, :13] = mask[0, 17:] = 0
    labels = ids.masked_fill((mask == 0) | (torch.arange(21) < 4), -100)
    labels[2, 13] = -100
    with no_float32(), mock.patch("streamgrad.trl.sliced_rows.ulysses_group", return_value=group):
        with rows_cut_inside(model) if group else nullcontext():
            out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True, use_cache=False)
        loss = (out.log_probs.sum(dim=1).sin() + 0.3 * out.entropy.sum(dim=1)).sum() + out.aux_loss
        loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters()}
    if group:
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()
    return Step(loss.detach(), gradients), {name: out[name].detach() for name in (*SCORES, "label_mask")}


def disagreement() -> str:
    with pytest.raises(ValueError, match="disagree about tokens of a slice") as refused:
        whole_sequence(torch.zeros(1, 3 + dist.get_rank()), dist.group.WORLD)
    return str(refused.value)


def gradient_in_a_later_group() -> Tensor | None:
    """The gradient of scores in a group without rank 0. With several groups of ranks, all but one are so."""
    group = dist.new_group([1])
    if dist.get_rank() == 0:
        return None
    scores = torch.ones(1, 3, requires_grad=True)
    whole_sequence(scores, group).mul(2).sum().backward()
    dist.destroy_process_group(group)  # or torch would name the next group differently on the ranks
    return scores.grad


def joined_rows() -> dict[str, list]:
    """What two ranks know of a row each, the second's longer. Images, and what one rank alone knows, are refused on both."""
    rank = dist.get_rank()
    ids = {f"{part}_ids": torch.full((1, 1 + rank), 7 + rank) for part in ("prompt", "completion")}
    ratio = {"importance_sampling_ratio": torch.full((1, 1 + rank), 0.5)}
    rows = ids | ratio | {"advantages": torch.tensor([rank]), "num_items_in_batch": torch.tensor(3)}
    images = {"pixel_values": torch.zeros(1, 3, 4, 4)} if rank else {}
    with pytest.raises(ValueError, match="pixel_values cannot be passed on where ranks share sequences"):
        rows_of_group(rows | images, dist.group.WORLD)
    with pytest.raises(ValueError, match="pixel_values cannot be passed on"):
        _scores_of_own(None, dist.group.WORLD, None, rows["prompt_ids"], rows["prompt_ids"], 1, **images)
    with pytest.raises(ValueError, match="token_type_ids cannot be passed on"):
        rows_of_group(rows | ({} if rank else {"token_type_ids": rows["prompt_ids"]}), dist.group.WORLD)
    return {name: value.tolist() for name, value in rows_of_group(rows, dist.group.WORLD).items()}


def on_two_ranks(saved: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    numbers = whole_sequence(torch.tensor([[dist.get_rank() == 1, True]]), dist.group.WORLD)
    return {
        "steps": [shared_step(case, "none") for case in CASES],
        "engines": {engine: shared_step(CASES[0], engine) for engine in ("ddp", "fsdp2")},
        "scored": scored_step(dist.group.WORLD),
        "numbers": numbers,
        "later group": gradient_in_a_later_group(),
        "refused": disagreement(),
        "shared rows": [shared_rows_step(*case) for case in SHARED],
        "joined": joined_rows(),
        "trained": {name: trained_together(name, saved) for name in RUNS},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    for part in (tiny_model("qwen3"), tokenizer()):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(saved) -> list[dict[str, Any]]:
    return launch(on_two_ranks, saved)


def check(actual: tuple[Step, Tensor], expected: tuple[Step, Tensor]) -> None:
    assert_same_step(actual[0], expected[0], 1e-10)
    assert relative_error(actual[1], expected[1]) < 1e-10


def test_losses_of_whole_sequences(subtests, ranks):
    for index, case in enumerate(CASES):
        expected = plain_step(case)
        for rank, results in enumerate(ranks):
            with subtests.test(f"{case}, rank {rank}"):
                check(results["steps"][index], expected)


def test_under_engines_that_average(subtests, ranks):
    expected = plain_step(CASES[0])
    for results in ranks:
        for engine, actual in results["engines"].items():
            with subtests.test(engine):
                check(actual, expected)


def test_rows_that_share_their_beginnings(subtests, ranks):
    for index, (name, family) in enumerate(SHARED):
        expected, shared = separate_rows_step(name, family), streamgrad.share_prefixes(**BATCHES[name])
        assert shared.tree.length < shared.tokens
        for results in ranks:
            with subtests.test(name):
                step, length, _ = results["shared rows"][index]
                assert length == (shared.tree.length + 1) // 2
                assert_same_step(step, expected, 1e-10)


def test_rows_that_are_cut_inside_the_call(ranks):
    expected, scores = scored_step(None)
    for results in ranks:
        step, own = results["scored"]
        assert_same_step(step, expected, 1e-10)
        for name, score in scores.items():
            torch.testing.assert_close(own[name], score, rtol=1e-10, atol=1e-10)


def test_other_scores(ranks):
    for results in ranks:
        assert results["numbers"].tolist() == [[False, True, True, True]]
        assert "tokens of a slice: 3, 4," in results["refused"]
    assert ranks[1]["later group"].tolist() == [[2.0, 2.0, 2.0]]


def test_completions_of_all_ranks(ranks):
    """Prompts are padded on the left, the rest on the right, a ratio with 1."""
    for results in ranks:
        assert results["joined"] == {
            "prompt_ids": [[0, 7], [8, 8]], "completion_ids": [[7, 0], [8, 8]], "advantages": [0, 1], "num_items_in_batch": 3,
            "importance_sampling_ratio": [[0.5, 1.0], [0.5, 0.5]],
        }  # fmt: skip


class Gathering:
    """A trainer whose loss is what it gathers from four ranks, the first two of which have one batch, and the others another."""

    def __init__(self) -> None:
        first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
        self.accelerator = SimpleNamespace(
            parallelism_config=ParallelismConfig(sp_size=2, sp_backend="deepspeed"),
            num_processes=4,
            gather=lambda own: torch.cat([first, first, second, second]),
        )
        self.model = nn.Linear(1, 1)

    def compute_loss(self) -> list[float]:
        return self.accelerator.gather(torch.zeros(2)).tolist()


def test_what_a_loss_gathers_has_each_completion_once():
    """A quantile of entropies would be another one, if each were counted twice. In evaluation all ranks have other batches."""
    trainer = type("Trainer", (SharedGenerations, Gathering), {})()
    assert trainer.compute_loss() == [1.0, 2.0, 3.0, 4.0]
    trainer.model.eval()
    assert trainer.compute_loss() == [1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RUNS)
def test_trainers_that_sample(ranks, saved, name):
    runs = [results["trained"][name] for results in ranks]
    expected = trained_alone(name, saved, [run.sampled for run in runs])
    assert len(expected.logs) == 4, "three steps, and what was counted"
    for actual in runs:
        assert actual.shared > 0, "every row computed its prompt"
        for ours, theirs in zip(actual.logs, expected.logs, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-8, abs=1e-10)
        worst, parameter = worst_gradient_error(actual.weights, expected.weights)
        assert worst < 1e-10, parameter
