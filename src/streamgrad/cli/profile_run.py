"""Records the steps of `streamgrad profile`: one with gradient checkpointing and one streamed, on a model or a tiny one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from streamgrad.cli.bench_run import checkpointing, measured_model, random_ids, streamed
from streamgrad.hf.presets import check_found
from streamgrad.profile.snapshot import recorder_for
from streamgrad.profile.timeline import Timeline

CHECKPOINTING, STREAMED = "gradient checkpointing", "streamgrad"


def profiled_model(name: str, layers: int | None, device: torch.device) -> PreTrainedModel:
    """Return a preset, the model of a directory, or a tiny one.

    The latter has the proportions of a real one: its vocabulary is several times as wide as the MLP.
    """
    if name != "tiny":
        check_found(name)
        return measured_model(name, layers, device)
    if layers is not None:
        raise ValueError("--layers is for --model with a preset or a directory; the tiny model has its 4. Leave it out.")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=1500, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1 << 20, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).train().to(device)


def record_both(model: PreTrainedModel, tokens: int, device: torch.device, **options: Any) -> dict[str, Timeline]:
    """Record the same step twice, on random tokens. The model is left as it was found.

    `options` are those of `streamgrad.enable`.
    """
    ids, timelines = random_ids(model, tokens, device), dict[str, Timeline]()
    with checkpointing(model):
        timelines[CHECKPOINTING] = record(model, ids)
    with streamed(model, **options):
        timelines[STREAMED] = record(model, ids)
    return timelines


def record(model: PreTrainedModel, ids: Tensor) -> Timeline:
    """Record one forward and backward with labels. The model starts and ends without gradients."""
    model.zero_grad(set_to_none=True)
    # What libraries set up at their first use, and the trial of layers, are no part of a step.
    model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    with recorder_for(model, ids.numel()) as recorder:
        loss = model(input_ids=ids, labels=ids).loss
        recorder.backward_begins()
        loss.backward()
    timeline = recorder.timeline()
    model.zero_grad(set_to_none=True)
    return timeline
