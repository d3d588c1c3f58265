"""`streamgrad train OBJECTIVE`: offline without flags, TRL's flags and YAML with them, and what it says to a wrong one."""

from __future__ import annotations

import importlib
import json
import re
import sys

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import SFTTrainer

from streamgrad.cli import main
from streamgrad.cli.train import letter_e, save_embedded_model
from streamgrad.trl import StreamSFTTrainer
from streamgrad.trl.command import OBJECTIVES, Command

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
    folder.mkdir(parents=True)
    rows = [json.dumps(dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]
    (folder / "train.jsonl").write_text("\n".join(rows))
    return folder


@pytest.fixture
def model(tmp_path):
    save_embedded_model(tmp_path / "model")
    return tmp_path / "model"


def test_qlora_as_documented(train, tmp_path, monkeypatch):
    """docs/trainers.md has these words."""
    library = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install 'streamgrad[quantized]'")
    products, stock = [], library.matmul_4bit
    monkeypatch.setattr(library, "matmul_4bit", lambda *args, **options: (products.append(0), stock(*args, **options))[1])
    monkeypatch.chdir(tmp_path)
    code, printed, _ = train("sft", "--load_in_4bit", "--use_peft", "--max_steps", 10)
    assert code == 0 and "at step 10" in printed
    assert len(products) >= 10 * 2 * 3 * 7, "the three layers have seven quantised weights each"
    trained = load_file(tmp_path / "out/sft/adapter_model.safetensors")
    assert all(tensor.any() for name, tensor in trained.items() if "lora_B" in name), "an adapter has not been trained"


@pytest.mark.parametrize("objective", ["sft", "dpo", "grpo", "kto", "rloo", "distillation"])
def test_without_model_and_dataset(train, tmp_path, objective):
    out = tmp_path / "out"
    code, printed, progress = train(objective, "--output_dir", out, "--max_steps", 2, "--logging_steps", 1)
    assert code == 0
    assert f"Saved: {out}" in printed and "at step 2" in printed
    assert printed.splitlines()[-1].startswith("Peak memory: ")
    assert "2/2" in progress, "no progress bar"
    trained, start = (AutoModelForCausalLM.from_pretrained(path) for path in (out, out / "start"))
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))
    ids = AutoTokenizer.from_pretrained(out)("Down the rabbit-hole", return_tensors="pt")
    assert trained.generate(**ids, max_new_tokens=3, do_sample=False).shape == (1, ids["input_ids"].shape[1] + 3)


def test_a_reward_model(train, tmp_path):
    """It loads as what it is, full and as an adapter, in which the head is trained along."""
    for flags in ([], ["--use_peft", "--lora_target_modules", "q_proj", "v_proj"]):
        out = tmp_path / f"out{len(flags)}"
        code, printed, _ = train("reward", "--output_dir", out, "--max_steps", 2, "--logging_steps", 1, *flags)
        assert code == 0 and f"Saved: {out}" in printed and "at step 2" in printed
        kind = AutoPeftModelForSequenceClassification if flags else AutoModelForSequenceClassification
        scorer = kind.from_pretrained(out, num_labels=1)
        assert scorer(torch.tensor([[5, 6, 7]])).logits.shape == (1, 1)
    assert "score" in scorer.peft_config["default"].modules_to_save


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
    stream = trainer.model.get_base_model().forward.stream.config
    assert (stream.chunk_size, stream.keep) == (5, "attention")
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    adapted = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert adapted.peft_config["default"].target_modules == {"q_proj", "v_proj"}


