"""`streamgrad.status`, and the one line in the log by which a run says that it is streamed."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import streamgrad
from streamgrad.hf.status import _later, note_optimizer, show_messages
from tiny import tiny_model, tokens


@pytest.fixture
def model():
    return tiny_model("qwen3")


def step(model, rows: int = 2, length: int = 13) -> None:
    ids = tokens(rows, length)
    model(input_ids=ids, labels=ids).loss.backward()


def test_before_enable_after_it_and_after_a_step(model):
    assert str(streamgrad.status(model)) == "Qwen3ForCausalLM is not streamed. Call streamgrad.enable(model)."
    streamgrad.enable(model, chunk_size=5)
    assert "it has had none yet" in str(streamgrad.status(model))
    step(model)
    seen = streamgrad.status(model)
    assert (seen.rows, seen.tokens, seen.kernels) == (2, 13, ("sdpa",))
    assert seen.plan is not None and set(seen.plan.chunk_sizes) == {5} and seen.expected_peak_bytes is None
    text = str(seen)
    assert "2 x 13 tokens in 3 chunks of at most 5" in text and "each of 2 layers keeps its input" in text
    assert "only a memory_budget plans one" in text and "of the whole process" in text
    assert seen.peak_bytes > sum(parameter.nbytes for parameter in model.parameters())
    streamgrad.disable(model)
    assert streamgrad.status(model).config is None


def test_a_budget_gives_an_expected_peak_and_the_kernels_are_those_that_ran(model):
    streamgrad.enable(model, memory_budget="50MiB", attention="eager")
    step(model, 1, 7)
    seen = streamgrad.status(model)
    assert 0 < seen.expected_peak_bytes < 50 * 2**20 and seen.kernels == ("eager",)
    assert "1 chunk of at most 7" in str(seen) and "expected peak  0." in str(seen)
    on_gpu = replace(seen, device="cuda:0", optimizer="AdamW")
    assert _later(on_gpu, "AdamW") == "; later steps are planned with the states that the optimizer has by then"
    for other in (replace(on_gpu, optimizer="AdamW in backward"), replace(on_gpu, device="cpu"), replace(on_gpu, plan=None)):
        assert _later(other, "AdamW") == ""


def test_layers_that_are_recomputed_keep_nothing():
    model, ids = tiny_model("llama", num_hidden_layers=4), tokens(1, 9)
    streamgrad.enable(model, chunk_size=4, recompute_layers=2)
    model(input_ids=ids, labels=ids).loss.backward()
    told = str(streamgrad.status(model))
    assert "each of 2 layers keeps its input, 2 keep nothing and have their input made again" in told


def test_an_optimizer_in_backward_is_named(model):
    streamgrad.enable(model, chunk_size=5)
    streamgrad.optimizer_in_backward(model, torch.optim.SGD, lr=1e-2)
    step(model)
    seen = streamgrad.status(model)
    assert "; optimizer SGD in backward; expected peak" in seen.first_line and "optimizer      SGD in backward" in str(seen)


def test_what_is_no_model_is_named():
    with pytest.raises(TypeError, match="model is a Linear"):
        streamgrad.status(torch.nn.Linear(2, 2))


def test_the_first_step_with_gradients_is_logged_once(model, caplog):
    caplog.set_level(logging.INFO, logger="streamgrad")
    streamgrad.enable(model, chunk_size=5)
    with torch.no_grad():
        model(input_ids=tokens(2, 13), use_cache=False)
    assert not caplog.records
    step(model)
    step(model, 1, 6)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        "streamgrad: Qwen3Model is streamed: 2 x 13 tokens in 3 chunks of at most 5; each of 2 layers keeps its input; attention "
        "by sdpa; expected peak unknown: on cpu, only a memory_budget plans one"
    )


@pytest.mark.parametrize("level", [logging.NOTSET, logging.WARNING])
def test_messages_are_shown_unless_the_user_has_set_a_level(monkeypatch, level, capsys):
    logger = logging.getLogger("streamgrad")
    monkeypatch.setattr(logger, "level", level)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", False)  # pytest has handlers above
    logger.manager._clear_cache()
    show_messages()
    show_messages()
    logger.info("streamgrad: a line")
    monkeypatch.undo()
    logger.manager._clear_cache()
    assert capsys.readouterr().err == ("streamgrad: a line\n" if level == logging.NOTSET else "")


@pytest.mark.parametrize(("bits", "said"), [(8, "AdamW in 8 bits"), (32, "AdamW")])
def test_an_optimizer_of_bitsandbytes_says_its_bits(model, bits, said):
    """As its classes do, which have one name in 8 and in 32 bits; Accelerate has wrapped it."""
    streamgrad.enable(model)
    optimizer = type("AdamW", (), {"args": SimpleNamespace(optim_bits=bits)})()
    note_optimizer(model, SimpleNamespace(optimizer=optimizer))
    step(model)
    assert f"; optimizer {said}; " in streamgrad.status(model).first_line
