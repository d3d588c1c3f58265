"""`streamgrad.objectives` against the losses that TRL's trainers compute from the same token log-probabilities, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

import streamgrad
from gradients import no_float32, relative_error, worst_gradient_error
from streamgrad.objectives import dpo_loss, grpo_loss, sft_loss
from tiny import tiny_model, tokens
from trainers import pairs, prompts, reward, settings, texts, tokenizer

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

B, T = 5, 11


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ragged(seed: int, rows: int = B) -> torch.Tensor:
    """A mask with a hole at the start, as a prompt leaves it, and rows of different lengths."""
    stops = torch.randint(4, T + 1, (rows, 1), generator=torch.Generator().manual_seed(seed))
    return ((torch.arange(T) >= 2) & (torch.arange(T) < stops)).long()


def logprobs(seed: int, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and log-probabilities made of it: 0 where the mask is, as TRL's head leaves them."""
    leaf = draw(*mask.shape, seed=seed).requires_grad_()
    return leaf, -leaf.abs() * mask


def gradients_of(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Zeros for a leaf that the loss does not depend on; both losses share the graph below their log-probabilities."""
    return torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)


def same(ours: torch.Tensor, theirs: torch.Tensor, leaves: Sequence[torch.Tensor], tolerance: float = 1e-12) -> None:
    """Loss and gradients."""
    assert ours.isfinite()
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    mine, stock = (gradients_of(loss, leaves) for loss in (ours, theirs))
    assert any(gradient.any() for gradient in stock)
    for one, other in zip(mine, stock, strict=True):
        assert relative_error(one, other) <= tolerance


def scripted(outputs: FusedCausalLMOutput):
    """A "model" that has computed its scores already."""
    return lambda **_: outputs


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """One of each; the tests set the attributes that a configuration would have set."""
    path = tmp_path_factory.mktemp("trainers")
    common = {"processing_class": tokenizer()}
    options = {"num_generations": 5, "per_device_train_batch_size": 5, "beta": 0.0, "gradient_accumulation_steps": 1}
    made = {
        "sft": SFTTrainer(tiny_model("qwen3"), settings(SFTConfig, path), train_dataset=texts(), **common),
        "dpo": DPOTrainer(tiny_model("qwen3"), tiny_model("qwen3"), settings(DPOConfig, path), train_dataset=pairs(), **common),
        "grpo": GRPOTrainer(
            tiny_model("qwen3"), reward, settings(GRPOConfig, path, **options), train_dataset=prompts(), **common
        ),
    }
    made["grpo"].current_gradient_accumulation_steps = 1
    return made


@pytest.mark.parametrize("items", [None, 40])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_sft(trainers, loss_type, items):
    mask = ragged(0)
    leaf, values = logprobs(1, mask)
    trainer = trainers["sft"]
    trainer.args.loss_type = loss_type
    outputs = FusedCausalLMOutput(log_probs=values, entropy=values, is_top1=mask, label_mask=mask.bool())
    theirs = trainer.compute_loss(scripted(outputs), {"attention_mask": mask}, num_items_in_batch=items)
    same(sft_loss(values, mask, loss_type=loss_type, num_items=items), theirs, [leaf])


def test_sft_without_a_token():
    _, values = logprobs(1, ragged(0))
    loss = sft_loss(values, torch.zeros(B, T))
    assert loss == 0 and not torch.autograd.grad(loss, values)[0].any()


DPO = {
    **{name: {"loss_type": name} for name in (
        "sigmoid", "sigmoid_norm", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
        "apo_down", "discopop", "sft",
    )},
    **{f"{name}, smoothed": {"loss_type": name, "label_smoothing": 0.2}
       for name in ("exo_pair", "robust", "aot", "aot_unpaired")},
    **{f"{name}, {kind}": {"loss_type": name, "f_divergence_type": kind}
       for name in ("sigmoid", "ipo") for kind in ("forward_kl", "js_divergence", "alpha_divergence")},
    "alpha of 1": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
    "three": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.5]},
    "beta": {"beta": 0.5},
    "LD-DPO": {"ld_alpha": 0.3},
    "WPO": {"wpo": True},
    "WPO, two": {"wpo": True, "loss_type": ["sigmoid", "bco_pair"]},
}  # fmt: skip


# Losses of TRL's CPO and ORPO trainers, with options that `dpo_loss` has under the same names.
NO_REFERENCE = {
    **{f"CPO, {name}": (CPOTrainer.cpo_loss, {"loss_type": name}) for name in ("sigmoid", "hinge", "ipo")},
    "SimPO": (CPOTrainer.cpo_loss, {"loss_type": "simpo"}),
    "SimPO, smoothed": (CPOTrainer.cpo_loss, {"loss_type": "simpo", "label_smoothing": 0.2, "simpo_gamma": 0.9}),
    "ORPO": (ORPOTrainer.odds_ratio_loss, {"loss_type": "orpo"}),
}


@pytest.mark.parametrize("name", NO_REFERENCE)
def test_losses_without_a_reference(name):
    """TRL's from log-probabilities of answers, which are means where the loss is normalised, plus the weighted NLL."""
    stock, options = NO_REFERENCE[name]
    masks = ragged(0), ragged(1)
    leaves, values = zip(*(logprobs(2 + i, mask) for i, mask in enumerate(masks)), strict=True)
    sums = [each.sum(1) for each in values]
    means = [each / mask.sum(1) for each, mask in zip(sums, masks, strict=True)]
    trainer = SimpleNamespace(
        **{"beta": 0.3, "alpha": 0.0, "label_smoothing": 0.0, "simpo_gamma": 0.5} | options,
        accelerator=SimpleNamespace(device=torch.device("cpu")),
    )
    with no_float32():
        losses = stock(trainer, *(means if options["loss_type"] in ("ipo", "simpo", "orpo") else sums))[0]
    sign = -1 if name == "ORPO" else 1  # TRL subtracts this one
    theirs = sign * losses.mean() - 0.7 * values[0].sum() / masks[0].sum()
    names = {"loss_type": [options["loss_type"], "sft"], "loss_weights": [1.0, 0.7]}
    same(dpo_loss(*values, None, None, *masks, beta=0.3, **options | names), theirs, leaves)
    if name in ("SimPO", "ORPO"):
        with pytest.raises(ValueError, match="has no reference, but one is given. Pass None"):
            dpo_loss(*values, *values, *masks, **options)


@pytest.mark.parametrize("name", DPO)
def test_dpo(trainers, name, monkeypatch):
    options = {"loss_type": "sigmoid", **DPO[name]}
    wpo = options.pop("wpo", False)
    masks = ragged(0), ragged(1)
    assert (masks[0].sum(1) != masks[1].sum(1)).any()
    leaves, values = zip(*(logprobs(2 + i, mask) for i, mask in enumerate(masks)), strict=True)
    refs = [logprobs(4 + i, mask)[1].detach() for i, mask in enumerate(masks)]
    squares = [-draw(B, T, seed=6 + i).abs() * mask for i, mask in enumerate(masks)]

    trainer = trainers["dpo"]
    names = [options["loss_type"]] if isinstance(options["loss_type"], str) else options["loss_type"]
    for attribute, value in (
        ("loss_types", names), ("loss_weights", options.get("loss_weights") or [1.0] * len(names)),
        ("beta", options.get("beta", 0.1)), ("label_smoothing", options.get("label_smoothing", 0.0)),
        ("f_divergence_type", options.get("f_divergence_type", "reverse_kl")),
        ("f_alpha_divergence_coef", options.get("f_alpha_divergence_coef", 0.5)), ("ld_alpha", options.get("ld_alpha")),
        ("use_weighting", wpo), ("ref_model", scripted(FusedCausalLMOutput(log_probs=torch.cat(refs)))),
    ):  # fmt: skip
        monkeypatch.setattr(trainer, attribute, value)
    both, mask = torch.cat(values), torch.cat(masks)
    outputs = FusedCausalLMOutput(
        log_probs=both, entropy=both, mean_logits=both, is_top1=mask.bool(), log_sum_sq_probs=torch.cat(squares)
    )
    whole = torch.nn.functional.pad(mask, (1, 0))  # TRL's mask is over tokens, log-probabilities start at the second
    inputs = {"input_ids": whole, "attention_mask": whole, "completion_mask": whole}
    # TRL's alpha divergence looks its clamp up by dtype, and has none for float64.
    in_float32 = options.get("f_divergence_type") == "alpha_divergence"
    if in_float32:
        outputs.log_probs = both.float()
        monkeypatch.setattr(trainer, "ref_model", scripted(FusedCausalLMOutput(log_probs=torch.cat(refs).float())))
    with no_float32():
        theirs = trainer._compute_loss(scripted(outputs), inputs, False)
    if wpo:
        options |= {"chosen_log_sum_sq_probs": squares[0], "rejected_log_sum_sq_probs": squares[1]}
    ours = dpo_loss(*values, *refs, *masks, **options)
    # exo_pair takes its logarithms of the smoothing in float32.
    same(ours, theirs.double(), leaves, tolerance=1e-5 if in_float32 else 1e-6 if "exo" in name else 1e-12)


def test_dpo_without_reference_and_with_answers_of_different_widths():
    chosen, rejected = torch.full((2, 3), -0.5), torch.full((2, 5), -1.0)
    masks = torch.ones(2, 3), torch.ones(2, 5)
    loss = dpo_loss(chosen, rejected, None, None, *masks, beta=1.0)
    torch.testing.assert_close(loss, -torch.nn.functional.logsigmoid(torch.tensor(-1.5 + 5.0)))
    zeros = torch.zeros(2, 3), torch.zeros(2, 5)
    torch.testing.assert_close(loss, dpo_loss(chosen, rejected, *zeros, *masks, beta=1.0))


GRPO = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    **{f"{name}, sequence": {"loss_type": name, "importance_sampling_level": "sequence"}
       for name in ("grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.4},
    "delta": {"delta": 1.25, "epsilon": 0.1},
    "KL": {"beta": 0.3},
    "KL, sequence": {"beta": 0.3, "importance_sampling_level": "sequence", "loss_type": "luspo"},
    "KL, not corrected": {"beta": 0.3, "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.2},
    "top entropy": {"top_entropy_quantile": 0.3},
    "top entropy, bonus, KL": {"top_entropy_quantile": 0.3, "entropy_coef": 0.2, "beta": 0.1},
    "off-policy": {"off_policy_mask_threshold": 0.02},
    "on-policy": {"old": False},
    "num_items": {"num_items": torch.tensor(50.0)},
    "per-token advantages": {"wide": True},
}  # fmt: skip


@pytest.mark.parametrize("name", GRPO)
def test_grpo(trainers, name, monkeypatch):
    options = {"loss_type": "dapo", **GRPO[name]}
    has_old, wide = options.pop("old", True), options.pop("wide", False)
    mask = ragged(0)
    leaf, values = logprobs(1, mask)
    old = (values + draw(B, T, seed=2, scale=0.3) * mask).detach()
    ref = (values + draw(B, T, seed=3, scale=0.5) * mask).detach()
    entropy = draw(B, T, seed=4).abs().requires_grad_()
    advantages = draw(B, T, seed=5) if wide else draw(B, seed=5)

    trainer = trainers["grpo"]
    coefficient = options.get("entropy_coef", 0.0)
    for attribute, value in (
        ("loss_type", options["loss_type"]), ("beta", options.get("beta", 0.0)), ("max_completion_length", 9),
        ("importance_sampling_level", options.get("importance_sampling_level", "token")),
        ("epsilon_low", options.get("epsilon", 0.2)), ("epsilon_high", options.get("epsilon_high", options.get("epsilon", 0.2))),
        ("top_entropy_quantile", options.get("top_entropy_quantile", 1.0)), ("entropy_coef", coefficient),
        ("_entropy_bonus_enabled", bool(coefficient)),
        ("off_policy_mask_threshold", options.get("off_policy_mask_threshold")),
        ("_get_per_token_logps_and_entropies", lambda *_, **__: (values, entropy, None)),
    ):  # fmt: skip
        monkeypatch.setattr(trainer, attribute, value)
    monkeypatch.setattr(trainer.args, "delta", options.get("delta"))
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", options.get("use_bias_correction_kl", True))
    inputs = {
        "prompt_ids": mask, "prompt_mask": mask, "completion_ids": mask, "completion_mask": mask, "advantages": advantages,
        "ref_per_token_logps": ref, "num_items_in_batch": options.get("num_items", mask.sum().double()),
    } | ({"old_per_token_logps": old} if has_old else {})  # fmt: skip
    with no_float32():
        theirs = trainer._compute_loss(trainer.model, inputs)
    ours = grpo_loss(
        values, advantages, mask, old_logprobs=old if has_old else None, ref_logprobs=ref, entropy=entropy,
        **({"max_completion_length": 9} if options["loss_type"] == "dr_grpo" else {}), **options,
    )  # fmt: skip
    same(ours, theirs, [leaf, entropy])


def test_sampling_logprobs_decide_what_is_off_policy():
    values, mask = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3)
    options = {"off_policy_mask_threshold": 0.5, "loss_type": "bnpo"}
    far = torch.tensor([[1.0] * 3, [0.0] * 3])
    kept = grpo_loss(values, torch.tensor([-1.0, -1.0]), mask, **options)
    masked = grpo_loss(values, torch.tensor([-1.0, -1.0]), mask, sampling_logprobs=far, **options)
    assert kept == 1.0 and masked == 0.5
    assert grpo_loss(values, torch.tensor([1.0, -1.0]), mask, sampling_logprobs=far, **options) == 0.0


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), (1, 3)])
def test_advantages_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="one advantage for each completion, or one for each token"):
        grpo_loss(torch.zeros(2, 3), torch.zeros(shape), torch.ones(2, 3))


