"""A refused trainer leaves what it was given as it was, so that the advised retry works; `disable` undoes one that was made."""

from __future__ import annotations

import pytest
import torch
from trl import SFTConfig

import streamgrad
from streamgrad import StreamConfig
from streamgrad.hf.unusable import NoLogits
from streamgrad.trl import StreamSFTTrainer, trainers
from tiny import tiny_model
from trainer_kinds import KINDS, REFERENCED, SAMPLED, SCORING, STREAM, build, model_kind
from trainers import first_step, lora, pairs, settings, texts, tokenizer

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def state(model) -> dict[str, object]:
    """Everything that a refused trainer might leave behind: attributes of each module, hooks, weights and configurations."""
    found: dict[str, object] = {"enabled": streamgrad.is_enabled(model), "forward": model.forward}
    for path, module in model.named_modules():
        found[path] = (module, dict(vars(module)), {k: list(v.items()) for k, v in vars(module).items() if isinstance(v, dict)})
        for config in (getattr(module, name, None) for name in ("config", "generation_config")):
            if config is not None:
                found[f"{path} {type(config).__name__}"] = (config, config.to_dict(), dict(vars(config)))
    for path, weight in model.named_parameters():
        found[f"{path} weight"] = (weight.requires_grad, weight.dtype, weight.tolist())
    return found


def refused_late(monkeypatch):
    """Let the last thing that a constructor does raise."""

    def raising(trainer):
        raise ValueError("refused at the end")

    monkeypatch.setattr(trainers, "prepare_shared_sequences", raising)


def tiny(family: str = "qwen3", **changes):
    return tiny_model(family, dtype=torch.float32, **changes)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_late_refusal_leaves_no_trace(tmp_path, monkeypatch, name, method, enabled):
    model = tiny("llama", attention_dropout=0.25, **model_kind(name))
    model.config.pad_token_id = 5
    if enabled:
        streamgrad.enable(model, STREAM)
    extra = {"ref_model": tiny("llama", seed=3)} if name in REFERENCED and method == "full" else {}
    if name == "distillation":
        extra = {"teacher_model": tiny("llama", seed=3)}
    more = ({} if name == "sft" else {"disable_dropout": True}) | ({"beta": 0.0} if name in SAMPLED else {})
    before = [state(given) for given in (model, *extra.values())]
    refused_late(monkeypatch)
    with pytest.raises(ValueError, match="refused at the end"):
        build(name, tmp_path, model, streamed=True, method=method, extra=extra, **more)
    assert [state(given) for given in (model, *extra.values())] == before
    if enabled and name in SCORING:
        ids = torch.arange(9)[None]
        assert isinstance(model(input_ids=ids, labels=ids).logits, NoLogits), "no longer streamed"


def test_weights_get_back_their_precision_and_their_rows(tmp_path, monkeypatch):
    """GRPO widens the head for `cast_lm_head_to_fp32`; a chat template may add rows to the embeddings."""
    model = tiny("llama", tie_word_embeddings=False).to(torch.bfloat16)
    before = state(model)

    def raising(trainer):
        assert trainer.model.lm_head.weight.dtype == torch.float32
        trainer.model.resize_token_embeddings(model.config.vocab_size + 3)
        raise ValueError("refused at the end")

    monkeypatch.setattr(trainers, "prepare_shared_sequences", raising)
    with pytest.raises(ValueError, match="refused at the end"):
        build("grpo", tmp_path, model, streamed=True, cast_lm_head_to_fp32=True, beta=0.0)
    assert state(model) == before


def not_causal(model):
    model.config.is_causal = False


@pytest.mark.parametrize(
    ("prepare", "options", "extra", "message"),
    [
        (None, {"loss_type": "nllll"}, {"peft_config": lora()}, "nllll"),
        (None, {}, {"peft_config": lora(target_modules=["lm_head"])}, "adapter to `lm_head`"),
        (None, {"activation_offloading": True}, {}, "activation_offloading=True"),
        (not_causal, {}, {}, "bidirectional"),
        (lambda model: streamgrad.enable(model, chunk_size=3), {}, {}, "already enabled with .*chunk_size=3"),
        (None, {"max_length": 4, "padding_free": True}, {}, "max_length"),
        (None, {}, {"peft_config": type(lora())}, "peft_config"),
    ],
    ids=["loss", "lora head", "offloading", "bidirectional", "enabled", "padding-free", "a class"],
)
def test_whatever_is_refused_leaves_no_trace(tmp_path, prepare, options, extra, message):
    """By TRL or by streamgrad: the model, its arguments, its adapters and its tokenizer."""
    model, words, arguments = tiny("llama"), tokenizer(), settings(SFTConfig, tmp_path, **options)
    if prepare:
        prepare(model)
    words.pad_token = None
    given = [arguments, *(value for value in extra.values() if not isinstance(value, type))]
    before = state(model), [dict(vars(each)) for each in given]
    with pytest.raises((ValueError, TypeError), match=message):
        StreamSFTTrainer(model=model, args=arguments, processing_class=words, train_dataset=texts(), stream=STREAM, **extra)
    assert (state(model), [dict(vars(each)) for each in given]) == before
    assert words.pad_token is None


def test_a_reward_model_that_cannot_be_streamed(tmp_path):
    """It is enabled last of all, when TRL has changed it."""
    model = tiny("llama", **model_kind("reward"))
    not_causal(model)
    before = state(model)
    with pytest.raises(ValueError, match="LlamaForSequenceClassification cannot be streamed: .*bidirectional"):
        build("reward", tmp_path, model, streamed=True, method="lora")
    assert state(model) == before


def test_columns_that_are_missing(tmp_path):
    models = [tiny(), tiny(seed=3)]
    before = [state(model) for model in models]
    extra = {"ref_model": models[1], "eval_dataset": pairs().remove_columns("rejected")}
    with pytest.raises(KeyError, match="rejected"):
        build("dpo", tmp_path, models[0], streamed=True, extra=extra)
    assert [state(model) for model in models] == before


@pytest.mark.parametrize("name", KINDS)
def test_disable_after_a_trainer_restores_forward(tmp_path, name):
    """A trainer's forward goes with the streamed one, and a second trainer's takes the place of the first one's."""
    model = tiny(**model_kind(name))
    extra = {"ref_model": tiny(seed=3)} if name in REFERENCED else {}
    more = {"beta": 0.0} if name in SAMPLED else {}
    for chunk_size in (7, 5):
        for _ in range(2):
            trainer = build(name, tmp_path, model, streamed=True, stream=StreamConfig(chunk_size=chunk_size), extra=extra, **more)
        assert first_step(trainer)[0].loss.isfinite()
        for network in (model, *extra.values()):
            streamgrad.disable(network)
            for module in (network, network.get_decoder()):
                assert "forward" not in vars(module) and "_streamgrad" not in vars(module)
    if name in SCORING:
        ids = torch.arange(9)[None]
        assert not isinstance(model(input_ids=ids, labels=ids).logits, NoLogits)
