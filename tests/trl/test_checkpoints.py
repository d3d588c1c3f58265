"""`streamgrad train` that ends early: killed while it writes a checkpoint, interrupted, or with a full disk; how it goes on."""

from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from transformers import Trainer
from transformers.training_args import OptimizerNames

from streamgrad.cli import main
from streamgrad.trl.checkpoints import last_checkpoint, refuse_other_states
from streamgrad.trl.optimizer_place import is_by_bitsandbytes

# Raised inside TRL, transformers and torch's data loader on a machine without an accelerator; none is about the model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

SHORT = ["--max_steps", "6", "--logging_steps", "1", "--save_strategy", "steps", "--save_steps", "2"]
KILLED_WHILE_SAVING = """
import os, signal, sys
from transformers import Trainer

stock = Trainer._save_rng_state

def killed(trainer, folder):
    if trainer.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    stock(trainer, folder)

Trainer._save_rng_state = killed
from streamgrad.cli import main
main()
"""


@pytest.fixture
def train(monkeypatch, capfd):
    """Runs `streamgrad train sft` with these words and returns its exit code, output and errors."""

    def run(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["streamgrad", "train", "sft", *map(str, words)])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capfd.readouterr()
        return exit.value.code, out, err

    return run


def logged(folder, step: int = 6) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step, in full precision."""
    history = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: (entry["loss"], entry["grad_norm"]) for entry in history if "loss" in entry}


def test_a_run_that_is_killed_while_it_saves_goes_on_bit_for_bit(train, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = ["streamgrad", "train", "sft", "--output_dir", str(killed), *SHORT]
    code = f"import sys; sys.argv = {words!r}\n{KILLED_WHILE_SAVING}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert (killed / "checkpoint-4" / "optimizer.pt").exists(), "it was not killed in the middle of a checkpoint"
    assert last_checkpoint(str(killed), 1) == killed / "checkpoint-2"
    assert train("--output_dir", whole, *SHORT)[0] == 0
    assert train("--output_dir", killed, *SHORT, "--resume_from_checkpoint", "last")[0] == 0
    assert logged(killed) == logged(whole) and len(logged(whole)) == 6
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def interrupted_at(step: int, monkeypatch) -> None:
    stock = Trainer.training_step

    def training_step(trainer, *args, **kwargs):
        if trainer.state.global_step == step:
            raise KeyboardInterrupt
        return stock(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", training_step)


def test_an_interrupted_run_says_where_it_stopped_and_how_it_goes_on(train, tmp_path, monkeypatch):
    out = tmp_path / "a directory"
    with monkeypatch.context() as patch:
        interrupted_at(3, patch)
        code, _, err = train("--output_dir", out, *SHORT)
        flags = f"--output_dir '{out}' {' '.join(SHORT)}"
        assert code == 130 and f"streamgrad: stopped at step 3 of 6. The last checkpoint is {out}/checkpoint-2. " in err
        assert f"Go on with: python -m streamgrad train sft {flags} --resume_from_checkpoint last\n" in err
        # Interrupted again: the command has the option once.
        code, _, err = train("--output_dir", out, *SHORT, "--resume_from_checkpoint", "last")
        assert code == 130 and err.count("--resume_from_checkpoint") == 1
    assert train("--output_dir", out, *SHORT, "--resume_from_checkpoint", "last")[0] == 0
    assert sorted(logged(out)) == [1, 2, 3, 4, 5, 6]


def test_an_interrupted_run_without_a_checkpoint(train, tmp_path, monkeypatch):
    interrupted_at(1, monkeypatch)
    code, _, err = train("--output_dir", tmp_path, "--max_steps", 2)
    assert code == 130
    assert f"stopped at step 1 of 2. No checkpoint is in {tmp_path}; --save_strategy steps --save_steps N writes one" in err


def test_states_of_another_kind_of_optimizer_are_refused_before_the_model_is_made(train, tmp_path):
    assert train("--output_dir", tmp_path, "--max_steps", 2, "--save_strategy", "steps", "--save_steps", 1)[0] == 0
    resumed = "--output_dir", tmp_path, "--max_steps", 3, "--resume_from_checkpoint", "last"
    code, out, _ = train(*resumed, "--optimizer", "adamw8bit")
    assert str(code).startswith(
        f"streamgrad: --resume_from_checkpoint {tmp_path}/checkpoint-2: the optimizer of that run was not one"
    )
    assert "is streamed" not in out and str(code).endswith(f"--model_name_or_path {tmp_path}/checkpoint-2")


@pytest.mark.parametrize(
    ("names", "by_bitsandbytes"), [(["state1", "state2"], True), (["exp_avg"], False), ([], True), ([], False)]
)
def test_states_are_known_by_their_names(names, by_bitsandbytes, tmp_path):
    refuse_other_states(str(tmp_path), by_bitsandbytes=True)  # an engine has files of its own
    states = {0: {name: torch.zeros(3) for name in names}} if names else {}
    torch.save({"state": states, "param_groups": []}, tmp_path / "optimizer.pt")
    refuse_other_states(str(tmp_path), by_bitsandbytes=by_bitsandbytes)
    if names:
        with pytest.raises(ValueError, match=f"that run was{' not' if not by_bitsandbytes else ''} one of bitsandbytes'"):
            refuse_other_states(str(tmp_path), by_bitsandbytes=not by_bitsandbytes)


@pytest.mark.parametrize("name", ["last", "nowhere", "checkpoint-7"])
def test_a_checkpoint_that_is_not_there_or_not_whole(train, tmp_path, name):
    """It is refused before the model is made, and nothing is written."""
    torn = tmp_path / "checkpoint-7"
    torn.mkdir()
    (torn / "rng_state.pth").touch()
    (torn / "trainer_state.json").write_text('{"best_metric": nu')
    given = name if name != "checkpoint-7" else torn
    code, _, _ = train("--output_dir", tmp_path, "--max_steps", 2, "--resume_from_checkpoint", given)
    said = {"last": "there is no whole checkpoint in output_dir=", "nowhere": "there is no such directory. Pass last"}
    assert str(code).startswith(f"streamgrad: --resume_from_checkpoint {given}: ")
    assert said.get(name, "trainer_state.json cannot be read there") in code
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SafetensorError("Error while serializing: No space left on device (os error 28)"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_disk_leaves_earlier_checkpoints_as_they_were(train, tmp_path, monkeypatch, error):
    stock = Trainer._save_optimizer_and_scheduler

    def full(trainer, folder):
        if trainer.state.global_step == 4:
            raise error
        stock(trainer, folder)

    # A whole checkpoint of an earlier run, of which only a part is overwritten, must not pass for one of this run.
    old = tmp_path / "checkpoint-4"
    old.mkdir()
    (old / "rng_state.pth").touch()
    (old / "trainer_state.json").write_text("{}")
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", full)
    code, _, _ = train("--output_dir", tmp_path, *SHORT)
    assert str(code).startswith(f"streamgrad: {old} could not be written: ") and "No space left on device" in code
    assert code.endswith(f"The last whole checkpoint is {tmp_path / 'checkpoint-2'}; resume from it.")
    assert last_checkpoint(str(tmp_path), 1) == tmp_path / "checkpoint-2"


def test_a_full_disk_at_the_end_names_the_checkpoint_with_all_steps(train, tmp_path, monkeypatch):
    stock = Trainer.save_model

    def full(trainer, folder=None, _internal_call=False):
        if not _internal_call:
            raise OSError(errno.ENOSPC, "No space left on device")
        stock(trainer, folder, _internal_call)

    monkeypatch.setattr(Trainer, "save_model", full)
    code, _, _ = train("--output_dir", tmp_path, "--max_steps", 2, "--save_strategy", "steps", "--save_steps", 1)
    assert str(code).startswith(f"streamgrad: {tmp_path} could not be written: ")
    assert code.endswith(f"The last whole checkpoint is {tmp_path / 'checkpoint-2'}; resume from it.")


@pytest.mark.parametrize(
    ("optim", "expected"),
    [
        *((name, True) for name in ("adamw_8bit", "paged_adamw_32bit", "lion_32bit", "ademamix", "rmsprop_bnb_32bit")),
        *((name, False) for name in ("adamw_torch_fused", "adamw_torch_8bit", "rmsprop", "adafactor", "galore_adamw")),
    ],
)
def test_which_optimizers_are_by_bitsandbytes(optim, expected):
    """A run with one of these goes on from its own checkpoint."""
    assert is_by_bitsandbytes(SimpleNamespace(optim=OptimizerNames(optim))) == expected
