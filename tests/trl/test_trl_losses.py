"""Every loss of TRL's trainers with streamed models: loss, every metric and every gradient of a step equal stock TRL's.

In float64, where stock TRL runs with its kernel written out on full logits, since that kernel computes in float32 only; and in
float32 against stock TRL as it is.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.trainer_pt_utils import LabelSmoother
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from gradients import assert_as_exact_as_plain, assert_same_step, assert_step_as_exact_as_plain, more, no_float32
from lora import with_lora
from streamgrad import StreamConfig
from tiny import tiny_model
from trainer_kinds import KINDS, model_kind
from trainers import (
    completions,
    conversations,
    first_step,
    judged,
    lora,
    pairs,
    prompts,
    reward,
    settings,
    texts,
    tokenizer,
    trl_on_full_logits,
)

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

METHODS = ("full", "lora")
METHODS_MORE = ("full", pytest.param("lora", marks=more))  # where many losses share one way to their adapters
STREAM = StreamConfig(chunk_size=7, head_chunk_size=6)
STREAMED = {stock: ours for stock, ours, *_ in KINDS.values()}


def step_of(kind, arguments, model, *, dtype=torch.float64, drift=0.0, **inputs):
    """Step and metrics of a trainer's first batch; `model` and values in `inputs` may be functions that make one.

    In float64 TRL's kernel, which computes in float32, is plain torch.
    """
    given = {name: value() if callable(value) and name != "reward_funcs" else value for name, value in inputs.items()}
    with ExitStack() as patches:
        if dtype == torch.float64:
            patches.enter_context(no_float32())
            patches.enter_context(trl_on_full_logits())
        return first_step(kind(model=model(dtype), args=arguments, processing_class=tokenizer(), **given), drift=drift)


def assert_equals_stock(stock, arguments, model, *, stream=STREAM, tolerance=1e-10, **inputs):
    """One step of each trainer from the same weights and batch, within `tolerance`. Returns the metrics."""
    expected, expected_metrics = step_of(stock, arguments, model, **inputs)
    actual, metrics = step_of(STREAMED[stock], arguments, model, stream=stream, **inputs)
    assert_same_step(actual, expected, tolerance)
    assert metrics == pytest.approx(expected_metrics, rel=tolerance, abs=tolerance)
    return metrics


def qwen3(dtype):
    return tiny_model("qwen3", dtype=dtype)


def adapted(method: str) -> dict:
    return {"peft_config": lora} if method == "lora" else {}


SFT = {
    "nll": {"loss_type": "nll"},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SFT)
def test_sft(tmp_path, name, method):
    arguments = settings(SFTConfig, tmp_path, **SFT[name])
    # transformers' LabelSmoother sums in float32, whatever it is given.
    tolerance = 1e-6 if name == "smoothed" else 1e-10
    metrics = assert_equals_stock(SFTTrainer, arguments, qwen3, tolerance=tolerance, train_dataset=texts(), **adapted(method))
    assert metrics.keys() == {"entropy", "mean_token_accuracy", "num_tokens"}


class Halved(torch.nn.Linear):
    def forward(self, hidden):
        return 0.5 * super().forward(hidden)


def with_halving_head(dtype):
    model = tiny_model("llama", dtype=dtype)
    model.lm_head.__class__ = Halved
    return model


def with_doubling_hook(dtype):
    model = tiny_model("llama", dtype=dtype)
    model.lm_head.register_forward_hook(lambda head, args, out: 2 * out)
    return model


SMOOTHED = {
    "a mixture of experts, without a loss for their balance": (lambda dtype: tiny_model("qwen3_moe", dtype=dtype), 0.3),
    "a head with a forward of its own": (with_halving_head, None),
    "a head with a hook": (with_doubling_hook, None),
}


@pytest.mark.parametrize("name", SMOOTHED)
def test_smoothed_sft_of_logits_as_the_model_makes_them(tmp_path, name):
    model, coefficient = SMOOTHED[name]
    arguments = settings(SFTConfig, tmp_path, label_smoothing_factor=0.1, router_aux_loss_coef=coefficient)
    # LabelSmoother sums in float32, here and below.
    assert_equals_stock(SFTTrainer, arguments, model, tolerance=1e-6, train_dataset=texts())


class NeverCalled(LabelSmoother):
    def __call__(self, *args, **kwargs):
        raise AssertionError("TRL's smoother takes full logits")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bf16", [False, True])
def test_smoothed_sft_makes_no_logits(tmp_path, bf16, method):
    """Nor where Accelerate has wrapped the model's forward."""
    arguments = settings(SFTConfig, tmp_path, label_smoothing_factor=0.1, bf16=bf16, max_steps=2)
    given = {name: make() for name, make in adapted(method).items()}
    trainer = STREAMED[SFTTrainer](
        model=qwen3(torch.float32), args=arguments, processing_class=tokenizer(), train_dataset=texts(), stream=STREAM, **given
    )
    trainer.label_smoother = NeverCalled(epsilon=0.1)
    trainer.train()
    assert hasattr(trainer.model, "_original_forward") == bf16


