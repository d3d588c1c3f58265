"""Group-relative policy optimization and its relatives: completions that scored better than their group become more likely.

Shapes: B completions, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamgrad.objectives.arguments import check_choice, check_constant, check_mask, check_number, check_shape

LEVELS = ("token", "sequence")
_BY_ENTROPY = "entropy_coef or top_entropy_quantile"


@dataclass(frozen=True)
class Completions:
    """The inputs of the policy losses; the names are those of `grpo_loss`."""

    logprobs_BT: Tensor
    old_BT: Tensor
    mask_BT: Tensor
    advantages_B1: Tensor
    w: Tensor  # the ratio, (B, T), or (B, 1) for the level "sequence"
    epsilon: float
    epsilon_high: float
    delta: float | None
    sapo_temperatures: tuple[float, float]  # for advantages above 0, and for others
    vespo_k: tuple[float, float]  # for advantages from 0 on, and for others
    vespo_lambda: tuple[float, float]


def _clipped(c: Completions) -> Tensor:
    unclipped = c.w if c.delta is None else c.w.clamp(max=c.delta)
    return -torch.min(unclipped * c.advantages_B1, c.w.clamp(1 - c.epsilon, 1 + c.epsilon_high) * c.advantages_B1)


def _cispo(c: Completions) -> Tensor:
    return -c.w.clamp(max=c.epsilon_high).detach() * c.advantages_B1 * c.logprobs_BT


def _sapo(c: Completions) -> Tensor:
    tau_B1 = torch.where(c.advantages_B1 > 0, *c.sapo_temperatures)
    return -torch.sigmoid(tau_B1 * (c.w - 1)) * 4 / tau_B1 * c.advantages_B1


def _vespo(c: Completions) -> Tensor:
    k_B1, lambda_B1 = (torch.where(c.advantages_B1 >= 0, *values) for values in (c.vespo_k, c.vespo_lambda))
    return -_gamma_weight(c.logprobs_BT - c.old_BT, c.mask_BT, k_B1, lambda_B1) * c.advantages_B1 * c.logprobs_BT


# Each returns the policy loss of every token; the equations are in the docstring of `grpo_loss`.
LOSSES: dict[str, Callable[[Completions], Tensor]] = {
    "grpo": _clipped,
    "bnpo": _clipped,
    "dr_grpo": _clipped,
    "dapo": _clipped,
    "cispo": _cispo,
    "sapo": _sapo,
    "luspo": _clipped,
    "vespo": _vespo,
}


def grpo_loss(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None, sampling_logprobs: Tensor | None = None, entropy: Tensor | None = None,
    loss_type: str = "dapo", importance_sampling_level: str = "token", epsilon: float = 0.2, epsilon_high: float | None = None,
    delta: float | None = None, beta: float = 0.0, use_bias_correction_kl: bool = True, entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0, off_policy_mask_threshold: float | None = None, num_items: Tensor | float | None = None,
    max_completion_length: int | None = None, sapo_temperature_pos: float = 1.0, sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0, vespo_lambda_pos: float = 3.0, vespo_k_neg: float = 3.0, vespo_lambda_neg: float = 2.0,
) -> Tensor:  # fmt: skip
    """Return the loss `loss_type`. With A the advantage, log p_t the policy's log-probability, sg(.) "no gradient" and the ratio

        w_t = exp(log p_t - log p_t^old),  or at the level "sequence" (GSPO)  w = exp(mean_t(log p_t - log p_t^old))

    the loss of a token is (with `epsilon_high` = `epsilon` unless given)

        grpo, bnpo, dr_grpo, dapo, luspo   -min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A)
        cispo                              -sg(min(w, epsilon_high)) A log p
        sapo                               -(4 / tau) S(tau (w - 1)) A,   tau by the sign of A, S = sigmoid
        vespo                              -sg(phi(W)) A log p,   W = prod_t p_t / p_t^old,  phi(W) = e^(lambda - lambda W) W^k

    plus `beta` times the KL to the reference, e^(q - log p) - (q - log p) - 1 with q = log p^ref (times w with
    `use_bias_correction_kl`). Tokens are averaged as follows, and `entropy_coef` times the mean entropy is subtracted:

        grpo, sapo           mean over completions of their tokens' mean    bnpo      mean over tokens
        luspo                mean over completions of their tokens' sum     dr_grpo   sum / (B * `max_completion_length`)
        dapo, cispo, vespo   sum / `num_items` (the tokens of the whole batch; those of this one if left out)

    Args:
        logprobs: (B, T), by the policy, under the temperature that completions were sampled with.
        advantages: (B,), (B, 1) or (B, T).
        mask: (B, T), true for the tokens that count: not padding, nor truncated completions where those are left out.
        old_logprobs, ref_logprobs: (B, T), by the policy that sampled (None: this one) and by the reference (for `beta`).
        sampling_logprobs: (B, T), by the engine that sampled, where it differs from `old_logprobs`; for the off-policy mask.
        entropy: (B, T), of each token's distribution; for `entropy_coef` and `top_entropy_quantile`.
        top_entropy_quantile: only this share of the tokens, those of the highest entropy, has a policy loss and an entropy bonus.
        off_policy_mask_threshold: completions with A < 0 whose mean log p^old - log p exceeds this have no policy loss.
    """
    check_mask("mask", mask, logprobs, "logprobs")
    tensors = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "entropy": entropy}
    _check(loss_type, importance_sampling_level, logprobs, tensors | {"sampling_logprobs": sampling_logprobs})
    old_BT = logprobs.detach() if old_logprobs is None else old_logprobs
    w = _ratio(logprobs - old_BT, mask, importance_sampling_level)
    check_number("top_entropy_quantile", top_entropy_quantile, 0, 1)
    for name, limit in (("epsilon", epsilon), ("epsilon_high", epsilon_high), ("delta", delta), ("beta", beta)):
        if limit is not None:
            check_number(name, limit, 0)
    if loss_type == "sapo":
        check_number("sapo_temperature_pos", sapo_temperature_pos, 0, above=True)
        check_number("sapo_temperature_neg", sapo_temperature_neg, 0, above=True)
    completions = Completions(
        logprobs, old_BT, mask, _advantages_B1(advantages, logprobs), w, epsilon=epsilon, delta=delta,
        epsilon_high=epsilon if epsilon_high is None else epsilon_high, vespo_lambda=(vespo_lambda_pos, vespo_lambda_neg),
        vespo_k=(vespo_k_pos, vespo_k_neg), sapo_temperatures=(sapo_temperature_pos, sapo_temperature_neg),
    )  # fmt: skip
    per_token = LOSSES[loss_type](completions)
    if off_policy_mask_threshold is not None:
        per_token = per_token * _is_on_policy(completions, sampling_logprobs, off_policy_mask_threshold)
    active_BT = mask.to(logprobs.dtype)
    if top_entropy_quantile < 1.0:
        active_BT = active_BT * _most_uncertain(_needed("entropy", entropy, _BY_ENTROPY).detach(), mask, top_entropy_quantile)
        per_token = per_token * active_BT
    if beta:
        kl_BT = _kl(logprobs, _needed("ref_logprobs", ref_logprobs, "beta"))
        per_token = per_token + beta * (kl_BT * w if use_bias_correction_kl else kl_BT)
    loss = _averaged(per_token * mask, mask, loss_type, num_items, max_completion_length)
    if entropy_coef:
        loss = loss - entropy_coef * (_needed("entropy", entropy, _BY_ENTROPY) * active_BT).sum() / active_BT.sum().clamp(min=1)
    return loss


def _check(loss_type: str, level: str, logprobs: Tensor, tensors: dict[str, Tensor | None]) -> None:
    check_choice("loss_type", loss_type, LOSSES)
    check_choice("importance_sampling_level", level, LEVELS)
    for name, tensor in tensors.items():
        check_shape(name, tensor, logprobs, "logprobs")
    for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs"):
        check_constant(name, tensors[name])


def _needed(name: str, tensor: Tensor | None, by: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{name} is None, but {by} needs it. Pass {name}, or leave out {by}.")
    return tensor


def _advantages_B1(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """Return the advantages as (B, 1), or as (B, T) where each token has its own."""
    if not isinstance(advantages, Tensor):
        raise TypeError(f"advantages must be a tensor, got {advantages!r}. Pass torch.tensor(advantages).")
    check_constant("advantages", advantages)
    advantages_B1 = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    if advantages_B1.shape not in ((logprobs.shape[0], 1), logprobs.shape):
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)} but logprobs {tuple(logprobs.shape)}. Pass one advantage for each "
            "completion, or one for each token."
        )
    return advantages_B1


def _mean(per_token_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over the tokens that count, (B, 1)."""
    return (per_token_BT * mask_BT).sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True).clamp(min=1)