def test_on_a_streamed_model():
    """The three objectives on `token_logprobs`, through a streamed decoder: the gradients of full logits."""
    ids, mask = tokens(4, 12), torch.ones(4, 11)
    gradients = []
    for streamed in (False, True):
        model = tiny_model("qwen3")
        if streamed:
            streamgrad.enable(model, chunk_size=5)
        with no_float32():
            hidden = model.model(ids).last_hidden_state[:, :-1]
            if streamed:
                values = streamgrad.token_logprobs(hidden, model.lm_head.weight, ids[:, 1:], chunk_size=3)
            else:
                values = model.lm_head(hidden).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            loss = sft_loss(values, mask) + dpo_loss(values[:2], values[2:], None, None, mask[:2], mask[2:])
            (loss + grpo_loss(values, torch.tensor([1.0, -1.0, 0.5, -0.5]).double(), mask)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    worst, name = worst_gradient_error(gradients[1], gradients[0])
    assert worst < 1e-10, name


BAD = {
    "loss_type": (lambda: sft_loss(*[torch.zeros(2, 3)] * 2, loss_type="nlll"), "loss_type must be .*'nll', 'dft', got 'nlll'"),
    "shape": (lambda: sft_loss(torch.zeros(2, 3), torch.zeros(2, 1)), r"mask has shape \(2, 1\) but logprobs \(2, 3\)"),
    "dpo": (lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, loss_type="sigmoidal"), "loss_type must be one of .* got 'sigmoidal'"),
    "reference": (lambda: dpo_loss(*[torch.zeros(2, 3)] * 3, None, *[torch.zeros(2, 3)] * 2), "ref_chosen_logprobs is given"),
    "a trained reference": (
        lambda: dpo_loss(*[torch.zeros(2, 3, requires_grad=True)] * 4, *[torch.ones(2, 3)] * 2),
        r"ref_chosen_logprobs needs a gradient.* Pass ref_chosen_logprobs\.detach\(\)",
    ),
    "trained old scores": (
        lambda: grpo_loss(*[torch.zeros(2, 3)] * 3, old_logprobs=torch.zeros(2, 3, requires_grad=True)),
        "old_logprobs needs a gradient",
    ),
    "no loss": (lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, loss_type=[]), "loss_type names no loss"),
    "weights": (lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, loss_weights=[1, 2]), "2 loss_weights for 1 losses"),
    "exo": (lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, loss_type="exo_pair"), "label_smoothing=0.0"),
    "robust": (lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, loss_type="robust", label_smoothing=0.5), r"\[0, 0.5\)"),
    "divergence": (
        lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, loss_type="apo_zero", f_divergence_type="forward_kl"),
        "'forward_kl' is defined for differences",
    ),
    "half a WPO": (
        lambda: dpo_loss(*[torch.zeros(2, 3)] * 6, chosen_log_sum_sq_probs=torch.zeros(2, 3)),
        "chosen_log_sum_sq_probs is given but rejected",
    ),
    "sorted": (
        lambda: dpo_loss(
            *[torch.zeros(2, 3)] * 6, loss_type="aot", chosen_log_sum_sq_probs=torch.zeros(2, 3),
            rejected_log_sum_sq_probs=torch.zeros(2, 3),
        ),
        "aot sorts its pairs",
    ),
    "grpo": (lambda: grpo_loss(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), loss_type="gnpo"), "got 'gnpo'"),
    "level": (
        lambda: grpo_loss(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), importance_sampling_level="word"),
        "importance_sampling_level must be .* got 'word'",
    ),
    "no reference": (lambda: grpo_loss(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), beta=0.1), "ref_logprobs is None"),
    "no entropy": (
        lambda: grpo_loss(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), top_entropy_quantile=0.2),
        "entropy is None",
    ),
    "no limit": (
        lambda: grpo_loss(torch.zeros(2, 3), torch.zeros(2), torch.zeros(2, 3), loss_type="dr_grpo"),
        "max_completion_length, which is None",
    ),
}  # fmt: skip


