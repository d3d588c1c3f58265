"""Rows that share their beginnings: losses, scores and every gradient equal those of separate rows, from fewer tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import streamgrad
from gradients import assert_same_step, more, no_float32, run_step
from lora import with_lora
from shared_batches import BATCHES, batch_of, group
from streamgrad.attention import streamed, trees
from streamgrad.attention.backends.eager import EagerBackend
from streamgrad.attention.backends.sdpa import SdpaBackend
from streamgrad.hf import decoder
from tensor_shapes import Shapes
from tiny import FAMILIES, tiny_model


def weights_of(batch: dict) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(2, *batch["input_ids"][:, 1:].shape, generator=generator, dtype=torch.float64) + 0.5


def separate(model: nn.Module, batch: dict) -> torch.Tensor:
    """A loss of log-probabilities and entropies of separate rows."""
    model_inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    logits = model(**model_inputs, use_cache=False).logits[:, :-1]
    logprobs = logits.log_softmax(-1)
    scores = logprobs.gather(-1, batch["input_ids"][:, 1:, None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)
    real = batch["attention_mask"][:, 1:].bool() & batch["attention_mask"][:, :-1].bool()
    return weighed(batch, scores, batch["completion_mask"][:, 1:].bool() & real)


def weighed(batch: dict, scores: tuple, mask: torch.Tensor) -> torch.Tensor:
    return sum((weight * score * mask).sum() for weight, score in zip(weights_of(batch), scores, strict=True))


def shared(model: nn.Module, batch: dict) -> torch.Tensor:
    found = streamgrad.share_prefixes(**batch)
    hidden = found.hidden_states(model)
    head = model.get_output_embeddings()
    scores = streamgrad.token_logprobs(hidden, head.weight, found.targets, bias=head.bias, chunk_size=3, return_entropy=True)
    return weighed(batch, tuple(map(found.unshared, scores)), found.mask)


def check(family: str, batch: dict, options: list[dict], *, lora: bool = False, tolerance: float = 1e-10) -> None:
    model = tiny_model(family)
    model = with_lora(model) if lora else model
    with no_float32():
        expected = run_step(model, batch, forward=separate)
        for option in options:
            streamgrad.enable(model, **option)
            actual = run_step(model, batch, forward=shared)
            streamgrad.disable(model)
            assert_same_step(actual, expected, tolerance)


OPTIONS = [{"chunk_size": size, "keep": keep} for size, keep in ((1, "input"), (7, "attention"), (100, "input"), (5, "all"))]
# Whose head is more than a product would need its own map of logits here.
FAMILIES_HERE = [family for family in FAMILIES if family not in ("gemma2", "granite", "cohere", "phi3")]


@pytest.mark.parametrize("name", BATCHES)
def test_scores_and_gradients_equal_those_of_separate_rows(name):
    check("llama", BATCHES[name], OPTIONS)


@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_every_family(family):
    check(family, BATCHES["turns"], [{"chunk_size": 7, "keep": "input"}])


@more
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_every_family_and_batch(family, name):
    check(family, BATCHES[name], OPTIONS)


@pytest.mark.parametrize("name", ["four completions", "turns"])
def test_adapters(name):
    check("qwen3", BATCHES[name], OPTIONS, lora=True)


@pytest.fixture(params=[90, trees.PAIRS], ids=lambda pairs: f"pairs{pairs}")
def joined(request, monkeypatch):
    """Let small rectangles be segments of one varlen part, as FlashAttention takes them; what is small varies."""
    monkeypatch.setattr(EagerBackend, "joins_segments", True)
    monkeypatch.setattr(trees, "PAIRS", request.param)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_rectangles_in_one_varlen_part(joined, family):
    """With a sliding window, too, which mistral has."""
    check(family, BATCHES["turns"], [{"chunk_size": size, "keep": "input", "attention": "eager"} for size in (7, 100)])


@more
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_rectangles_of_every_family_in_one_varlen_part(joined, family, name):
    check(family, BATCHES[name], [option | {"attention": "eager"} for option in OPTIONS])


def test_kernel_calls_do_not_grow_with_the_group(joined, monkeypatch):
    """A layer's attention is one call where all is small; else one for what is, one for the prompt and one for what sees it."""
    calls = Counter()
    forward, backward = streamed.run_or_replace, streamed.differentiate_or_replace
    for plain in (forward, backward):

        def counted(*args, plain=plain):
            calls[plain] += 1
            return plain(*args)

        monkeypatch.setattr(streamed, plain.__name__, counted)
    for completions in (2, 8):
        model = streamgrad.enable(tiny_model("llama"), chunk_size=1000, keep="attention", attention="eager")
        found = streamgrad.share_prefixes(**batch_of(*group(5, [9] * completions)))
        found.hidden_states(model)  # in which the model is tried on a few tokens
        calls.clear()
        found.hidden_states(model).sum().backward()
        assert calls[forward] == calls[backward] <= 2 * (1 if trees.PAIRS > 90 else 3), completions  # in two layers


