"""`outputs.logits` while a head is streamed: every use says why there are none, and what walks over outputs works."""

from __future__ import annotations

import copy
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.utils.operations import convert_outputs_to_fp32
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

import batches
import streamgrad
from gradients import Step, assert_same_step, no_float32, run_step
from streamgrad.hf.unusable import NoCache, NoLogits
from tiny import tiny_model, tokens

OPTIONS = {"chunk_size": 7, "head_chunk_size": 5}

USES = {
    "method": lambda logits: logits.argmax(-1),
    "attribute": lambda logits: logits.shape,
    "function": lambda logits: torch.argmax(logits, -1),
    "functional": lambda logits: torch.nn.functional.cross_entropy(logits, torch.zeros(3)),
    "other operand": lambda logits: torch.add(torch.zeros(3), logits),
    "on the right": lambda logits: torch.zeros(3) * logits,
    "on the left": lambda logits: logits / 2.0,
    "index": lambda logits: logits[..., :-1, :],
    "assignment": lambda logits: operator.setitem(logits, 0, 1.0),
    "length": len,
    "iteration": list,
    "unpacking": lambda logits: [*logits],
    "truth": bool,
    "float": float,
    "numpy": np.asarray,
    "tensor": torch.as_tensor,
    "equality": lambda logits: logits == torch.zeros(3),
    "membership": lambda logits: 3 in logits,
}


@pytest.fixture(scope="module")
def outputs():
    model = streamgrad.enable(tiny_model("llama"), **OPTIONS)
    return model(**batches.plain(model))


@pytest.mark.parametrize("use", USES)
def test_any_use_says_what_to_do(outputs, use):
    with pytest.raises((AttributeError, TypeError), match=r"streamgrad makes no logits.*no_grad.*streamgrad\.token_logprobs"):
        USES[use](outputs.logits)


def test_a_tuple_keeps_the_place_of_the_logits():
    """So that what follows them stands where it does in a stock model's."""
    stock = tiny_model("llama")
    batch = batches.plain(stock) | {"return_dict": False, "output_hidden_states": True, "use_cache": False}
    expected = stock(**batch)
    output = streamgrad.enable(stock, **OPTIONS)(**batch)
    assert output[0].requires_grad and isinstance(output[1], NoLogits)
    assert len(output) == len(expected) and len(output[2]) == len(expected[2])


def test_outputs_are_shown_copied_and_stored(outputs):
    assert "no logits" in repr(outputs)
    assert outputs[0] is outputs.loss and outputs[1] is outputs.logits and isinstance(outputs[2], NoCache) and len(outputs) == 3
    detached = type(outputs)(loss=outputs.loss.detach(), logits=outputs.logits, past_key_values=outputs.past_key_values)
    for copied in (copy.copy(detached), copy.deepcopy(detached), pickle.loads(pickle.dumps(detached))):
        assert torch.equal(copied.loss, detached.loss) and isinstance(copied.logits, NoLogits)


def test_mixed_precision_of_accelerate():
    model = streamgrad.enable(tiny_model("llama", dtype=torch.bfloat16), **OPTIONS)
    output = convert_outputs_to_fp32(model.forward)(**batches.plain(model))
    assert output.loss.dtype == torch.float32 and isinstance(output.logits, NoLogits)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_ddp(options):
    stock, model = tiny_model("llama"), streamgrad.enable(tiny_model("llama"), **OPTIONS)
    batch = batches.plain(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model, **options)
        with no_float32():
            step = run_step(wrapped, batch)
            actual = Step(step.loss, {name.removeprefix("module."): grad for name, grad in step.gradients.items()})
            assert_same_step(actual, run_step(stock, batch), 1e-10)
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")  # torch's data loader, on a machine without an accelerator
def test_metrics_of_trainer_get_logits(tmp_path):
    """Between training steps, evaluation runs without gradients, where logits are made."""
    data = [{"input_ids": tokens(1, 20, seed=i)[0], "labels": tokens(1, 20, seed=i)[0]} for i in range(4)]
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    model = streamgrad.enable(tiny_model("llama", use_cache=False), **OPTIONS)
    Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, compute_metrics=metrics).train()
    assert shapes == [(4, 20, 61), (4, 20, 61)]
