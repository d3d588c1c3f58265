"""`streamgrad train` under torchrun and `accelerate launch`, on two processes: the model of one process on the same batches.

By hand with the same commands, not here: the configurations ddp and zero2, and every objective under each engine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from accelerate import DistributedType, ParallelismConfig
from transformers import AutoModelForCausalLM
from trl import DPOTrainer, KTOTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from gradients import more, worst_gradient_error
from launching import CONFIGS, ON_CPU, ROOT, TORCHRUN, run
from streamgrad.cli import main
from streamgrad.trl import StreamGRPOTrainer
from streamgrad.trl.shared_sequences import SlicedCollator, prepare_shared_sequences

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

BATCH = 4
ROWS = 4 * BATCH  # epochs of 4 batches, with one process, with two that have half of each, and with two that share them
STEPS = 2 * ROWS // BATCH  # two whole epochs: one step less in either would be seen
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was the "
# Plain SGD, so that weights differ by what gradients do. 65 tokens: two ranks that share a sequence have to pad it.
SETTINGS = {
    "max_steps": STEPS, "logging_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e9,
    "max_length": 65, "learning_rate": 0.1, "chunk_size": 16,
}  # fmt: skip


def flags(**options: object) -> list[object]:
    return [word for name, value in (SETTINGS | options).items() for word in (f"--{name}", value)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    """Datasets on disk, by objective."""
    texts = [TEXT[3 * row : 3 * row + 70] for row in range(ROWS)]
    pairs = [{"prompt": text[:20], "chosen": text[20:], "rejected": text[:19:-1]} for text in texts]
    folders = {}
    for objective, rows in (("sft", [{"text": text} for text in texts]), ("dpo", pairs)):
        folders[objective] = tmp_path_factory.mktemp(objective)
        (folders[objective] / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folders


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """What one process makes of each objective; the folder has `start`, the model that it began with."""
    made: dict[str, Path] = {}

    def train(objective: str) -> Path:
        if objective not in made:
            out = tmp_path_factory.mktemp(f"alone-{objective}")
            options = flags(per_device_train_batch_size=BATCH, dataset_name=data[objective], output_dir=out)
            line = ["streamgrad", "train", objective, *map(str, options)]
            with mock.patch("sys.argv", line), pytest.raises(SystemExit) as exit:
                main()
            assert exit.value.code == 0
            moved, _ = worst_gradient_error(weights(out / "start"), weights(out))
            assert moved > 0.05, "training hardly moved, so nothing would be compared"
            made[objective] = out
        return made[objective]

    return train


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_run(done, objective: str, out: Path, expected: Path, engine: str) -> None:
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("No model given") == done.stdout.count(f"Saved: {out}") == 1, "not by the main process alone"
    assert done.stdout.count(f"at step {STEPS}\n") == done.stdout.count(f"\nTrained by 2 processes: {engine}\n") == 1
    assert done.stdout.count("'train_runtime'") == 1
    assert done.stderr.count("Tokenizing train dataset: 100%") == 1
    models = {"sft": 1, "dpo": 2}[objective]  # DPO has a reference
    assert done.stderr.count("Loading weights: 100%") <= models  # under ZeRO-3 transformers shows no bar
    worst, name = worst_gradient_error(weights(out), weights(expected))
    # Weights after eight steps in float32: 1.4e-7 was seen. They have moved by 0.05 and more, so that a gradient which is off by
    # a thousandth would show as 5e-5.
    assert worst < 1e-5, f"{name} is off by {worst:.1e}"


@more
def test_torchrun(data, alone, tmp_path):
    options = flags(per_device_train_batch_size=BATCH // 2, dataset_name=data["sft"], output_dir=tmp_path)
    done = run(*TORCHRUN, "-m", "streamgrad", "train", "sft", *options)
    check_run(done, "sft", tmp_path, alone("sft"), "MULTI_CPU")


@pytest.mark.parametrize(
    ("config", "objective", "engine", "batch"),
    [
        ("fsdp2", "sft", "FSDP", BATCH // 2),
        ("zero3", "dpo", "DEEPSPEED", BATCH // 2),  # unless layers are leaf modules, of policy and reference, it is refused
        pytest.param("ulysses", "sft", "DEEPSPEED", BATCH, marks=more),
        ("ulysses", "dpo", "DEEPSPEED", BATCH),
    ],
)
def test_accelerate_launch(data, alone, tmp_path, config, objective, engine, batch):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yaml", "--main_process_port", "0"]
    # In fp32 and without clipping, to be comparable.
    launcher += ["--mixed_precision", "no", *(["--gradient_clipping", "1e9"] if engine == "DEEPSPEED" else []), ON_CPU]
    options = flags(per_device_train_batch_size=batch, dataset_name=data[objective], output_dir=tmp_path, use_cpu="false")
    done = run(*launcher, ROOT / "src" / "streamgrad" / "__main__.py", "train", objective, *options)
    check_run(done, objective, tmp_path, alone(objective), engine)


def test_a_failing_rank_ends_the_job_with_its_message(tmp_path):
    """The other rank waits for the rewards of all at that moment; `run` raises if the job does not end."""
    small = ["--num_generations", 4, "--max_completion_length", 4, "--reward_funcs", "failing_rank_reward.reward"]
    done = run(*TORCHRUN, "-m", "streamgrad", "train", "grpo", "--output_dir", tmp_path, "--max_steps", 2, *small)
    assert done.returncode != 0
    assert "[rank1]: streamgrad: no reward for you\n" in done.stderr
    assert "[rank0]: rank 1 has failed: ValueError: no reward for you\n" in done.stderr
    assert "[rank0]: streamgrad:" not in done.stderr and "Saved:" not in done.stdout


@pytest.mark.parametrize(
    ("environment", "words", "message"),
    [
        ({"WORLD_SIZE": "2"}, ["--use_cpu", "false"], "2 processes were started, .* each would train alone. Pass --use_cpu"),
        ({"ACCELERATE_USE_FSDP": "true"}, [], "asked for FSDP, .* torch sees none"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, [], "asked for DEEPSPEED, .* torch sees none"),
    ],
    ids=["processes alone", "fsdp", "deepspeed"],
)
def test_a_launch_without_gpus_is_refused(environment, words, message, tmp_path, monkeypatch):
    """Accelerate would train with something else than was asked for, and say nothing."""
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["streamgrad", "train", "sft", "--output_dir", str(tmp_path), *words])
    with pytest.raises(SystemExit, match=f"streamgrad: .*{message}"):
        main()
    assert not list(tmp_path.iterdir()), "it began all the same"


def shared(trainer_type: type, *, zero: dict | None = None, **attributes: object) -> SimpleNamespace:
    """What `prepare_shared_sequences` reads of a trainer under sp_size=2, and under ZeRO-3 unless `zero` is its configuration."""
    parallelism = ParallelismConfig(sp_size=2, sp_backend="deepspeed")
    trainer = object.__new__(trainer_type)
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero or {"stage": 3}})
    state = {"distributed_type": DistributedType.DEEPSPEED, "num_processes": 2, "state": SimpleNamespace(deepspeed_plugin=plugin)}
    trainer.__dict__.update(accelerator=SimpleNamespace(parallelism_config=parallelism, **state), **attributes)
    return trainer


def test_trainers_that_share_no_sequences():
    with pytest.raises(ValueError, match="sp_size=2 lets .* SFT, DPO, GRPO and RLOO only, and this is a KTOTrainer.*whole_seq"):
        prepare_shared_sequences(shared(KTOTrainer))


@pytest.mark.parametrize("zero", [{"stage": 2}, {"stage": 3, "reduce_scatter": False}], ids=str)
@pytest.mark.parametrize("trainer_type", [DPOTrainer, StreamGRPOTrainer])
def test_gradients_that_deepspeed_would_add_up(trainer_type, zero):
    """With SGD, two ranks under ZeRO-2 have learned twice what one process does."""
    with pytest.raises(ValueError, match=f"ZeRO stage {zero['stage']} .* gradients would be 2 times as large. Set zero_stage: 3"):
        prepare_shared_sequences(shared(trainer_type, zero=zero))


@pytest.mark.parametrize(("batch", "steps", "generations"), [(3, 1, 3), (2, 3, 4)], ids=["rows of a rank", "groups"])
def test_completions_that_ranks_cannot_share(batch, steps, generations):
    numbers = {"per_device_train_batch_size": batch, "steps_per_generation": steps, "num_generations": generations}
    message = f"2 ranks train on {batch * steps} completions .* multiple of 2, the second one of num_generations={generations}"
    with pytest.raises(ValueError, match=message):
        prepare_shared_sequences(shared(StreamGRPOTrainer, args=SimpleNamespace(world_size=2, **numbers)))


def test_batches_that_can_be_sliced():
    """A multiple of the ranks' number in length, of what the user asked for too; packed ones without what counts documents."""
    rows = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}, {"input_ids": [6, 7, 8, 9], "labels": [6, 7, 8, 9]}]
    stock = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    assert {"cu_seq_lens_q", "max_length_q", "seq_idx"} < stock(rows).keys()
    batch = SlicedCollator(stock, 2)(rows)
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    padded = SlicedCollator(DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True, pad_to_multiple_of=3), 2)
    assert {name: tuple(value.shape) for name, value in padded(rows).items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids", "attention_mask"), (2, 6)
    )