@pytest.mark.parametrize(
    "family", ["qwen3", "mistral", pytest.param("qwen3_moe", marks=more), pytest.param("gemma3_text", marks=more)]
)
def test_shared_rows_of_a_plain_pass(monkeypatch, family):
    """Where every layer keeps its whole graph, the model's own layers run, with streamed attention."""
    count, run = [], decoder.run_layer
    check(family, BATCHES["turns"], [{"keep": "all"}], lora=family == "qwen3")
    monkeypatch.setattr(decoder, "run_layer", lambda call, h_BTE: count.append(torch.is_grad_enabled()) or run(call, h_BTE))
    check(family, BATCHES["four completions"], [{"keep": "all"}])
    assert count and not any(count)  # but for the trial


def test_rows_padded_at_the_left():
    """Equal prompts are at other positions there. The angles of rotary embeddings are rounded to float32, at each position."""
    batch = batch_of(*group(5, [3, 2, 7, 1]), side="left")
    assert streamgrad.share_prefixes(**batch).input_ids.shape == (1, 18)
    check("llama", batch, OPTIONS, tolerance=1e-6)


def test_each_beginning_is_computed_once():
    rows, prompts = group(40, [5, 0, 9, 1, 30])
    model, seen = streamgrad.enable(tiny_model("llama"), chunk_size=16), []
    found = streamgrad.share_prefixes(**batch_of(rows, prompts))
    model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[:2].numel()))
    with torch.no_grad():
        found.hidden_states(model)
        seen.clear()  # as layers are tried out in the first call
        found.hidden_states(model)
    assert found.input_ids.shape == (1, 40 + 45)
    assert sum(seen) == 40 + 45