LABELS, ALL = torch.tensor([[-100, -100, 7], [-100, 5, 6]]), torch.ones(2, 3)


def _dpo(masks=(ALL, ALL), **options):
    return dpo_loss(*[torch.zeros(2, 3)] * 4, *masks, **options)


def _grpo(mask=ALL, **options):
    return grpo_loss(torch.zeros(2, 3), torch.zeros(2), mask, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: _dpo(loss_type="ipo", beta=0), "beta, by which ipo divides, must be a number above 0, got 0"),
        (lambda: _dpo(loss_type=["sppo_hard", "sft"], beta=-0.1), "beta, by which sppo_hard divides, .* above 0, got -0.1"),
        (lambda: _dpo(beta=-1), "beta must be a number at least 0, got -1"),
        (lambda: _grpo(epsilon=-1), "epsilon must be a number at least 0, got -1"),
        (lambda: _grpo(delta="2"), "delta must be a number at least 0, got '2'"),
        (lambda: _dpo(loss_weights=["a"]), "each of loss_weights must be a number at least -inf, got 'a'"),
        (lambda: _dpo(label_smoothing=2.0), "label_smoothing must be a number at least 0 and at most 1, got 2.0"),
        (lambda: _dpo(ld_alpha=7), "ld_alpha must be a number at least 0 and at most 1, got 7"),
        (lambda: _dpo(loss_type="discopop", discopop_tau=float("nan")), "discopop_tau must be a number above 0, got nan"),
        (lambda: _grpo(top_entropy_quantile=-0.1), "top_entropy_quantile must be .* at most 1, got -0.1"),
        (lambda: _grpo(top_entropy_quantile=2.0), "top_entropy_quantile must be .* at most 1, got 2.0"),
        (lambda: _grpo(loss_type="sapo", sapo_temperature_pos=0), "sapo_temperature_pos must be a number above 0, got 0"),
        (lambda: _grpo(loss_type="dr_grpo", max_completion_length=0), "max_completion_length must be a number at least 1, got 0"),
        (lambda: _grpo(num_items=-2), "num_items must be a number at least 0, got -2"),
        (lambda: sft_loss(torch.zeros(2, 3), torch.ones(2, 3), num_items=-2), "num_items must be a number at least 0, got -2"),
        (lambda: sft_loss(torch.zeros(2, 3), LABELS), "mask must be true .* from 0 to 1, got -100 to 7.*labels != -100"),
        (lambda: _grpo(mask=LABELS), "mask must be true for the tokens that count"),
        (lambda: _dpo(masks=[torch.ones(2, 3), 2 * torch.ones(2, 3)]), "rejected_mask must be true .* got 2 to 2"),
        (
            lambda: grpo_loss(torch.zeros(2, 3), torch.zeros(2, requires_grad=True), torch.ones(2, 3)),
            "advantages needs a gradient, and the loss takes it for a constant",
        ),
    ],
)
def test_numbers_that_make_no_sense(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()
