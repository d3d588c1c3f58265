"""Log-probabilities of given tokens under a linear head, differentiable, one chunk of logits at a time: four GEMMs a chunk.

Any objective on log-probabilities is then a short function of (B, T).
"""

from __future__ import annotations

from torch import Tensor

from streamgrad.head.linear_head import LogitMap
from streamgrad.head.targets import refuse_two_dtypes
from streamgrad.head.token_scores import token_scores


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk_size: int | str = "auto",
    return_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Equals, without ever holding all logits:

        logits = softcap(logit_scale * (hidden @ weight.T + bias)).float() / temperature
        logprobs = logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)

    of the shape of `targets`; both are 0, without gradient, where the target is `ignore_index`. Returns `logprobs`, or
    `(logprobs, entropy)` with `return_entropy=True`; both are differentiable. `chunk_size` is how many tokens have logits at a
    time; `"auto"` takes it from the memory that is free.
    """
    refuse_two_dtypes(hidden, weight)
    scores = token_scores(
        hidden,
        weight,
        targets,
        fields=("log_probs", "entropy") if return_entropy else ("log_probs",),
        bias=bias,
        logit_map=LogitMap.build(logit_scale=logit_scale, softcap=softcap, temperature=temperature),
        ignore_index=ignore_index,
        chunk_size=chunk_size,
    )
    return (scores["log_probs"], scores["entropy"]) if return_entropy else scores["log_probs"]