@pytest.mark.parametrize(("keep", "forwards"), [("input", 2), ("attention", 1)])
@pytest.mark.parametrize("chunk_size", [64, 100, 1000])
def test_attention_is_that_of_the_visible_pairs(monkeypatch, chunk_size, keep, forwards):
    """Counted in the kernels' calls; and nothing has a row for each query of a chunk and a column for each key."""
    prompt, completions = 300, [100, 70, 130, 90]
    model, found = tiny_model("llama"), streamgrad.share_prefixes(**batch_of(*group(prompt, completions)))
    streamgrad.enable(model, chunk_size=chunk_size, head_chunk_size=16, keep=keep, attention="sdpa")
    pairs = Counter()
    for name, plain in (("forward", SdpaBackend.forward), ("backward", SdpaBackend.backward)):

        def counted(self, *args, plain=plain, name=name):
            query, key, *_, block = args if name == "forward" else args[1:]
            queries, keys = query.shape[2], key.shape[2]
            assert block.mask is None and block.window is None
            pairs[name] += queries * keys - (queries * (queries - 1) // 2 if block.causal else 0)
            return plain(self, *args)

        monkeypatch.setattr(SdpaBackend, name, counted)
    found.hidden_states(model)  # in which the model is tried on a few tokens
    pairs.clear()
    with Shapes() as shapes:
        found.hidden_states(model).sum().backward()

    def visible(tokens: int) -> int:
        return tokens * (tokens + 1) // 2

    seen = visible(prompt) + sum(visible(prompt + own) - visible(prompt) for own in completions)
    assert pairs == {"forward": 2 * forwards * seen, "backward": 2 * seen}  # in two layers
    assert not [shape for shape in shapes.made if len(shape) > 1 and min(shape[-2:]) >= 64]


@pytest.mark.parametrize(
    ("prompt", "completion", "rows", "width", "saves"),
    [(250, 1000, 2, 2560, True), (250, 1000, 8, 2560, True), (100, 300, 2, 2560, False), (2000, 500, 2, 896, False)],
)
def test_sharing_saves_time_unless_launches_decide(prompt, completion, rows, width, saves):
    """Trainers compute rows one by one then. On a CPU, fewer tokens always save time, and none save none."""
    found = streamgrad.share_prefixes(**batch_of(*group(prompt, [completion] * rows)))
    assert found.saves_time(width, torch.device("cuda")) == saves
    assert found.saves_time(width, torch.device("cpu"))
    alone = streamgrad.share_prefixes(**BATCHES["nothing in common"])
    assert not alone.saves_time(width, torch.device("cpu")) and not alone.saves_time(10**6, torch.device("cuda"))


def test_turns_are_found_by_their_tokens():
    found = streamgrad.share_prefixes(**BATCHES["turns"])
    assert found.tree.ends == (23, 40, 45, 48, 57, 67)
    assert found.tree.parents == (-1, 0, 1, 1, 0, -1)


def test_no_completion_mask_scores_every_token_but_the_first():
    rows, prompts = group(30, [4, 6])
    batch = batch_of(rows, prompts)
    del batch["completion_mask"]
    found = streamgrad.share_prefixes(**batch)
    assert found.mask.sum() == 33 + 35
    assert found.input_ids.shape == (1, 40)


# --- what cannot be shared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: tiny_model("llama", attention_dropout=0.1), "dropout is on"),
        (lambda: with_lora(tiny_model("llama"), dropout=0.1), "dropout is on"),
        (
            lambda: tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "follow the length",
        ),
    ],
)
def test_what_cannot_be_shared_is_said(model, told):
    enabled = streamgrad.enable(model())
    with pytest.raises(ValueError, match=told):
        streamgrad.share_prefixes(**BATCHES["turns"]).hidden_states(enabled)


def test_a_model_must_be_enabled():
    with pytest.raises(ValueError, match=r"Call streamgrad.enable\(model\) first"):
        streamgrad.share_prefixes(**BATCHES["turns"]).hidden_states(tiny_model("llama"))


def test_gaps_in_a_row_are_refused():
    batch = BATCHES["four completions"]
    mask = batch["attention_mask"].clone()
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="hides tokens between others"):
        streamgrad.share_prefixes(batch["input_ids"], mask, batch["completion_mask"])
    with pytest.raises(ValueError, match="none of the tokens of a batch of shape"):
        streamgrad.share_prefixes(batch["input_ids"], torch.zeros_like(mask))
    with pytest.raises(ValueError, match="completion_mask has shape"):
        streamgrad.share_prefixes(batch["input_ids"], mask, mask[:, 1:])


def test_dropout_of_attention_is_refused_in_the_row_itself():
    """Beneath what `hidden_states` refuses: attention in several pieces has no one mask of what is dropped."""
    model, found = streamgrad.enable(tiny_model("llama", attention_dropout=0.1)), streamgrad.share_prefixes(**BATCHES["turns"])
    with found.streamed(model), pytest.raises(ValueError, match="attention dropout is on, and its sequences share"):
        model.model(input_ids=found.input_ids, position_ids=found.position_ids, use_cache=False)