@pytest.mark.parametrize("last", ["streamed", "stock"])
@pytest.mark.parametrize("first", [0.0, 0.3])
@pytest.mark.parametrize("stepped", [0, 1])
def test_trainers_of_one_model_smooth_as_each_was_told(tmp_path, first, stepped, last):
    def step(*kinds, **options):
        model, trainers = tiny_model("qwen3"), []
        for kind, factor in zip(kinds, (first, 0.3 - first), strict=True):
            given = options if kind is not SFTTrainer else {}
            arguments = settings(SFTConfig, tmp_path, label_smoothing_factor=factor)
            trainers.append(kind(model=model, args=arguments, processing_class=tokenizer(), train_dataset=texts(), **given))
        return first_step(trainers[stepped])[0]

    ours = STREAMED[SFTTrainer]
    with no_float32(), trl_on_full_logits():
        actual = step(ours, ours if last == "streamed" else SFTTrainer, stream=STREAM)
        assert_same_step(actual, step(SFTTrainer, SFTTrainer), 1e-6)


DATA = {
    "completion-only": (completions, {}),
    "whole text": (completions, {"completion_only_loss": False}),
    "assistant-only": (conversations, {"assistant_only_loss": True}),
    "packed": (texts, {"packing": True, "max_length": 32}),
    "wrapped": (texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 16}),
    "padding-free": (texts, {"padding_free": True, "max_length": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_sft_data(tmp_path, name):
    make, options = DATA[name]
    assert_equals_stock(SFTTrainer, settings(SFTConfig, tmp_path, **options), qwen3, train_dataset=make())


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "granite", "cohere"])
def test_families_that_change_their_logits(tmp_path, family):
    """Softcap, scaling and windows: TRL reads them from the configuration, streamgrad from the model's own forward."""
    arguments = settings(SFTConfig, tmp_path)
    assert_equals_stock(SFTTrainer, arguments, lambda dtype: tiny_model(family, dtype=dtype), train_dataset=texts())


DPO = {
    **{name: {"loss_type": [name]} for name in (
        "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
        "discopop", "sft", "sigmoid_norm",
    )},
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 0.1},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "aot, smoothed": {"loss_type": ["aot"], "label_smoothing": 0.1},
    "three at once": {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    "forward_kl": {"f_divergence_type": "forward_kl"},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "WPO": {"use_weighting": True},
    "LD-DPO": {"ld_alpha": 0.3},
    "precomputed": {"precompute_ref_log_probs": True},
}  # fmt: skip


def reference(seed: int = 3):
    return tiny_model("qwen3", seed=seed)


@pytest.mark.parametrize("method", METHODS_MORE)
@pytest.mark.parametrize("name", DPO)
def test_dpo(tmp_path, name, method):
    """Pairs of different lengths; the reference is a model of its own, or the policy without its adapters."""
    arguments = settings(DPOConfig, tmp_path, per_device_train_batch_size=3, **DPO[name])
    extra = adapted(method) or {"ref_model": reference}
    metrics = assert_equals_stock(DPOTrainer, arguments, qwen3, train_dataset=pairs(), **extra)
    assert {"rewards/margins", "rewards/accuracies", "logps/chosen", "logits/rejected", "entropy"} <= metrics.keys()
    assert metrics["rewards/margins"] != 0


