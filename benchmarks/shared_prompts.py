"""Measures a GRPO or DPO step whose rows have one prompt: computed once, computed in every row, and by a peer.

A step is forward and backward of the policy over `group` completions, for DPO with the reference's forward pass. Rewards fall row
by row. The peer does what TRL's trainers do: Liger's kernels, transformers' checkpointing and TRL's own head, which scores
completions alone. It takes one row at a time for GRPO.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import streamgrad
from benchmarks.lengths import ballast_of_missing_layers
from benchmarks.peers import add_trl_head, apply_liger
from benchmarks.records import versions
from streamgrad.cli.bench_run import device_name, median_ms
from streamgrad.engine.shortage import is_out_of_memory
from streamgrad.hf.configs import preset_config, preset_model
from streamgrad.memory.live_bytes import peak_bytes_of
from streamgrad.objectives import dpo_loss, grpo_loss

METHODS = ("shared", "separate", "trl")
OBJECTIVES = ("grpo", "dpo")


@dataclass(frozen=True, kw_only=True)
class SharedRecord:
    """Records one method at one shape; measurements are None where `error` says why. `tokens` go through the policy's layers.

    `peak_bytes` are above weights and gradients. `keep` is what streamgrad was told to keep, where "input" keeps it on the
    device. Under a limit, `ballast_bytes` stand for the layers that were not built.
    """

    benchmark: str = "shared-prompts"
    method: str
    model: str
    objective: str
    prompt_tokens: int
    completion_tokens: int
    group: int
    layers: int
    keep: str
    limit_bytes: int | None
    ballast_bytes: int
    tokens: int
    step_ms: float | None
    peak_bytes: int | None
    error: str | None
    device: str
    versions: dict[str, str]
    command: str


def measure_shared_prompts(
    *,
    model: str,
    shapes: Sequence[tuple[str, int, int, int]],
    methods: Sequence[str],
    keep: str,
    limit_bytes: int | None,
    runs: int,
    layers: int | None,
    device: torch.device,
    command: str,
) -> Iterator[SharedRecord]:
    """Yield the record of every method at every (objective, prompt tokens, completion tokens, group)."""
    if limit_bytes is not None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / torch.cuda.get_device_properties(device).total_memory)
    for method in methods:
        torch.manual_seed(0)
        if method == "trl":
            apply_liger(preset_config(model).model_type, fused_loss=False)
        policy = preset_model(model, device=device, layers=layers)
        for objective, prompt, completion, group in shapes:
            reference = copy.deepcopy(policy).requires_grad_(False) if objective == "dpo" else None
            for network in filter(None, (policy, reference)):
                _prepare(method, network, keep)
            ids_BT = _rows(prompt, completion, group, policy.config.vocab_size).to(device)
            tokens = prompt + group * completion if method == "shared" else group * (prompt + completion)
            ballast = ballast_of_missing_layers(model, offload="none", has_copy=objective == "dpo")
            held_bytes = 0 if limit_bytes is None else ballast(policy, tokens)
            step = _step(method, objective, policy, reference, ids_BT, prompt)
            step_ms, peak_bytes, error = _measured(step, runs, device, held_bytes)
            yield SharedRecord(
                method=method, model=model, objective=objective, prompt_tokens=prompt, completion_tokens=completion,
                group=group, layers=policy.config.num_hidden_layers, keep=keep, limit_bytes=limit_bytes,
                ballast_bytes=held_bytes, tokens=tokens, step_ms=step_ms, peak_bytes=peak_bytes, error=error,
                device=device_name(device), versions=versions("transformers", "trl", "liger-kernel", "triton"), command=command,
            )  # fmt: skip
            policy.zero_grad(set_to_none=True)
            del reference, step
            _free(device)
        del policy
        _free(device)


def _prepare(method: str, network: Any, keep: str) -> None:
    if method == "trl":
        network.gradient_checkpointing_enable()
        add_trl_head(network)
    else:
        streamgrad.enable(network, keep=keep, offload="none" if keep == "input" else "auto")


def _rows(prompt: int, completion: int, group: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(vocabulary, (1, prompt), generator=generator)
    rest = torch.randint(vocabulary, (group, completion), generator=generator)
    return torch.cat([start.expand(group, -1), rest], dim=1)


def _step(method: str, objective: str, policy: Any, reference: Any, ids_BT: Tensor, prompt: int) -> Callable[[], None]:
    """Return a function that runs one step and drops its gradients first."""
    completion_mask = torch.zeros_like(ids_BT)
    completion_mask[:, prompt:] = 1
    score = {"shared": _shared_scores, "separate": _separate_scores, "trl": _trl_scores}[method]

    def step() -> None:
        policy.zero_grad(set_to_none=True)
        expected = None
        if reference is not None:
            with torch.no_grad():
                expected = score(reference, ids_BT, completion_mask)
        if (method, objective) == ("trl", "grpo"):  # a sum over rows, so that each is a step of its own
            for row in range(len(ids_BT)):
                scores = score(policy, ids_BT[row : row + 1], completion_mask[row : row + 1])
                (_loss(objective, scores, None, len(ids_BT), row) / len(ids_BT)).backward()
        else:
            _loss(objective, score(policy, ids_BT, completion_mask), expected, len(ids_BT), 0).backward()

    return step


def _shared_scores(network: Any, ids_BT: Tensor, completion_mask: Tensor) -> Tensor:
    shared = streamgrad.share_prefixes(ids_BT, None, completion_mask)
    scores: Any = streamgrad.token_logprobs(shared.hidden_states(network), network.lm_head.weight, shared.targets)
    return shared.unshared(scores)[:, -int(completion_mask[0].sum()) :]


def _separate_scores(network: Any, ids_BT: Tensor, completion_mask: Tensor) -> Tensor:
    count = int(completion_mask[0].sum())
    hidden_BTE = network.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state[:, -count - 1 : -1]
    scores: Any = streamgrad.token_logprobs(hidden_BTE, network.lm_head.weight, ids_BT[:, -count:])
    return scores


def _trl_scores(network: Any, ids_BT: Tensor, completion_mask: Tensor) -> Tensor:
    labels_BT = ids_BT.masked_fill(completion_mask == 0, -100)
    scores: Any = network(input_ids=ids_BT, labels=labels_BT, fused_lm_head=True).log_probs
    return scores[:, -int(completion_mask[0].sum()) :]


def _loss(objective: str, logprobs_BT: Tensor, reference_BT: Tensor | None, group: int, first: int) -> Tensor:
    mask_BT = torch.ones_like(logprobs_BT, dtype=torch.bool)
    if objective == "grpo":
        advantages_B = torch.linspace(1.0, -1.0, group, device=logprobs_BT.device)[first : first + len(logprobs_BT)]
        return grpo_loss(logprobs_BT, advantages_B, mask_BT, loss_type="grpo")
    assert reference_BT is not None
    (chosen, rejected), (ref_chosen, ref_rejected) = logprobs_BT.chunk(2), reference_BT.chunk(2)
    return dpo_loss(chosen, rejected, ref_chosen, ref_rejected, mask_BT[: group // 2], mask_BT[: group // 2])


def _measured(
    step: Callable[[], None], runs: int, device: torch.device, held_bytes: int
) -> tuple[float | None, int | None, str | None]:
    try:
        ballast = torch.empty(held_bytes, dtype=torch.uint8, device=device)
        for _ in range(4 if device.type == "cuda" else 1):
            step()  # what libraries set up at their first uses, cuDNN's plans among it, is no part of a step
        peak_bytes = peak_bytes_of(step, device)[1] + ballast.nbytes
        return median_ms(step, device, runs), peak_bytes, None
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
    return None, None, "out of memory"


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
