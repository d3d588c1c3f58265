"""Options that need a package which is not installed: one line, with the command that installs it, before a model is loaded."""

from __future__ import annotations

import pytest
from trl import GRPOConfig, ModelConfig

from streamgrad.trl import requirements
from streamgrad.trl.requirements import check_installed


def training(tmp_path, **options):
    return GRPOConfig(**{"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"} | options)


@pytest.mark.parametrize(
    ("options", "of_model", "message"),
    [
        ({"report_to": "wandb"}, {}, "--report_to wandb needs wandb, .*pip install wandb, or pass --report_to none"),
        ({"report_to": ["comet_ml"]}, {}, "pip install comet-ml"),
        ({"report_to": "tensorboard"}, {}, "pip install tensorboard"),
        ({"use_liger_kernel": True}, {}, "--use_liger_kernel needs liger-kernel, .*pip install liger-kernel, or leave it out"),
        ({"optim": "paged_adamw_8bit"}, {}, "--optim paged_adamw_8bit needs bitsandbytes, .*pip install bitsandbytes"),
        ({"use_vllm": True}, {}, "pip install vllm"),
        ({}, {"load_in_4bit": True}, "--load_in_4bit needs bitsandbytes, .*pip install bitsandbytes"),
        ({}, {"use_peft": True}, "pip install peft"),
        ({}, {"attn_implementation": "flash_attention_2"}, "pip install flash-attn, or leave it out: --attention"),
    ],
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, options, of_model, message):
    given = training(tmp_path, **options), ModelConfig(**of_model)
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=message):
        check_installed(*given)
    monkeypatch.setattr(requirements, "find_spec", lambda _: object())
    check_installed(*given)


def test_nothing_is_needed_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    check_installed(training(tmp_path), ModelConfig())