@pytest.mark.parametrize("stock", [DPOTrainer, GRPOTrainer])
def test_an_adapter_that_was_trained_before(tmp_path, stock):
    """The reference is a copy of it, between which and itself TRL switches."""
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 9, "beta": 0.1}
    config, dataset, extra = (
        (DPOConfig, pairs(), {}) if stock is DPOTrainer else (GRPOConfig, prompts(), {"reward_funcs": reward})
    )
    arguments = settings(config, tmp_path, **options if stock is GRPOTrainer else {})

    def peft_model(dtype):
        return with_lora(qwen3(dtype))

    metrics = assert_equals_stock(stock, arguments, peft_model, drift=0.1, train_dataset=dataset, **extra)
    assert metrics.get("kl", metrics.get("rewards/margins")) != 0


@pytest.mark.parametrize("keep", ["input", "attention", "all"])
def test_what_layers_keep(tmp_path, keep):
    stream = StreamConfig(chunk_size=7, keep=keep)
    arguments = settings(DPOConfig, tmp_path)
    assert_equals_stock(DPOTrainer, arguments, qwen3, stream=stream, train_dataset=pairs(), ref_model=reference)


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """GRPO makes its reference from the name of the policy."""
    path = tmp_path_factory.mktemp("policy")
    qwen3(torch.float64).save_pretrained(path)
    return lambda dtype: AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


GRPO = {
    **{name: {"loss_type": name} for name in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")},
    "GSPO": {"importance_sampling_level": "sequence"},
    "luspo, sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "clip higher": {"epsilon": 0.1, "epsilon_high": 0.3},
    "delta": {"delta": 1.3},
    "KL": {"beta": 0.1},
    "KL, not corrected": {"beta": 0.1, "use_bias_correction_kl": False},
    "entropy bonus": {"entropy_coef": 0.1},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 5.0},
    "top entropy": {"top_entropy_quantile": 0.4},
    "off-policy mask": {"off_policy_mask_threshold": 0.001},
    "temperature": {"temperature": 0.7},
    "truncated masked": {"mask_truncated_completions": True},
    "rewards unscaled": {"scale_rewards": "none"},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS_MORE)
@pytest.mark.parametrize("name", GRPO)
def test_grpo(tmp_path, name, method, saved_model):
    """Completions of the same seed, scored by a policy that has moved on since: ratios are not 1, and some are clipped."""
    arguments = settings(
        GRPOConfig, tmp_path, **{"beta": 0.0} | GRPO[name], num_generations=4, per_device_train_batch_size=4,
        max_completion_length=9, num_iterations=2,
    )  # fmt: skip
    metrics = assert_equals_stock(
        GRPOTrainer, arguments, saved_model, drift={"full": 0.03, "lora": 0.1}[method], train_dataset=prompts(),
        reward_funcs=reward, **adapted(method),
    )  # fmt: skip
    assert {"reward", "entropy", "completions/mean_length"} <= metrics.keys()
    assert metrics["reward_std"] > 0
    assert metrics.get("clip_ratio/region_mean", 1) > 0
    assert ("kl" in metrics) == ("KL" in name)


def test_grpo_with_a_head_in_float32(tmp_path, saved_model):
    """Full training alone: stock TRL does not find the tied embeddings of a model with adapters."""
    options = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 9, "beta": 0.1}
    arguments = settings(GRPOConfig, tmp_path, cast_lm_head_to_fp32=True, **options)
    inputs = {"train_dataset": prompts(), "reward_funcs": reward}
    assert_equals_stock(GRPOTrainer, arguments, saved_model, drift=0.01, **inputs)
    # With 16-bit layers the two differ by the rounding of the layers alone.
    assert_equals_stock(GRPOTrainer, arguments, saved_model, dtype=torch.bfloat16, tolerance=0.05, drift=0.01, **inputs)


