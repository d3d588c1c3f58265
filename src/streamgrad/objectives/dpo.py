"""Direct preference optimization: prefer the chosen of two answers to a prompt more than a reference model does.

Each answer has one value, `logp = sum_t log p_t` over its tokens, and each pair one loss. So the gradient of a token's
log-probability is known only after both answers have been seen. `streamgrad.token_logprobs` is differentiable at any batch size,
and the two answers of a pair may differ in length.

Shapes: B pairs, T tokens of an answer (another T for the other answer).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from streamgrad.objectives.arguments import check_choice, check_constant, check_mask, check_number, check_shape


@dataclass(frozen=True)
class Answers:
    """What `dpo_loss` is given of one side of the pairs."""

    name: str  # "chosen" or "rejected"
    logprobs_BT: Tensor
    mask_BT: Tensor
    ref_BT: Tensor | None
    log_sum_sq_BT: Tensor | None


@dataclass(frozen=True)
class Pairs:
    """The inputs of the losses; w is the chosen answer, l the rejected one."""

    logps_w: Tensor  # log pi(y_w)
    logps_l: Tensor
    ref_w: Tensor  # log pi_ref(y_w)
    ref_l: Tensor
    score_w: Tensor  # f'(pi / pi_ref) of the chosen answer; its log-ratio for the reverse KL
    score_l: Tensor
    length_w: Tensor
    length_l: Tensor
    nll_w: Tensor  # mean negative log-likelihood of all chosen tokens
    beta: float
    smoothing: float
    tau: float
    gamma: float

    @property
    def ratio_w(self) -> Tensor:
        return self.logps_w - self.ref_w

    @property
    def ratio_l(self) -> Tensor:
        return self.logps_l - self.ref_l

    @property
    def margin(self) -> Tensor:
        """beta (score_w - score_l)."""
        return self.beta * (self.score_w - self.score_l)

    @property
    def mean_difference(self) -> Tensor:
        """score_w / |y_w| - score_l / |y_l|, the difference of scores per token."""
        return self.score_w / self.length_w - self.score_l / self.length_l


def _exo_pair(p: Pairs) -> Tensor:
    # KL between the policy's preference (sigmoid of the margin) and the labels' (1 - s, s).
    log_w, log_l = logsigmoid(p.margin), logsigmoid(-p.margin)
    return log_w.exp() * (log_w - math.log1p(-p.smoothing)) + log_l.exp() * (log_l - math.log(p.smoothing))


def _smoothed(p: Pairs, delta: Tensor) -> Tensor:
    return -(1 - p.smoothing) * logsigmoid(p.beta * delta) - p.smoothing * logsigmoid(-p.beta * delta)


def _orpo(p: Pairs) -> Tensor:
    odds_w, odds_l = (mean - torch.log(-torch.expm1(mean)) for mean in (p.logps_w / p.length_w, p.logps_l / p.length_l))
    return -p.beta * logsigmoid(odds_w - odds_l)


def _discopop(p: Pairs) -> Tensor:
    share = torch.sigmoid(p.margin / p.tau)
    return -logsigmoid(p.margin) * (1 - share) + torch.exp(-p.margin) * share


# Each returns one loss per pair; the equations are in the docstring of `dpo_loss`.
LOSSES: dict[str, Callable[[Pairs], Tensor]] = {
    "sigmoid": lambda p: -logsigmoid(p.margin),
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.mean_difference),
    "hinge": lambda p: torch.relu(1 - p.margin),
    "ipo": lambda p: (p.mean_difference - 1 / (2 * p.beta)) ** 2,
    "exo_pair": _exo_pair,
    "nca_pair": lambda p: (
        -logsigmoid(p.beta * p.ratio_w) - 0.5 * logsigmoid(-p.beta * p.ratio_w) - 0.5 * logsigmoid(-p.beta * p.ratio_l)
    ),
    "robust": lambda p: (
        (-(1 - p.smoothing) * logsigmoid(p.margin) + p.smoothing * logsigmoid(-p.margin)) / (1 - 2 * p.smoothing)
    ),
    "bco_pair": lambda p: -logsigmoid(p.beta * p.ratio_w) - logsigmoid(-p.beta * p.ratio_l),
    "sppo_hard": lambda p: (p.ratio_w - 0.5 / p.beta) ** 2 + (p.ratio_l + 0.5 / p.beta) ** 2,
    "aot": lambda p: _smoothed(p, (p.logps_w - p.logps_l).sort(dim=0).values - (p.ref_w - p.ref_l).sort(dim=0).values),
    "aot_unpaired": lambda p: _smoothed(p, p.ratio_w.sort(dim=0).values - p.ratio_l.sort(dim=0).values),
    "apo_zero": lambda p: 1 - torch.sigmoid(p.beta * p.ratio_w) + torch.sigmoid(p.beta * p.ratio_l),
    "apo_down": lambda p: torch.sigmoid(p.beta * p.ratio_w) + 1 - torch.sigmoid(p.beta * (p.ratio_w - p.ratio_l)),
    "discopop": _discopop,
    "simpo": lambda p: _smoothed(p, p.mean_difference - p.gamma / p.beta),
    "orpo": _orpo,
    "sft": lambda p: p.nll_w.expand_as(p.logps_w),
}  # fmt: skip

DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
# Losses of score differences, in which the partition function cancels for every divergence.
_ANY_DIVERGENCE = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}

_NO_REFERENCE = {"simpo", "orpo"}
_DIVIDE_BY_BETA = {"ipo", "sppo_hard", "simpo"}


def dpo_loss(
    chosen_logprobs: Tensor,
    rejected_logprobs: Tensor,
    ref_chosen_logprobs: Tensor | None,
    ref_rejected_logprobs: Tensor | None,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    simpo_gamma: float = 0.5,
    chosen_log_sum_sq_probs: Tensor | None = None,
    rejected_log_sum_sq_probs: Tensor | None = None,
) -> Tensor:
    """Return the mean over pairs of the loss `loss_type`; several are added with `loss_weights` (default: 1.0 each).

    With r = log pi(y) - log pi_ref(y), s = f'(pi / pi_ref) (which is r for the reverse KL), w chosen, l rejected,
    m = beta (s_w - s_l), d = s_w / |y_w| - s_l / |y_l|, e = label_smoothing, S = sigmoid:

        sigmoid        -log S(m)                                         hinge         max(0, 1 - m)
        sigmoid_norm   -log S(beta d)                                    ipo           (d - 1 / (2 beta))^2
        exo_pair       KL((S(m), S(-m)) || (1 - e, e))                   robust        (-(1-e) log S(m) + e log S(-m)) / (1 - 2e)
        nca_pair       -log S(beta r_w) - (log S(-beta r_w) + log S(-beta r_l)) / 2
        bco_pair       -log S(beta r_w) - log S(-beta r_l)               sppo_hard     (r_w - 1/(2 beta))^2 + (r_l + 1/(2 beta))^2
        aot            -(1-e) log S(beta a) - e log S(-beta a),  a = sort(log pi_w - log pi_l) - sort(the same of the reference)
        aot_unpaired   the same with a = sort(r_w) - sort(r_l)           apo_zero      1 - S(beta r_w) + S(beta r_l)
        apo_down       S(beta r_w) + 1 - S(beta (r_w - r_l))             sft           -mean log pi of the chosen tokens
        discopop       (1-q) (-log S(m)) + q e^-m,  q = S(m / tau)
        simpo          -(1-e) log S(x) - e log S(-x),  x = beta d - simpo_gamma           (without a reference; arXiv 2405.14734)
        orpo           -beta log S(o_w - o_l),  o = log(a / (1 - a)),  log a = log pi(y) / |y|        (the same; arXiv 2403.07691)

    Args:
        chosen_logprobs, rejected_logprobs: (B, T), by the policy; the two may have different T.
        ref_chosen_logprobs, ref_rejected_logprobs: the same by the reference; both None for a loss without one (log pi_ref = 0):
            SimPO, CPO (`["sigmoid", "sft"]`, arXiv 2401.08417) and ORPO (`["orpo", "sft"]`).
        chosen_mask, rejected_mask: (B, T), true for the tokens of the answer.
        f_divergence_type: s is r ("reverse_kl"), 1 - e^-r ("forward_kl"), log 2 + log S(r) ("js_divergence") or, with
            a = `f_alpha_divergence_coef`, (e^((a-1) r) - 1) / (a - 1) ("alpha_divergence").
        ld_alpha: weight of the tokens of the longer answer beyond the length of the shorter (LD-DPO, arXiv 2409.06411).
        chosen_log_sum_sq_probs, rejected_log_sum_sq_probs: (B, T), log sum_v p_v^2 of each token's distribution. Given, a pair
            is weighted by exp(mean_t(log p_t - log sum_v p_v^2)) of both answers, without gradient (WPO, arXiv 2406.11827).
    """
    names = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    weights = [1.0] * len(names) if loss_weights is None else list(loss_weights)
    _check_options(names, weights, label_smoothing, f_divergence_type, wpo=chosen_log_sum_sq_probs is not None)
    _check_numbers(names, weights, beta, label_smoothing, discopop_tau, ld_alpha)
    chosen = Answers("chosen", chosen_logprobs, chosen_mask, ref_chosen_logprobs, chosen_log_sum_sq_probs)
    rejected = Answers("rejected", rejected_logprobs, rejected_mask, ref_rejected_logprobs, rejected_log_sum_sq_probs)
    _check_answers(chosen, rejected, names)
    scored = _scored(chosen, rejected, f_divergence_type, f_alpha_divergence_coef, ld_alpha)
    pairs = Pairs(**scored, beta=beta, smoothing=label_smoothing, tau=discopop_tau, gamma=simpo_gamma)
    per_pair = torch.stack([weight * LOSSES[name](pairs) for name, weight in zip(names, weights, strict=True)]).sum(dim=0)
    if chosen.log_sum_sq_BT is not None and rejected.log_sum_sq_BT is not None:
        per_pair = per_pair * _wpo_weight(chosen, chosen.log_sum_sq_BT) * _wpo_weight(rejected, rejected.log_sum_sq_BT)
    return per_pair.mean()


def _check_options(names: list[str], weights: list[float], smoothing: float, divergence: str, *, wpo: bool) -> None:
    if not names:
        raise ValueError(f"loss_type names no loss. Pass one or several of {', '.join(map(repr, LOSSES))}.")
    for name in names:
        check_choice("loss_type", name, LOSSES)
    check_choice("f_divergence_type", divergence, DIVERGENCES)
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} loss_weights for {len(names)} losses: pass one weight for each of {names}.")
    if divergence != "reverse_kl" and not set(names) <= _ANY_DIVERGENCE:
        raise ValueError(
            f"f_divergence_type={divergence!r} is defined for differences of scores only, not for all of loss_type={names}. Pass "
            f"'reverse_kl', or losses among {', '.join(sorted(_ANY_DIVERGENCE))}."
        )
    if "exo_pair" in names and not 0.0 < smoothing < 1.0:
        raise ValueError(f"exo_pair takes the logarithm of label_smoothing={smoothing}. Pass a value in (0, 1), such as 1e-3.")
    if "robust" in names and not 0.0 <= smoothing < 0.5:
        raise ValueError(f"robust divides by 1 - 2 * label_smoothing, got label_smoothing={smoothing}. Pass one in [0, 0.5).")
    if wpo and {"aot", "aot_unpaired"} & set(names):
        raise ValueError("aot sorts its pairs, so weights of pairs do not apply. Leave out the two log_sum_sq_probs.")


def _check_numbers(
    names: list[str], weights: list[float], beta: float, smoothing: float, tau: float, ld_alpha: float | None
) -> None:
    for weight in weights:
        check_number("each of loss_weights", weight, -math.inf)
    check_number("label_smoothing", smoothing, 0, 1)
    if _DIVIDE_BY_BETA & set(names):
        check_number(f"beta, by which {', '.join(sorted(_DIVIDE_BY_BETA & set(names)))} divides,", beta, 0, above=True)
    check_number("beta", beta, 0)
    if "discopop" in names:
        check_number("discopop_tau", tau, 0, above=True)
    if ld_alpha is not None:
        check_number("ld_alpha", ld_alpha, 0, 1)


def _check_answers(chosen: Answers, rejected: Answers, names: list[str]) -> None:
    for side in (chosen, rejected):
        check_mask(f"{side.name}_mask", side.mask_BT, side.logprobs_BT, f"{side.name}_logprobs")
        tensors = {"ref_{}_logprobs": side.ref_BT, "{}_log_sum_sq_probs": side.log_sum_sq_BT}
        for name, tensor in tensors.items():
            check_shape(name.format(side.name), tensor, side.logprobs_BT, f"{side.name}_logprobs")
    _check_both("ref_{}_logprobs", chosen.ref_BT, rejected.ref_BT)
    if chosen.ref_BT is not None and _NO_REFERENCE & set(names):
        raise ValueError(f"loss_type={names} has no reference, but one is given. Pass None for the two ref_..._logprobs.")
    for side in (chosen, rejected):
        check_constant(f"ref_{side.name}_logprobs", side.ref_BT)
    _check_both("{}_log_sum_sq_probs", chosen.log_sum_sq_BT, rejected.log_sum_sq_BT)
    if len(chosen.logprobs_BT) != len(rejected.logprobs_BT):
        raise ValueError(f"{len(chosen.logprobs_BT)} chosen answers but {len(rejected.logprobs_BT)} rejected ones: pass pairs.")


def _check_both(name: str, chosen: Tensor | None, rejected: Tensor | None) -> None:
    if (chosen is None) != (rejected is None):
        given, missing = ("chosen", "rejected") if rejected is None else ("rejected", "chosen")
        raise ValueError(f"{name.format(given)} is given but {name.format(missing)} is None. Pass both, or neither.")


def _scored(chosen: Answers, rejected: Answers, divergence: str, alpha: float, ld_alpha: float | None) -> dict[str, Tensor]:
    """Return the tensors of `Pairs`."""
    mask_w, mask_l = chosen.mask_BT, rejected.mask_BT
    shared = torch.minimum(mask_w.sum(dim=1), mask_l.sum(dim=1))

    def logp(logprobs_BT: Tensor | None, mask_BT: Tensor) -> Tensor:
        """Return log pi(y); 0 without a model."""
        if logprobs_BT is None:
            return torch.zeros(len(mask_BT), dtype=chosen.logprobs_BT.dtype, device=chosen.logprobs_BT.device)
        if ld_alpha is None:
            return (logprobs_BT * mask_BT).sum(dim=1)
        beyond_BT = mask_BT.cumsum(dim=1) > shared.unsqueeze(1)
        return (torch.where(beyond_BT, ld_alpha * logprobs_BT, logprobs_BT) * mask_BT).sum(dim=1)

    logps_w, logps_l = logp(chosen.logprobs_BT, mask_w), logp(rejected.logprobs_BT, mask_l)
    ref_w, ref_l = logp(chosen.ref_BT, mask_w), logp(rejected.ref_BT, mask_l)
    return {
        "logps_w": logps_w,
        "logps_l": logps_l,
        "ref_w": ref_w,
        "ref_l": ref_l,
        "score_w": _score(logps_w - ref_w, divergence, alpha),
        "score_l": _score(logps_l - ref_l, divergence, alpha),
        "length_w": mask_w.sum(dim=1).clamp(min=1),
        "length_l": mask_l.sum(dim=1).clamp(min=1),
        "nll_w": -(chosen.logprobs_BT * mask_w).sum() / mask_w.sum().clamp(min=1),
    }


def _score(ratio: Tensor, divergence: str, alpha: float) -> Tensor:
    """Return f'(pi / pi_ref) from the log-ratio."""
    if divergence == "forward_kl":
        return 1 - torch.exp(-ratio)
    if divergence == "js_divergence":
        return math.log(2) + logsigmoid(ratio)
    if divergence == "alpha_divergence" and abs(alpha - 1.0) >= 1e-6:
        # Clamped at e^80, before fp32 overflows; beyond, the score is constant.
        return torch.expm1(((alpha - 1.0) * ratio).clamp(max=80.0)) / (alpha - 1.0)
    return ratio


def _wpo_weight(answers: Answers, log_sum_sq_BT: Tensor) -> Tensor:
    with torch.no_grad():
        aligned = ((answers.logprobs_BT - log_sum_sq_BT) * answers.mask_BT).sum(dim=1) / answers.mask_BT.sum(dim=1).clamp(min=1)
        return aligned.exp()
