"""What PEFT and DeepSpeed leave on modules is asked for in one file each, and nowhere else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import streamgrad
from lora import with_lora
from streamgrad.hf.libraries.deepspeed import has_zero3_hooks, is_partitioned, ulysses_group
from streamgrad.hf.libraries.peft import PEFT_ADAPTERS, base_model, why_not_in_chunks
from tiny import tiny_model, tokens

SOURCE = Path(streamgrad.__file__).parent
NAMES = {
    "hf/libraries/peft.py": (
        r"_active_adapter|_disable_adapters|merged_adapters|lora_variant|ParamWrapper|(Lily|XLora)Layer|get_base_model"
    ),
    "hf/libraries/deepspeed.py": r"\bds_id|parallel_state_sp|_SEQUENCE_PARALLEL_GROUP",
}


@pytest.mark.parametrize("home", NAMES)
def test_names_of_a_library_are_in_one_file(home):
    files = [path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py") if re.search(NAMES[home], path.read_text())]
    assert [file for file in files if not file.startswith(("trl/", "cli/"))] == [home]


def test_switches_of_an_adapter():
    model = with_lora(tiny_model("llama"))
    adapter = model.get_base_model().model.layers[0].self_attn.q_proj
    before = PEFT_ADAPTERS.state([adapter])
    assert before == PEFT_ADAPTERS.state([adapter])
    adapter.scaling["default"] *= 2.0
    assert PEFT_ADAPTERS.state([adapter]) != before
    adapter.scaling["default"] /= 2.0
    with model.disable_adapter():
        assert PEFT_ADAPTERS.state([adapter]) != before
    assert PEFT_ADAPTERS.state([adapter]) == before
    assert not PEFT_ADAPTERS.state([torch.nn.Linear(2, 2)])


def test_parameters_that_an_adapter_of_experts_restores():
    model = with_lora(tiny_model("qwen3_moe"), target_parameters=["experts.down_proj"])
    layer = model.get_base_model().model.layers[0]
    restored = PEFT_ADAPTERS.versionless(list(layer.modules()))
    (weight,) = (parameter for name, parameter in layer.named_parameters() if name.endswith("down_proj"))
    assert [id(parameter) for parameter in restored] == [id(weight)]


def test_a_model_without_libraries_is_asked_in_vain():
    model = tiny_model("llama")
    assert base_model(model) is None
    assert ulysses_group() is None
    for module in model.modules():
        assert why_not_in_chunks(module) is None
        assert not has_zero3_hooks(module)
    assert not any(map(is_partitioned, model.parameters()))


def test_a_trainable_head_under_zero3_is_refused():
    """Its parameters, which DeepSpeed has marked, would be gathered once a chunk."""
    model = with_lora(tiny_model("qwen3", tie_word_embeddings=False), targets=["q_proj", "lm_head"])
    for parameter in model.get_base_model().lm_head.parameters():
        parameter.ds_id = 1
    streamgrad.enable(model, chunk_size=4)
    with pytest.raises(ValueError, match="in the place of the language-modelling head cannot be streamed under ZeRO-3"):
        model(input_ids=tokens(1, 9), labels=tokens(1, 9))
