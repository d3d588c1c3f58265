"""What streaming cannot do for a call is said once: full logits made beside it, and a torch.compile that it passes over."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

import batches
import streamgrad
from gradients import Step, assert_same_step, no_float32, run_step
from tiny import VOCABULARY, tiny_model, tokens

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}
LOGITS = "made the logits of all"


def warnings_of(call, kind: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if kind in str(each.message)]


@pytest.fixture
def model():
    return streamgrad.enable(tiny_model("llama"), **OPTIONS)


# --- full logits ----------------------------------------------------------------------------------------------------------


def test_full_logits_are_announced_once_with_their_bytes(model):
    ids = tokens(2, 23)
    (text,) = warnings_of(lambda: [model(input_ids=ids), model(input_ids=ids)], LOGITS)
    assert f"46 tokens, {46 * VOCABULARY * 8:,} bytes" in text and "token_logprobs" in text and "without labels" in text


def test_other_calls_are_not_announced(model):
    def calls():
        model(input_ids=tokens(2, 23), logits_to_keep=1)
        model(**batches.plain(model))
        with torch.no_grad():
            model(input_ids=tokens(2, 23))

    assert not warnings_of(calls, LOGITS)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # torch's data loader, on a machine without an accelerator
@pytest.mark.parametrize("way", ["label_smoothing_factor", "compute_loss_func"])
def test_losses_of_trainer_that_need_logits(model, tmp_path, way):
    def own_loss(outputs, labels, num_items_in_batch=None):
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    data = [{"input_ids": tokens(1, 20, seed=i)[0], "labels": tokens(1, 20, seed=i)[0]} for i in range(4)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, label_smoothing_factor=0.1 if way == "label_smoothing_factor" else 0.0,
    )  # fmt: skip
    own = own_loss if way == "compute_loss_func" else None
    trainer = Trainer(model=model, args=arguments, train_dataset=data, compute_loss_func=own)
    (text,) = warnings_of(trainer.train, LOGITS)
    assert way in text


# --- torch.compile --------------------------------------------------------------------------------------------------------


def in_place(place):
    def compiled(model, backend):
        model.get_submodule(place).compile(backend=backend)
        return model

    return compiled


COMPILED = {
    "wrapped": lambda model, backend: torch.compile(model, backend=backend),
    "in a function": lambda model, backend: torch.compile(lambda **batch: model(**batch), backend=backend),
    "model": in_place(""),
    "decoder": in_place("model"),
    "layer": in_place("model.layers.0"),
    "head": in_place("lm_head"),
}


@pytest.mark.parametrize("enabled_first", [True, False])
@pytest.mark.parametrize("place", COMPILED)
def test_a_compiled_model_is_run_as_it_is(place, enabled_first):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = tiny_model("llama")
    batch = batches.plain(model)
    with no_float32():
        expected = run_step(model, batch)
        if enabled_first:
            streamgrad.enable(model, **OPTIONS)
        call = COMPILED[place](model, backend)
        streamgrad.enable(model, **OPTIONS)
        model.zero_grad()
        losses = []
        texts = warnings_of(lambda: losses.extend(call(**batch).loss for _ in range(2)), "torch.compile")
        losses[0].backward()
    assert len(texts) == 1 and re.search(r"torch\.compile of \w+ is passed over.*fused_kernels", texts[0])
    assert not graphs
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_same_step(Step(losses[0].detach(), gradients), expected, 1e-10)


def test_wrapped_layers_are_refused():
    model = tiny_model("llama")
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    with pytest.raises(ValueError, match=r"wrapped by torch\.compile; leave that out"):
        streamgrad.enable(model)
