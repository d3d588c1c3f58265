"""Computes the loss of one training step of each objective, reference pass included, without a trainer.

All tokens count, as if prompts were empty: the most that an objective can ask for at a length. The reference is a frozen copy of
the model where all weights are trained, and the model with its adapters switched off where those are (pass None).

Shapes: B sequences, T tokens, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from streamgrad.head.token_scores import token_scores
from streamgrad.hf.patching import InstalledForward
from streamgrad.hf.step_facts import head_known_to_decoder
from streamgrad.objectives import dpo_loss, grpo_loss

# TRL's default weights of the reference, but for GRPO's, which is 0 there and leaves the reference out.
DPO_BETA, GRPO_BETA = 0.1, 0.04
# Sequences of one step: a pair, and the completions that the paper samples of a prompt.
ROWS = {"sft": 1, "dpo": 2, "grpo": 8}


def sft(network: Any, ids_BT: Tensor, reference: Any = None) -> Tensor:
    """Return the model's own loss."""
    return network(input_ids=ids_BT, labels=ids_BT).loss


def dpo(network: Any, ids_BT: Tensor, reference: Any) -> Tensor:
    """Return the loss of pairs: the first half of the rows are chosen answers, the other half rejected ones."""
    with torch.no_grad():
        ref_w, ref_l = _reference_logprobs(network, ids_BT, reference).chunk(2)
    logps_w, logps_l = token_logprobs_of(network, ids_BT).chunk(2)
    mask_BT = torch.ones_like(logps_w, dtype=torch.bool)
    return dpo_loss(logps_w, logps_l, ref_w, ref_l, mask_BT, mask_BT, beta=DPO_BETA)


def grpo(network: Any, ids_BT: Tensor, reference: Any) -> Tensor:
    """Return the loss of completions that this policy has sampled, with the KL to the reference. Rewards fall row by row."""
    with torch.no_grad():
        ref_BT = _reference_logprobs(network, ids_BT, reference)
    logprobs_BT = token_logprobs_of(network, ids_BT)
    advantages_B = torch.linspace(1.0, -1.0, len(ids_BT), device=ids_BT.device)
    mask_BT = torch.ones_like(logprobs_BT, dtype=torch.bool)
    return grpo_loss(logprobs_BT, advantages_B, mask_BT, ref_logprobs=ref_BT, beta=GRPO_BETA)


OBJECTIVES: dict[str, Callable[[Any, Tensor, Any], Tensor]] = {"sft": sft, "dpo": dpo, "grpo": grpo}


def token_logprobs_of(network: Any, ids_BT: Tensor) -> Tensor:
    """Return (B, T - 1) log-probabilities of the tokens after the first, by an enabled model."""
    installed = InstalledForward.on(network)
    assert installed is not None, "tokens are scored by enabled models"
    head, stream = network.get_output_embeddings(), installed.stream
    # The last position predicts nothing. Cutting the hidden states instead would copy them.
    targets_BT = F.pad(ids_BT[:, 1:], (0, 1), value=-100)
    with head_known_to_decoder(network, head, tokens=ids_BT.numel(), config=stream.config) as weight:
        hidden_BTE = network.get_decoder()(input_ids=ids_BT, use_cache=False).last_hidden_state
    scores = token_scores(
        hidden_BTE,
        weight(),
        targets_BT,
        bias=head.bias,
        logit_map=stream.logit_map,
        chunk_size=stream.config.head_chunk_size,
        limit_bytes=stream.config.budget_bytes,
    )
    return scores["log_probs"][:, :-1]


def _reference_logprobs(network: Any, ids_BT: Tensor, reference: Any) -> Tensor:
    if reference is not None:
        return token_logprobs_of(reference, ids_BT)
    network.disable_adapters()
    try:
        return token_logprobs_of(network, ids_BT)
    finally:
        network.enable_adapters()