EXPERTS = {
    "sft": (SFTTrainer, SFTConfig, {}, {"train_dataset": texts()}),
    "sft, its default": (SFTTrainer, SFTConfig, {"router_aux_loss_coef": None}, {"train_dataset": completions()}),
    "dpo": (
        DPOTrainer, DPOConfig, {}, {"train_dataset": pairs(), "ref_model": lambda: tiny_model("qwen3_moe", seed=3)},
    ),
    "grpo": (
        GRPOTrainer, GRPOConfig, {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 9},
        {"train_dataset": prompts(), "reward_funcs": reward},
    ),
    "kto": (KTOTrainer, KTOConfig, {}, {"train_dataset": judged(), "ref_model": lambda: tiny_model("qwen3_moe", seed=3)}),
    "rloo": (
        RLOOTrainer, RLOOConfig,
        {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 9, "beta": 0.0},
        {"train_dataset": prompts(), "reward_funcs": reward},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_balance_loss_of_experts(tmp_path, name):
    stock, config, options, inputs = EXPERTS[name]
    arguments = settings(config, tmp_path, **{"router_aux_loss_coef": 0.3} | options)
    metrics = assert_equals_stock(stock, arguments, lambda dtype: tiny_model("qwen3_moe", dtype=dtype), **inputs)
    assert metrics["aux_loss"] > 0


RLOO = {
    "alone": {},
    "KL": {"beta": 0.1},
    "clip": {"epsilon": 0.1, "epsilon_high": 0.3},
    "temperature": {"temperature": 0.7},
    "advantages": {"normalize_advantages": True, "reward_clip_range": [-1.0, 1.0]},
    "truncated masked": {"mask_truncated_completions": True},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS_MORE)
@pytest.mark.parametrize("name", RLOO)
def test_rloo(tmp_path, name, method, saved_model):
    """As `test_grpo`; the ratio is that of a whole completion."""
    arguments = settings(
        RLOOConfig, tmp_path, **{"beta": 0.0} | RLOO[name], num_generations=4, per_device_train_batch_size=4,
        max_completion_length=9, num_iterations=2,
    )  # fmt: skip
    metrics = assert_equals_stock(
        RLOOTrainer, arguments, saved_model, drift={"full": 0.03, "lora": 0.1}[method], train_dataset=prompts(),
        reward_funcs=reward, **adapted(method),
    )  # fmt: skip
    assert metrics["reward_std"] > 0 and metrics["clip_ratio/region_mean"] > 0
    # Measured when completions are sampled, where a policy without adapters is its own reference.
    assert ("kl" in metrics) == (name == "KL")
    assert metrics.get("kl", 0) != 0 or name != "KL" or method == "full"


KTO = {
    "kto": {},
    "apo_zero_unpaired": {"loss_type": "apo_zero_unpaired"},
    "weighted": {"desirable_weight": 1.3, "undesirable_weight": 0.7, "beta": 0.3},
    "precomputed": {"precompute_ref_log_probs": True},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", KTO)
def test_kto(tmp_path, name, method):
    """Good and bad completions of different lengths; the KL is of completions of other prompts, in passes of their own."""
    arguments = settings(KTOConfig, tmp_path, per_device_train_batch_size=4, **KTO[name])
    # TRL cuts off an estimate of KL below zero. That of this reference is above.
    extra = adapted(method) or {"ref_model": lambda: reference(5)}
    metrics = assert_equals_stock(KTOTrainer, arguments, qwen3, train_dataset=judged(), **extra)
    assert {"rewards/chosen", "logps/rejected", "logits/chosen", "entropy"} <= metrics.keys()
    assert metrics["rewards/margins"] != 0
    if method == "full":
        assert (metrics["kl"] > 0) == (name != "apo_zero_unpaired")


DISTILLATION = {
    **{f"beta {beta}": {"beta": beta} for beta in (0.0, 0.5, 1.0)},
    "temperature": {"temperature": 0.7, "beta": 0.3},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "temperature" else more) for n in DISTILLATION])
def test_distillation(tmp_path, name, method):
    """From forward to reverse KL, on completions of the student, which has moved on since."""
    arguments = settings(DistillationConfig, tmp_path, max_completion_length=9, **DISTILLATION[name])
    inputs = {"train_dataset": prompts(), "teacher_model": reference, **adapted(method)}
    metrics = assert_equals_stock(DistillationTrainer, arguments, qwen3, drift=0.03, **inputs)
    assert metrics["entropy"] > 0


def margins() -> dict:
    return {"train_dataset": pairs().add_column("margin", [0.1 * i for i in range(8)])}


REWARD = {
    "plain": ("qwen3", {}, {}),
    "centred": ("qwen3", {"center_rewards_coefficient": 0.1}, {}),
    "margins": ("qwen3", {}, margins()),
    "experts": ("qwen3_moe", {}, {}),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", REWARD)
def test_reward(tmp_path, name, method):
    """Also with margins, which TRL passes to the model too, and with experts, for whose routing it adds no loss here."""
    family, options, inputs = REWARD[name]
    arguments = settings(RewardConfig, tmp_path, per_device_train_batch_size=3, **options)
    extra = {"peft_config": lora(modules_to_save=["score"])} if method == "lora" else {}
    metrics = assert_equals_stock(
        RewardTrainer, arguments, lambda dtype: tiny_model(family, dtype=dtype, **model_kind("reward")),
        **{"train_dataset": pairs()} | inputs, **extra,
    )  # fmt: skip
    assert metrics["margin"] != 0


@more
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("batch", [1, 4])
def test_batch_and_chunk_sizes(tmp_path, batch, chunk, method, saved_model):
    for stock, config, inputs in (
        (SFTTrainer, SFTConfig, {"train_dataset": completions()}),
        (DPOTrainer, DPOConfig, {"train_dataset": pairs()}),
        (GRPOTrainer, GRPOConfig, {"train_dataset": prompts(), "reward_funcs": reward}),
    ):
        options = {"num_generations": 4, "max_completion_length": 9, "beta": 0.1} if stock is GRPOTrainer else {}
        arguments = settings(
            config, tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=4 // batch, **options
        )
        stream = StreamConfig(chunk_size=chunk, head_chunk_size=chunk)
        assert_equals_stock(stock, arguments, saved_model, stream=stream, drift=0.01, **inputs, **adapted(method))


FLOAT32 = {
    "sft": (SFTTrainer, SFTConfig, {}, {"train_dataset": texts()}),
    "dpo": (DPOTrainer, DPOConfig, {}, {"train_dataset": pairs()}),
    "dpo, WPO": (DPOTrainer, DPOConfig, {"use_weighting": True}, {"train_dataset": pairs()}),
    "grpo": (
        GRPOTrainer,
        GRPOConfig,
        {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 9, "entropy_coef": 0.1},
        {"train_dataset": prompts(), "reward_funcs": reward},
    ),
    "kto": (KTOTrainer, KTOConfig, {}, {"train_dataset": judged()}),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FLOAT32)
def test_float32_against_stock_as_it_is(tmp_path, name, method, saved_model):
    """With TRL's own kernel, which computes in float32: as close to stock in float64 as stock in float32 is."""
    stock, config, options, inputs = FLOAT32[name]
    given = {"arguments": settings(config, tmp_path, **options), "model": saved_model, "drift": 0.01, **inputs, **adapted(method)}
    truth, true_metrics = step_of(stock, **given)
    plain, plain_metrics = step_of(stock, dtype=torch.float32, **given)
    actual, metrics = step_of(STREAMED[stock], dtype=torch.float32, stream=STREAM, **given)
    assert_step_as_exact_as_plain(actual, plain, truth)
    assert_as_exact_as_plain(*map(beside_their_terms, (metrics, plain_metrics, true_metrics)))


def beside_their_terms(metrics: dict) -> dict[str, torch.Tensor]:
    """Metrics as tensors. Rewards are differences of far larger sums, so that one rounding of a sum is many of theirs."""
    sums = [0.1 * value for key, value in metrics.items() if key.startswith("logps/")]  # 0.1 is TRL's default of beta
    return {
        key: torch.tensor([value, *sums] if key.startswith("rewards/") else value, dtype=torch.float64)
        for key, value in metrics.items()
    }


@pytest.mark.parametrize("method", METHODS)
def test_alpha_divergence(tmp_path, method, saved_model):
    """TRL's code for it has no float64, so there is no truth to derive a tolerance from. It subtracts two exponentials that are
    both nearly 1; differences of 5e-6 were seen, and this allows 20 times that. A wrong gradient is off by 1e-3 or more."""
    arguments = settings(DPOConfig, tmp_path, f_divergence_type="alpha_divergence")
    inputs = {"dtype": torch.float32, "drift": 0.01, "train_dataset": pairs(), **adapted(method)}
    assert_equals_stock(DPOTrainer, arguments, saved_model, tolerance=1e-4, **inputs)
