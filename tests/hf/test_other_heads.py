"""Models that are no causal language models: classifiers, reward models, embedding models and value heads, as exact as those."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

import batches
import streamgrad
from gradients import assert_same_step, more, no_float32, run_step
from lora import with_lora
from streamgrad.hf.discover import unwrap
from tiny import FAMILIES, tiny_config, tiny_model

CHUNKS = (1, 7, 64)
PADDING = {"right": batches.right_padded, "left": batches.left_padded}


class ValueHead(nn.Module):
    """A language model with a value for every token, as for PPO. TRL 1.16 has no such class, so this is the usual one."""

    def __init__(self, pretrained_model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = pretrained_model
        torch.manual_seed(3)
        self.v_head = nn.Linear(pretrained_model.config.hidden_size, 1, dtype=torch.float64)

    def forward(self, **inputs) -> tuple[Tensor, Tensor]:
        outputs = self.pretrained_model(**inputs, output_hidden_states=True)
        return outputs.logits, self.v_head(outputs.hidden_states[-1]).squeeze(-1)


def classes_of_rows(model, batch: dict) -> Tensor:
    return model(**batch | {"labels": torch.tensor([2, 0, 1])}).loss


def classes_of_tokens(model, batch: dict) -> Tensor:
    """These heads have dropout, which draws what it would in the stock model: streamed layers without dropout draw nothing."""
    torch.manual_seed(5)
    labels = batch["labels"]
    return model(**batch | {"labels": (labels % 3).masked_fill(labels == -100, -100)}).loss


def preferred_rows(model, batch: dict) -> Tensor:
    """The loss of a reward model: the first row is better than the second, and that than the third."""
    rewards = model(**without_labels(batch)).logits.squeeze(-1)
    return -F.logsigmoid(rewards[:-1] - rewards[1:] - 0.1).mean()


def contrasted_rows(model, batch: dict) -> Tensor:
    """A contrastive loss of mean-pooled embeddings: rows are to resemble themselves turned around, in two calls."""
    first, second = (embedded(model, each) for each in (without_labels(batch), backwards(without_labels(batch))))
    return F.cross_entropy(first @ second.T / 0.3, torch.arange(len(first)))


def last_tokens(model, batch: dict) -> Tensor:
    """A contrastive loss of the last token's embedding, in the first row's direction."""
    mask = batch["attention_mask"]
    ends = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    hidden = model(**without_labels(batch)).last_hidden_state[torch.arange(len(mask)), ends]
    return F.cosine_similarity(hidden[:1], hidden[1:]).sum()


def values_and_logits(model, batch: dict) -> Tensor:
    """A policy's and a value's loss at once, on logits and on the last hidden state of one call."""
    logits, values = model(**without_labels(batch))
    real = batch["labels"] != -100
    return (values - 0.5)[real].square().mean() + F.cross_entropy(
        logits[:, :-1][real[:, 1:]], batch["labels"][:, 1:][real[:, 1:]]
    )


def without_labels(batch: dict) -> dict:
    return {name: value for name, value in batch.items() if name != "labels"}


def backwards(batch: dict) -> dict:
    return {name: value.flip(1) for name, value in batch.items()}


def embedded(model, batch: dict) -> Tensor:
    mask = batch["attention_mask"].unsqueeze(-1)
    hidden = model(**batch).last_hidden_state
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


# The class, its loss, and the head that LoRA trains along.
HEADS = {
    "sequence classification": (AutoModelForSequenceClassification, classes_of_rows, "score"),
    "token classification": (AutoModelForTokenClassification, classes_of_tokens, "score"),
    "reward": (AutoModelForSequenceClassification, preferred_rows, "score"),
    "embedding, mean": (AutoModel, contrasted_rows, None),
    "embedding, last token": (AutoModel, last_tokens, None),
    "value": (None, values_and_logits, None),
}


def build(name: str, family: str, method: str) -> nn.Module:
    kind, _, head = HEADS[name]
    if kind is None:
        model = tiny_model(family)
        return ValueHead(with_lora(model) if method == "lora" else model)
    model = tiny_model(family, kind=kind, num_labels=1 if name == "reward" else 3)
    return with_lora(model, modules_to_save=[head] if head else None) if method == "lora" else model


def assert_exact(name: str, family: str, method: str, chunk_size: int, padding: str = "right") -> None:
    stock, model = (build(name, family, method) for _ in range(2))
    inner = getattr(model, "pretrained_model", model)
    streamgrad.enable(inner, chunk_size=chunk_size)
    lengths: set[int] = set()
    mlp = unwrap(inner).get_decoder().layers[0].mlp
    counting = mlp.register_forward_pre_hook(lambda _, args: lengths.add(args[0].shape[1]))
    batch = PADDING[padding](inner)
    with no_float32():
        ours, theirs = (run_step(each, batch, forward=HEADS[name][1]) for each in (model, stock))
        assert_same_step(ours, theirs, 1e-10)
        assert min(chunk_size, batches.LENGTH) in lengths, "not streamed"
        counting.remove()
        head = [gradient for path, gradient in theirs.gradients.items() if ("score" in path or "v_head" in path)]
        assert not head or any(gradient is not None for gradient in head)
        # And as it was, once it is disabled.
        streamgrad.disable(inner)
        assert torch.equal(run_step(model, batch, forward=HEADS[name][1]).loss, theirs.loss)


@pytest.mark.parametrize("chunk_size", CHUNKS)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("name", HEADS)
def test_heads(name, method, chunk_size):
    assert_exact(name, "llama", method, chunk_size)


@pytest.mark.parametrize("name", HEADS)
def test_left_padding(name):
    assert_exact(name, "mistral", "full", 7, "left")


def has_head(family: str, kind: type) -> bool:
    return kind is None or type(tiny_config(family)) in kind._model_mapping


@more
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", HEADS)
def test_families(name, family):
    if not has_head(family, HEADS[name][0]):
        pytest.skip(f"transformers has no such {family}")
    assert_exact(name, family, "full", 7)


def test_a_wrapper_of_your_own_is_named():
    """The model inside is what is enabled."""
    wrapper = ValueHead(tiny_model("llama"))
    with pytest.raises(TypeError, match="model is a ValueHead.* Pass a transformers.PreTrainedModel"):
        streamgrad.enable(wrapper)
