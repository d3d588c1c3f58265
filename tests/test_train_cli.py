"""`streamgrad train sft|dpo|grpo`: offline without flags, TRL's flags and YAML with them, and what it says to a wrong one."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTTrainer

from streamgrad.cli import main
from streamgrad.cli.train import letter_e, save_embedded_model
from streamgrad.trl import StreamSFTTrainer
from streamgrad.trl.command import Command

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def train(monkeypatch, capfd):
    """Runs `streamgrad train` with these words and returns its exit code, output and errors."""

    def run(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["streamgrad", "train", *map(str, words)])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capfd.readouterr()
        return exit.value.code, out, err

    return run


def named_columns(tmp_path, **columns: list[str]):
    """A dataset on disk, as `--dataset_name` takes it."""
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def model(tmp_path):
    save_embedded_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("objective", ["sft", "dpo", "grpo"])
def test_without_model_and_dataset(train, tmp_path, objective):
    out = tmp_path / "out"
    code, printed, progress = train(objective, "--output_dir", out, "--max_steps", 2, "--logging_steps", 1)
    assert code == 0
    assert f"Saved: {out}" in printed and "at step 2" in printed
    assert "2/2" in progress, "no progress bar"
    trained, start = (AutoModelForCausalLM.from_pretrained(path) for path in (out, out / "start"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    ids = AutoTokenizer.from_pretrained(out)("Down the rabbit-hole", return_tensors="pt")
    assert trained.generate(**ids, max_new_tokens=3, do_sample=False).shape == (1, ids["input_ids"].shape[1] + 3)


def test_flags_yaml_and_adapters(train, tmp_path, model, monkeypatch):
    """A model, a dataset and evaluation by flags, the rest by YAML, a flag over YAML; adapters load onto the base they name."""
    data = named_columns(tmp_path, prompt=["Alice was ", "So she "], completion=["beginning", "was"])
    config = tmp_path / "run.yaml"
    config.write_text(
        "max_steps: 9\nbf16: false\nuse_peft: true\nlora_target_modules: [q_proj, v_proj]\nchunk_size: 5\nlearning_rate: 1.0e-2\n"
        "report_to: none\nsave_strategy: 'no'\n"
    )
    seen = []
    stock = SFTTrainer.train
    monkeypatch.setattr(StreamSFTTrainer, "train", lambda trainer, **_: seen.append(trainer) or stock(trainer))
    code, printed, _ = train(
        "sft", "--config", config, "--model_name_or_path", model, "--dataset_name", data, "--max_steps", 1, "--keep", "attention",
        "--output_dir", tmp_path / "out", "--eval_strategy", "steps", "--dataset_test_split", "train", "--eval_steps", 1,
        "--logging_steps", 1,
    )  # fmt: skip
    assert code == 0 and "No model given" not in printed and "No dataset given" not in printed
    (trainer,) = seen
    assert trainer.state.global_step == 1 and trainer.args.learning_rate == 1e-2
    stream = trainer.model.get_base_model().forward.before.stream.config
    assert (stream.chunk_size, stream.keep) == (5, "attention")
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert adapted.peft_config["default"].target_modules == {"q_proj", "v_proj"}


def test_grpo_with_a_reward_by_path(train, tmp_path, model):
    data = named_columns(tmp_path, prompt=["Alice was ", "So she "])
    flags = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", tmp_path / "out", "--max_steps", 1]
    small = ["--num_generations", 4, "--max_completion_length", 4, "--bf16", "false", "--report_to", "none", "--logging_steps", 1]
    code, _, _ = train(
        "grpo", *flags, *small, "--reward_funcs", "streamgrad.cli.train.letter_e", "--per_device_train_batch_size", 4
    )
    assert code == 0
    for rewards, message in (
        ([], "grpo needs a reward"),
        (["--reward_funcs", "acuracy_reward"], "'acuracy_reward' is none of TRL's .*think_format_reward"),
        (["--reward_funcs", "streamgrad.cli.train.letter_f"], "letter_f.* could not be imported"),
    ):
        code, _, _ = train("grpo", *flags, *small, *rewards)
        assert re.search(message, str(code))
    assert letter_e(["eel", "", "x"]) == [2 / 3, 0, 0]


def test_help_is_that_of_trl(train):
    code, out, _ = train("dpo", "--help")
    assert code == 0
    for flag in ("--loss_type", "--precompute_ref_log_probs", "--lora_r", "--dataset_name", "--head_chunk_size", "--offload"):
        assert flag in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "--chunk_size", "0"], "chunk_size=0"),
        (["sft", "--keep", "everything"], "keep='everything' is not a choice"),
        (["sft", "--config", "nowhere.yaml"], "could not be read.*nowhere.yaml"),
        (["dpo", "--bf16", "false", "--loss_type", "sigmoidal", "--max_steps", "1"], "Unknown loss type: sigmoidal"),
        (["ppo"], None),
        (["sft", "--no_such_flag", "1"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be(train, tmp_path, words, message):
    """One line for what a command asks; the usage, and exit code 2, for a command that does not exist."""
    code, _, err = train(*words, *(["--output_dir", tmp_path] if words[0] != "ppo" else []))
    if message is None:
        assert code == 2 or "no_such_flag" in str(code) + err
    else:
        assert str(code).startswith("streamgrad: ")
        assert "\n" not in str(code).strip()
        assert re.search(message, str(code))


def test_a_dataset_without_the_columns(train, tmp_path, model):
    data = named_columns(tmp_path, prompt=["a", "b"], chosen=["c", "d"])
    flags = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", tmp_path / "out", "--bf16", "false"]
    code, _, _ = train("dpo", *flags)
    assert "columns prompt, chosen" in str(code) and "'rejected'" in str(code)
    code, _, _ = train("sft", *flags, "--dataset_train_split", "all")
    assert "no split 'all', only train" in str(code)


def test_an_unknown_objective():
    with pytest.raises(ValueError, match="'ppo' is not an objective. Pass one of sft, dpo, grpo"):
        Command.parse("ppo", [])