def test_grpo_with_a_reward_by_path(train, tmp_path, model):
    data = named_columns(tmp_path, prompt=["Alice was ", "So she "])
    flags = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", tmp_path / "out", "--max_steps", 2]
    small = ["--num_generations", 4, "--max_completion_length", 4, "--bf16", "false", "--report_to", "none", "--logging_steps", 1]
    batch = ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 1, "--num_iterations", 2]
    code, printed, _ = train("grpo", *flags, *small, *batch, "--reward_funcs", "streamgrad.cli.train.letter_e")
    assert code == 0 and re.search("reward: .* at step 1, .* at step 1\n", printed), "the second step has none"
    for rewards, message in (
        ([], "grpo needs a reward"),
        (
            ["--reward_funcs", "acuracy_reward"],
            r"'acuracy_reward' is not one of TRL's \(accuracy_reward, reasoning_accuracy_reward, think_format_reward, get_soft",
        ),
        (["--reward_funcs", "streamgrad.cli.train.letter_f"], "letter_f.* could not be imported"),
    ):
        code, _, _ = train("grpo", *flags, *small, *rewards)
        assert re.search(message, str(code))
    assert letter_e(["eel", "", "x"]) == [2 / 3, 0, 0]


def test_distillation_from_a_teacher_by_name(train, tmp_path, model):
    """With LoRA on the student; a teacher is needed, and one that is there."""
    data = named_columns(tmp_path, prompt=["Alice was ", "So she "])
    save_embedded_model(tmp_path / "teacher", seed=1)
    flags = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", tmp_path / "out", "--max_steps", 1]
    small = ["--max_completion_length", 4, "--bf16", "false", "--report_to", "none", "--logging_steps", 1]
    small += ["--per_device_train_batch_size", 2, "--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
    code, out, _ = train("distillation", *flags, *small, "--teacher_model_name_or_path", tmp_path / "teacher")
    assert code == 0 and "loss: " in out
    for more, message in (
        ([], "distillation needs a teacher. Pass --teacher_model_name_or_path"),
        (["--teacher_model_name_or_path", "./nowhere"], "model='./nowhere': there is no such directory"),
    ):
        assert message in str(train("distillation", *flags, *small, *more)[0])


def test_help_begins_with_streamgrads_flags(train):
    """TRL's own are short, by name only where most runs leave them alone, and described by --help_all."""
    code, out, _ = train("dpo", "--help")
    assert code == 0 and len(out.splitlines()) < 200
    for flag in ("--loss_type", "--precompute_ref_log_probs", "--lora_r", "--dataset_name", "--head_chunk_size", "--offload"):
        assert flag in out
    own, often, others = (
        out.index(title) for title in ("streamgrad's flags:", "TRL's flags:", "All other flags, which --help_all describes:")
    )
    assert own < out.index("--chunk_size CHUNK_SIZE") < often < out.index("--model_name_or_path MODEL") < others
    assert out.index("--precompute_ref_log_probs") > others
    # Defaults are those of a run with a model; those of the tiny one are said once, above.
    words = " ".join(out.split())
    assert "processes at a time, or auto. (default: auto)" in words and "(default: 60)" not in words
    assert re.search(
        "Without --model_name_or_path a tiny model is trained, with defaults of its own: .* max_steps 60, .*64", words
    )
    code, whole, _ = train("dpo", "--help_all")
    assert code == 0 and "--precompute_ref_log_probs [PRECOMPUTE" in whole and len(whole.splitlines()) > 400


def test_a_misspelt_flag_gets_a_suggestion(train):
    code, _, err = train("sft", "--lerning_rate", "1e-4", "--max_stepz=3")
    assert code == 2 and "no such option: --lerning_rate 1e-4 --max_stepz=3. Did you mean --learning_rate and --max_steps?" in err


def test_a_cpu_trains_in_float32_unless_told_otherwise(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "--model_name_or_path", str(tmp_path)]
    assert Command.parse("sft", words).training.bf16 is False
    assert Command.parse("sft", [*words, "--bf16", "true"]).training.bf16 is True
    assert Command.parse("sft", [*words, "--bf16"]).training.bf16 is True
    (tmp_path / "run.yaml").write_text("use_cpu: true")
    assert Command.parse("sft", [*words[:2], "--config", str(tmp_path / "run.yaml")]).training.bf16 is False


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_prompts_are_shared_unless_told_otherwise(train, tmp_path, objective, monkeypatch):
    trainer, *_ = OBJECTIVES[objective]
    seen = []
    monkeypatch.setattr(trainer, "train", lambda trainer, **_: seen.append(trainer.share_prompts))
    for number, flags in enumerate(([], ["--share_prompts", "false"], ["--share_prompts", "true"])):
        code, _, _ = train(objective, "--output_dir", tmp_path / str(number), *flags)
        assert code == 0
    assert seen == [True, False, True]


def test_sharing_is_an_option_of_trainers_with_prompts(train):
    for objective, is_there in (("grpo", True), ("rloo", True), ("sft", False), ("reward", False)):
        _, out, _ = train(objective, "--help")
        assert ("--share_prompts" in out) is is_there, objective
    code, _, printed = train("sft", "--share_prompts", "false")
    assert code == 2 and "no such option: --share_prompts false" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "--chunk_size", "0"], "chunk_size=0"),
        (["sft", "--keep", "everything"], "keep must be one of .*, got 'everything'"),
        (["sft", "--config", "nowhere.yaml"], "could not be read.*nowhere.yaml"),
        (["sft", "--config"], "--config needs a file name"),
        (["sft", "--chunk_size", "1.5"], "chunk_size='1.5' is not a number of tokens"),
        (["sft", "--memory_budget", "80"], "memory_budget: '80' is not an amount of memory"),
        (["dpo", "--beta", "nan"], "beta must be finite, got nan"),
        (["dpo", "--beta", "inf"], "beta must be finite, got inf"),
        (["sft", "--learning_rate", "inf"], "learning_rate must be finite, got inf"),
        (["sft", "--weight_decay", "nan"], "weight_decay must be finite, got nan"),
        (["sft", "--max_grad_norm", "nan"], "max_grad_norm must be finite, got nan"),
        (["grpo", "--reward_weights", "1.0", "nan"], r"reward_weights must be finite, got \[1.0, nan\]"),
        (["sft", "--max_length", "0"], "max_length must be a whole number .* got 0"),
        (["sft", "--gradient_accumulation_steps", "0"], "gradient_accumulation_steps must be a whole number .* got 0"),
        (["sft", "--gradient_accumulation_steps", "-1"], "gradient_accumulation_steps must be a whole number .* got -1"),
        (["sft", "--use_peft", "true", "--lora_r", "9" * 30], "lora_r must be a whole number .* got 9+"),
        (["sft", "--pad_to_multiple_of", "0"], "pad_to_multiple_of must be a whole number .* got 0"),
        (["sft", "--max_steps", "0", "--num_train_epochs", "0"], "max_steps=0 and num_train_epochs=0.0 leave no step to train"),
        (["sft", "--max_steps", "0"], "max_steps=0 and num_train_epochs=3.0 leave no step .* Pass max_steps above 0, or leave"),
        (["dpo", "--max_length", "4"], "no example has anything left to train on at max_length=4. Pass a larger one"),
        (["sft", "--save_steps", "-3"], "save_steps=-3.* must be above 0"),
        (["sft", "--model_init_kwargs", "5"], "model_init_kwargs='5' must be a JSON object"),
        (["sft", "--accelerator_config", "nowhere.json"], "could not be read.*nowhere.json"),
        (["kto", "--desirable_weight", "nan"], "desirable_weight must be finite, got nan"),
        (["grpo", "--num_generations", "0"], "a count such as --num_generations is 0"),
        (["grpo", "--num_iterations", "0"], "num_iterations must be a whole number .* got 0"),
        (["sft", "--model_name_or_path", "./nomodel", "--bf16", "false"], "model='./nomodel': there is no such directory"),
        (["sft", "--model_name_or_path", "./nomodel"], "model='./nomodel': there is no such directory"),
        (["sft", "--model_name_or_path", "qwen3-8b"], "'qwen3-8b' is a preset, a shape without weights"),
        (["sft", "--model_name_or_path", "Llama-3.1-8B"], "'Llama-3.1-8B' is a preset, .* owner: meta-llama/Llama-3.1-8B"),
        (["sft", "--model_name_or_path", "Qwen/Qwen3-8B", "--bf16", "false"], "without a dataset to train it on"),
        (["sft", "--dataset_name", "./nodata"], "dataset './nodata': there is no such file or directory"),
        (["dpo", "--bf16", "false", "--loss_type", "sigmoidal", "--max_steps", "1"], "Unknown loss type: sigmoidal"),
        (["sft", "--load_in_4bit"], "--load_in_4bit keeps weights that cannot be trained.* Pass --use_peft"),
        (["orpo"], "there is no command for orpo, .* streamgrad.objectives.dpo_loss, .*docs/trainers.md.* sft, dpo, grpo"),
        (["ppo"], None),
        (["sft", "--no_such_flag", "1"], None),
        (["sft", "--dtype", "int8"], None),
        (["sft", "--lerning_rate", "1"], None),
        (["sft", "--max_steps", "nan"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be(train, tmp_path, words, message):
    """One line for what a command asks; the usage, and exit code 2, for a command or an option that does not exist."""
    code, _, err = train(words[0], *(["--output_dir", tmp_path] if words[0] != "ppo" else []), *words[1:])
    if message is None:
        assert code == 2 and words[-2:][0].strip("-") in err and err.count("\n") < 10, "no list of all flags"
    else:
        assert str(code).startswith("streamgrad: ")
        assert "\n" not in str(code).strip()
        assert re.search(message, str(code))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"max_steps: [1\nbf16: }", "is not YAML: .*line 2"),
        (b"\xff\xfe\x00", "could not be read: .*can't decode byte 0xff"),
        (b"- max_steps", "must contain a YAML mapping"),
        (b"max_stepps: 1", "has options that do not exist: --max_stepps. Did you mean --max_steps\\?"),
        (b"beta1: 3\nweight_decay: .nan", "has options that do not exist: --beta1"),
        (b"weight_decay: .nan", "weight_decay must be finite, got nan"),
    ],
    ids=["broken", "binary", "list", "unknown key", "unknown key and no number", "no number"],
)
def test_a_yaml_file_that_cannot_be_used(train, tmp_path, content, message):
    (tmp_path / "run.yaml").write_bytes(content)
    code, _, _ = train("sft", "--config", tmp_path / "run.yaml")
    assert re.fullmatch(f"streamgrad: .*{message}.*", str(code)), code


