"""Group-relative policy optimization and its relatives: completions that scored better than their group become more likely.

Shapes: B completions, T tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from streamgrad.objectives.arguments import check_choice, check_shape

LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
LEVELS = ("token", "sequence")
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def grpo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    sampling_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    num_items: Tensor | float | None = None,
    max_completion_length: int | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Tensor:
    """Return the loss `loss_type`. With A the advantage, log p_t the policy's log-probability, sg(.) "no gradient" and the ratio

        w_t = exp(log p_t - log p_t^old),  or at the level "sequence" (GSPO)  w = exp(mean_t(log p_t - log p_t^old))

    the loss of a token is

        grpo, bnpo, dr_grpo, dapo, luspo   -min(min(w, delta) A, clip(w, 1 - epsilon, 1 + epsilon_high) A)
        cispo                              -sg(min(w, epsilon_high)) A log p
        sapo                               -(4 / tau) S(tau (w - 1)) A,   tau by the sign of A, S = sigmoid
        vespo                              -sg(phi(W)) A log p,   W = prod_t p_t / p_t^old,  phi(W) = e^(lambda - lambda W) W^k

    plus `beta` times the KL to the reference, e^(q - log p) - (q - log p) - 1 with q = log p^ref (times w with
    `use_bias_correction_kl`), and the tokens are averaged as

        grpo, sapo         mean over completions of the mean over their tokens
        bnpo               mean over tokens
        dapo, cispo, vespo sum over tokens / `num_items` (the tokens of the whole batch; those of this one if left out)
        dr_grpo            sum over tokens / (B * `max_completion_length`)
        luspo              mean over completions of the sum over their tokens

    minus `entropy_coef` times the mean entropy.

    Args:
        logprobs: (B, T), by the policy, under the temperature that completions were sampled with.
        advantages: (B,), (B, 1) or (B, T).
        mask: (B, T), true for the tokens that count: not padding, and no token of a truncated completion if those are left out.
        old_logprobs: (B, T), by the policy that sampled; None if it is this one, which makes every ratio 1.
        ref_logprobs: (B, T), by the reference; needed if `beta` is not 0.
        sampling_logprobs: (B, T), by the engine that sampled, where it differs from `old_logprobs`; for the off-policy mask.
        entropy: (B, T), of each token's distribution; needed for `entropy_coef` and `top_entropy_quantile`.
        epsilon_high: `epsilon` if None.
        top_entropy_quantile: only this share of the tokens, those of the highest entropy, has a policy loss and an entropy bonus.
        off_policy_mask_threshold: completions with A < 0 whose mean log p^old - log p exceeds this have no policy loss.
    """
    check_choice("loss_type", loss_type, LOSSES)
    check_choice("importance_sampling_level", importance_sampling_level, LEVELS)
    given = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "entropy": entropy, "mask": mask}
    for name, tensor in (given | {"sampling_logprobs": sampling_logprobs}).items():
        check_shape(name, tensor, logprobs, "logprobs")
    by_entropy = "entropy_coef or top_entropy_quantile"
    for name, needed, by in (("ref_logprobs", beta, "beta"), ("entropy", entropy_coef or top_entropy_quantile < 1.0, by_entropy)):
        if needed and given[name] is None:
            raise ValueError(f"{name} is None, but {by} needs it. Pass {name}, or leave out {by}.")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("dr_grpo divides by max_completion_length, which is None. Pass the longest completion that was allowed.")
    advantages_B1 = advantages.unsqueeze(1) if advantages.ndim == 1 else advantages
    if advantages_B1.shape not in ((logprobs.shape[0], 1), logprobs.shape):
        raise ValueError(
            f"advantages have shape {tuple(advantages.shape)} but logprobs {tuple(logprobs.shape)}. Pass one advantage for each "
            "completion, or one for each token."
        )
    old_BT = logprobs.detach() if old_logprobs is None else old_logprobs
    log_ratio_BT = logprobs - old_BT
    length_B1 = mask.sum(dim=1, keepdim=True).clamp(min=1)
    is_sequence = importance_sampling_level == "sequence"
    w = torch.exp((log_ratio_BT * mask).sum(dim=1, keepdim=True) / length_B1 if is_sequence else log_ratio_BT)

    high = epsilon if epsilon_high is None else epsilon_high
    if loss_type in _CLIPPED:
        unclipped = w if delta is None else w.clamp(max=delta)
        per_token = -torch.min(unclipped * advantages_B1, w.clamp(1 - epsilon, 1 + high) * advantages_B1)
    elif loss_type == "cispo":
        per_token = -w.clamp(max=high).detach() * advantages_B1 * logprobs
    elif loss_type == "sapo":
        tau_B1 = torch.where(advantages_B1 > 0, sapo_temperature_pos, sapo_temperature_neg)
        per_token = -torch.sigmoid(tau_B1 * (w - 1)) * 4 / tau_B1 * advantages_B1
    else:
        k_B1 = torch.where(advantages_B1 >= 0, vespo_k_pos, vespo_k_neg)
        lambda_B1 = torch.where(advantages_B1 >= 0, vespo_lambda_pos, vespo_lambda_neg)
        per_token = -_gamma_weight(log_ratio_BT, mask, k_B1, lambda_B1) * advantages_B1 * logprobs

    if off_policy_mask_threshold is not None:
        sampled_BT = old_BT if sampling_logprobs is None else sampling_logprobs
        drift_B1 = ((sampled_BT - logprobs.detach()) * mask).sum(dim=1, keepdim=True) / length_B1
        per_token = per_token * ((advantages_B1 >= 0) | (drift_B1 <= off_policy_mask_threshold))
    active_BT = mask.to(logprobs.dtype)
    if top_entropy_quantile < 1.0:
        assert entropy is not None
        active_BT = active_BT * _most_uncertain(entropy.detach(), mask, top_entropy_quantile)
        per_token = per_token * active_BT
    if beta:
        assert ref_logprobs is not None
        gap_BT = ref_logprobs - logprobs
        kl_BT = torch.exp(gap_BT) - gap_BT - 1
        per_token = per_token + beta * (kl_BT * w if use_bias_correction_kl else kl_BT)

    loss = _averaged(per_token * mask, mask, loss_type, length_B1, num_items, max_completion_length)
    if entropy_coef:
        assert entropy is not None
        loss = loss - entropy_coef * (entropy * active_BT).sum() / active_BT.sum().clamp(min=1)
    return loss


def _averaged(
    per_token_BT: Tensor,
    mask_BT: Tensor,
    loss_type: str,
    length_B1: Tensor,
    num_items: Tensor | float | None,
    longest: int | None,
) -> Tensor:
    if loss_type in ("grpo", "sapo"):
        return (per_token_BT.sum(dim=1, keepdim=True) / length_B1).mean()
    if loss_type == "luspo":
        return per_token_BT.sum(dim=1).mean()
    if loss_type == "dr_grpo":
        assert longest is not None
        return per_token_BT.sum() / (len(per_token_BT) * longest)
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