def _ratio(log_ratio_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    return torch.exp(_mean(log_ratio_BT, mask_BT) if level == "sequence" else log_ratio_BT)


def _kl(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    gap_BT = ref_logprobs - logprobs
    return torch.exp(gap_BT) - gap_BT - 1


def _is_on_policy(c: Completions, sampling_logprobs: Tensor | None, threshold: float) -> Tensor:
    sampled_BT = c.old_BT if sampling_logprobs is None else sampling_logprobs
    return (c.advantages_B1 >= 0) | (_mean(sampled_BT - c.logprobs_BT.detach(), c.mask_BT) <= threshold)


def _averaged(
    per_token_BT: Tensor, mask_BT: Tensor, loss_type: str, num_items: Tensor | float | None, longest: int | None
) -> Tensor:
    """Return the average of losses that are 0 where the mask is."""
    if loss_type in ("grpo", "sapo"):
        return (per_token_BT.sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).mean()
    if loss_type == "luspo":
        return per_token_BT.sum(dim=1).mean()
    if loss_type == "dr_grpo":
        if longest is None:
            raise ValueError("dr_grpo divides by max_completion_length, which is None. Pass the longest completion allowed.")
        check_number("max_completion_length", longest, 1)
        return per_token_BT.sum() / (len(per_token_BT) * longest)
    if num_items is not None:
        check_number("num_items", num_items, 0)
    items = mask_BT.sum() if num_items is None or loss_type == "bnpo" else num_items
    return per_token_BT.sum() / (items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1))


@torch.no_grad()
def _gamma_weight(log_ratio_BT: Tensor, mask_BT: Tensor, k_B1: Tensor, lambda_B1: Tensor) -> Tensor:
    """Return phi(W) = e^(lambda - lambda W) W^k, 1 at W = 1, of each sequence's ratio W; log W is clamped to [log 1e-8, 20]."""
    log_W_B1 = (log_ratio_BT.clamp(-20.0, 20.0) * mask_BT).sum(dim=1, keepdim=True).clamp(math.log(1e-8), 20.0)
    lambda_B1 = lambda_B1.clamp(min=1e-4)
    return torch.exp(lambda_B1 + k_B1 * log_W_B1 - lambda_B1 * log_W_B1.exp()).nan_to_num(nan=0.0, posinf=0.0)


def _most_uncertain(entropy_BT: Tensor, mask_BT: Tensor, share: float) -> Tensor:
    """Return which tokens have at least the `1 - share` quantile of the entropies of all that count."""
    kept = entropy_BT[mask_BT.bool()]
    if not len(kept):
        return torch.zeros_like(mask_BT, dtype=torch.bool)
    return (entropy_BT >= torch.quantile(kept, 1.0 - share)) & mask_BT.bool()