def test_a_model_that_is_not_one(train, tmp_path):
    """A directory without a configuration, one of adapters, an encoder-decoder, and a configuration that names no class."""
    folder = tmp_path / "model"
    folder.mkdir()
    flags = ["sft", "--model_name_or_path", folder, "--dataset_name", "none", "--bf16", "false", "--output_dir", tmp_path / "out"]
    assert "has no configuration that transformers can load" in str(train(*flags)[0])
    (folder / "adapter_config.json").touch()
    assert "It has adapters alone: pass the model they adapt, or merge them" in str(train(*flags)[0])
    AutoConfig.for_model("t5").save_pretrained(folder)
    assert "a t5 model is not a causal language model: it is an encoder-decoder" in str(train(*flags)[0])
    (folder / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "code.MyConfig"}}')
    assert "has no model_type 'mine'. Pass --trust_remote_code to run it." in str(train(*flags)[0])
    AutoConfig.for_model("qwen3").save_pretrained(folder)
    assert "has no architectures" in str(train(*flags)[0])


def test_a_dataset_that_cannot_be_read(train, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    folder.mkdir()
    flags = ["sft", "--dataset_name", folder, "--output_dir", tmp_path / "out"]
    assert re.fullmatch("streamgrad: dataset .*data could not be loaded: .*any data files. Pass a JSON.*", str(train(*flags)[0]))
    (folder / "train.jsonl").write_text('{"text": "a"}\nnot json')
    assert "data could not be loaded: JSON parse error: Invalid value" in str(train(*flags)[0])
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, _ = train("sft", "--dataset_name", "nobody/nothing", "--output_dir", tmp_path / "out")
    assert "dataset nobody/nothing could not be loaded: Couldn't reach" in str(code)


def test_a_dataset_without_the_columns(train, tmp_path, model):
    data = named_columns(tmp_path, prompt=["a", "b"], chosen=["c", "d"])
    flags = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", tmp_path / "out", "--bf16", "false"]
    code, _, _ = train("dpo", *flags)
    assert "columns prompt, chosen. dpo takes 'chosen' and 'rejected'; or" in str(code)
    code, _, _ = train("sft", *flags, "--dataset_train_split", "all")
    assert "no split 'all', only train" in str(code)


def test_errors_of_other_libraries_are_one_line(train, tmp_path, model, monkeypatch):
    """TRL's on data, safetensors' on a torn file, and transformers' on an option."""
    lists, texts = (named_columns(tmp_path / name, text=column) for name, column in (("a", [[5], [6]]), ("b", ["c", "d"])))
    flags = ["sft", "--output_dir", tmp_path / "out", "--bf16", "false", "--report_to", "none", "--max_steps", 1]
    named = [*flags, "--model_name_or_path", model]
    begins = "streamgrad: sft cannot begin with model='{}' and a dataset with the columns text: {}.* Pass a directory that .*"
    assert re.fullmatch(begins.format(model, "AttributeError: 'list' object"), str(train(*named, "--dataset_name", lists)[0]))
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert re.fullmatch(begins.format(model, "SafetensorError: "), str(train(*named, "--dataset_name", texts)[0]))
    code = train(*flags, "--metric_for_best_model", "foo", "--eval_strategy", "steps", "--eval_steps", 1)[0]
    assert re.fullmatch("streamgrad: training failed: KeyError: .*eval_foo.* Change the option .*", str(code))


def test_errors_of_a_reward_keep_their_traceback(train, tmp_path, monkeypatch):
    """They are about code of the user's, which only the traceback locates."""
    lines = ["def broken(**_):", "    return {}['score']", "def unread(**_):", "    return int('seven')"]
    (tmp_path / "my_rewards.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["streamgrad", "train", "grpo", "--max_steps", "1", "--reward_funcs", "my_rewards.broken"])
    with pytest.raises(KeyError, match="score"):
        main()
    code, _, err = train("grpo", "--max_steps", 1, "--reward_funcs", "my_rewards.unread")  # which may also be about an option
    assert str(code).startswith("streamgrad: invalid literal for int()") and 'my_rewards.py", line 4, in unread' in err
    assert "'os.path' is a module. Pass the path of a function" in str(train("grpo", "--reward_funcs", "os.path")[0])


def test_an_unknown_objective():
    with pytest.raises(ValueError, match="'ppo' is not an objective. Pass one of sft, dpo, grpo, kto, reward, rloo"):
        Command.parse("ppo", [])


def test_a_bound_may_be_infinite(tmp_path):
    words = ["--output_dir", str(tmp_path), "--bf16", "false", "--max_grad_norm", "inf", "--epsilon_high", "inf"]
    assert Command.parse("grpo", words).training.epsilon_high == float("inf")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bf16")
def test_bf16_without_a_gpu_says_which_flags_help(train, tmp_path, model):
    code, _, _ = train("sft", "--model_name_or_path", model, "--output_dir", tmp_path / "out")
    assert re.fullmatch("streamgrad: bf16 is the default and needs a GPU .* Pass --use_cpu .*, or --bf16 false.", code)


def test_an_old_trl_is_named_as_the_cause(train, monkeypatch):
    """Up to 1.14, trl has neither such a function nor what it returns."""
    for name in [name for name in sys.modules if name.startswith("streamgrad.trl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("trl.trainer.utils.FusedCausalLMOutput")
    monkeypatch.delattr("trl.trainer.sft_trainer.add_fused_lm_head")
    with pytest.raises(ImportError, match=r"add_fused_lm_head, .* trl .* do not have.*needs trl 1.15 .*trl>=1.15,<"):
        importlib.import_module("streamgrad.trl")
    code, _, _ = train("sft", "--max_steps", "1")
    assert re.fullmatch(r"streamgrad: .*trl .* do not have.*pip install .trl>=1.15,<1.17.", str(code))
