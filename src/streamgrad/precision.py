"""The paper's table of gradient precision (appendix, "Gradient precision"), on small copies of a model.

Gradients of plain backpropagation in fp32, `base32`, are the truth for three others: plain and streamed ones in 16 bits, `base16`
and `stream16`, and streamed ones in fp32, `stream32`. The errors of each group of modules are

    absolute = mean |g - g32|        relative = ||g - g32|| / ||g32||

averaged over several random models. (The paper's relative error is a mean over elements, which elements near zero dominate.)
In fp32, streaming must reproduce the truth. In 16 bits, both errors are noise of one size, and streaming must not be noisier than
plain backpropagation. Single draws of that noise differ by several per cent, so it is pooled over all parameters and models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from streamgrad.api import disable, enable
from streamgrad.config import StreamConfig
from streamgrad.hf.discover import decoder_layers
from streamgrad.hf.small_copy import reduced_model

GROUPS = ("lm_head", "embeddings", "attention", "mlp", "norms")
KINDS = ("base16", "stream16", "stream32")
# Limit for stream32 in every group. Rounding gave 1.2e-6 at most; a sum over keys that is off by a thousandth gave at least 4e-4.
LARGEST_ERROR = 5e-5
# Limit for the error of stream16 over that of base16.
LARGEST_RATIO = 1.02
MODELS = 8  # the pooled ratio then varies by 1% or 2%; where it is above its limit, up to 32 models decide
LENGTH, CHUNK = 384, 64


@dataclass(frozen=True)
class Errors:
    absolute: float
    relative: float


@dataclass
class Outcome:
    """The result of `check_precision`. `ratio` is the pooled error of stream16 over that of base16."""

    model_class: str
    layers: int
    models: int
    tokens: int
    chunk_size: int
    device: str
    dtype: str
    ratio: float
    table: dict[str, dict[str, Errors]]  # by group and kind
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": self.passed}


def check_precision(
    config: Any,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Compare gradients on small copies of the model of `config`. Raise `ValueError` if it cannot be streamed.

    `progress` is called before each copy, with the number of those that are done and of all that are wanted so far.
    """
    pool = _Pool()
    for seed in range(4 * MODELS):
        progress(seed, (seed // MODELS + 1) * MODELS)
        gradients, model = _gradients(config, seed, device, dtype)
        pool.add(gradients, group_of_parameters(model))
        if (seed + 1) % MODELS == 0 and pool.ratio <= LARGEST_RATIO:
            break
    table = pool.table()
    return Outcome(
        model_class=type(model).__name__,
        layers=len(decoder_layers(model.get_decoder())),
        models=seed + 1,
        tokens=LENGTH,
        chunk_size=CHUNK,
        device=device.type,
        dtype=str(dtype).removeprefix("torch."),
        ratio=pool.ratio,
        table=table,
        failures=pool.failures + list(_failures(table, pool.ratio)),
    )


def _failures(table: dict[str, dict[str, Errors]], ratio: float) -> Iterator[str]:
    for group, row in table.items():
        error = row["stream32"].relative
        if not error <= LARGEST_ERROR:  # also if it is NaN
            yield f"{group}: in fp32 streamed gradients differ from plain ones by {error:.1e}, and {LARGEST_ERROR:.0e} is allowed"
    if not ratio <= LARGEST_RATIO:
        yield f"in 16 bits streamed gradients are {ratio:.3f} times as wrong as plain ones, and {LARGEST_RATIO} is allowed"


Gradients = dict[str, Tensor | None]


def _gradients(config: Any, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[dict[str, Gradients], Any]:
    """Return the gradients of base32 and each of KINDS for one random model and text, and the model in fp32."""
    small = reduced_model(config, seed=seed, dtype=dtype, device=device)
    truth = reduced_model(config, seed=seed, dtype=torch.float32, device=device)
    truth.load_state_dict(small.state_dict())  # the truth of the rounded weights
    generator = torch.Generator().manual_seed(seed)
    vocabulary = truth.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(0, vocabulary, (1, LENGTH), generator=generator).to(device)
    options = StreamConfig(chunk_size=CHUNK, head_chunk_size=CHUNK)
    found: dict[str, Gradients] = {}
    for name, model in (("base32", truth), ("base16", small)):
        enable(model, options)  # first, since its errors say best what is wrong with a model
        found[name.replace("base", "stream")] = _step(model, ids)
        disable(model)
        found[name] = _step(model, ids)
    return found, truth


def _step(model: nn.Module, ids: Tensor) -> Gradients:
    model.zero_grad(set_to_none=True)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: None if p.grad is None else p.grad.detach().double() for name, p in model.named_parameters()}


def group_of_parameters(model: Any) -> dict[str, str]:
    """Return each parameter's group by its name. A tied head counts as embeddings, whose gradient holds both parts."""
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    groups = {}
    for name, parameter in model.named_parameters():
        words = name.lower().split(".")
        if any(parameter is own for own in embeddings.parameters()):
            group = "embeddings"
        elif any(parameter is own for own in head.parameters()):
            group = "lm_head"
        elif any("norm" in word or word.startswith("ln_") for word in words):
            group = "norms"
        else:
            group = "attention" if any("attn" in word or "attention" in word for word in words) else "mlp"
        groups[name] = group
    return groups


class _Pool:
    """Errors of several models: by group of each model, and their squares summed over all parameters."""

    def __init__(self) -> None:
        self._models: list[dict[str, dict[str, Errors]]] = []
        self._squares = dict.fromkeys(KINDS, 0.0)  # sums of the parameters' squared relative errors
        self.failures: list[str] = []

    def add(self, gradients: dict[str, Gradients], groups: dict[str, str]) -> None:
        truth = gradients["base32"]
        table: dict[str, dict[str, Errors]] = {}
        for kind in KINDS:
            self._compare_presence(kind, gradients[kind], truth)
            pairs = {name: (gradients[kind][name], g) for name, g in truth.items() if g is not None}
            for group in GROUPS:
                members = [pair for name, pair in pairs.items() if groups[name] == group]
                if members:
                    table.setdefault(group, {})[kind] = _errors(members)
            self._squares[kind] += sum(_errors([pair]).relative ** 2 for pair in pairs.values())
        self._models.append(table)

    def _compare_presence(self, kind: str, found: Gradients, truth: Gradients) -> None:
        for name, gradient in truth.items():
            if (found[name] is None) != (gradient is None):
                self.failures.append(f"{name}: {kind} has {'no' if found[name] is None else 'a'} gradient, unlike base32")

    @property
    def ratio(self) -> float:
        return math.sqrt(self._squares["stream16"] / self._squares["base16"]) if self._squares["base16"] else math.inf

    def table(self) -> dict[str, dict[str, Errors]]:
        """Return means over the models; for relative errors, root mean squares."""
        return {
            group: {kind: _pooled([table[group][kind] for table in self._models]) for kind in KINDS} for group in self._models[0]
        }


def _errors(pairs: list[tuple[Tensor | None, Tensor]]) -> Errors:
    """Return the errors of several gradients taken together. A missing one counts as zeros; one that is not finite gives NaN."""
    total = square = scale = count = 0.0
    for gradient, truth in pairs:
        difference = truth if gradient is None else gradient - truth
        total += float(difference.abs().sum())
        square += float(difference.square().sum())
        scale += float(truth.square().sum())
        count += truth.numel()
    return Errors(total / count, math.sqrt(square / scale) if scale else math.sqrt(square))


def _pooled(errors: list[Errors]) -> Errors:
    absolute = sum(error.absolute for error in errors) / len(errors)
    return Errors(absolute, math.sqrt(sum(error.relative**2 for error in errors) / len(errors)))
