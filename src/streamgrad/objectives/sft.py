"""Supervised fine-tuning: the negative log-likelihood of given tokens, and its dynamically weighted relative.

Shapes: B sequences, T tokens.
"""

from __future__ import annotations

from torch import Tensor

from streamgrad.objectives.arguments import check_choice, check_mask, check_number

LOSSES = ("nll", "dft")


def sft_loss(logprobs: Tensor, mask: Tensor, *, loss_type: str = "nll", num_items: Tensor | float | None = None) -> Tensor:
    """Return the loss per token. With `N = num_items`, or the number of tokens in the mask:

        nll    -1/N sum_t log p_t
        dft    -1/N sum_t sg(p_t) log p_t      (arXiv 2508.05629; sg: no gradient)

    Args:
        logprobs: (B, T), of each token given those before it.
        mask: (B, T), true for the tokens that count.
        num_items: the tokens of the whole batch, where this is one micro-batch of it.

    Without any token, loss and gradient are 0.
    """
    check_choice("loss_type", loss_type, LOSSES)
    check_mask("mask", mask, logprobs, "logprobs")
    if num_items is not None:
        check_number("num_items", num_items, 0)
    per_token_BT = -logprobs
    if loss_type == "dft":
        per_token_BT = per_token_BT * logprobs.detach().exp()
    total = (per_token_BT * mask).sum()
    count = mask.sum() if num_items is None else num_items
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
