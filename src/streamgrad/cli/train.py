"""`streamgrad train OBJECTIVE`: TRL's command line with streamed trainers, and a tiny model and dataset for a run without any.

These need no download. The model has a byte tokenizer and 0.2 M random parameters. The dataset is the demo's text: for SFT as it
is, for DPO and reward models as pairs of a continuation and its words reversed, for KTO as either of them with a label, for GRPO
and RLOO as openings whose continuations should have many "e", and for distillation as openings that a second such model teaches.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from streamgrad.cli.outputs import writable_folder

# Defaults for about a minute on two cores of a CPU; a flag or a YAML file replaces any of them.
_QUICK: dict[str, Any] = {
    "per_device_train_batch_size": 8, "max_steps": 60, "learning_rate": 2e-3, "logging_steps": 10, "save_strategy": "no",
    "report_to": ["none"], "bf16": False, "dataloader_pin_memory": False, "chunk_size": 64,
}  # fmt: skip
_SAMPLED: dict[str, Any] = {
    "num_generations": 8, "max_completion_length": 24, "temperature": 1.0, "max_steps": 80, "learning_rate": 3e-3,
}  # fmt: skip
_QUICK_OF: dict[str, dict[str, Any]] = {
    "sft": {"max_steps": 150},
    "dpo": {"per_device_train_batch_size": 4, "learning_rate": 5e-4},
    "kto": {"learning_rate": 5e-4},
    "reward": {"per_device_train_batch_size": 4, "learning_rate": 5e-4},
    "grpo": _SAMPLED,
    "distillation": {"max_completion_length": 24},
    # Rewards of the tiny model are small beside TRL's default penalty of KL.
    "rloo": _SAMPLED | {"normalize_advantages": True, "beta": 0.0},
}  # fmt: skip
# The tiny model's, so that it can be tried on conversations.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_HELP = {
    "sft": "Train by supervised fine-tuning. Without flags: a tiny model on an embedded text, in about a minute on a CPU.",
    "dpo": "Train by direct preference optimization, with all of TRL's losses. Without flags: a tiny model on embedded pairs.",
    "grpo": "Train by group-relative policy optimization. Without flags: a tiny model learns to write the letter e.",
    "kto": "Train by Kahneman-Tversky optimization, on good and bad examples. Without flags: a tiny model on embedded ones.",
    "reward": "Train a reward model. Without flags: a tiny model on embedded pairs.",
    "rloo": "Train by REINFORCE leave-one-out. Without flags: a tiny model learns to write the letter e.",
    "distillation": "Train on a teacher's distributions. Without flags: a tiny model learns those of another tiny model.",
}


train = typer.Typer(
    help="Train with TRL's trainers, streamed; flags and YAML are those of TRL's command line.", no_args_is_help=True
)
# Everything after the objective, `--help` included, goes to TRL's parser.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _add(objective: str, what: str) -> None:
    @train.command(objective, help=what, context_settings=_PASSED_ON)
    def command(context: typer.Context) -> None:
        run(objective, context.args, Console())


for _objective, _what in _HELP.items():
    _add(_objective, _what)


def _refuse(objective: str) -> None:
    @train.command(objective, hidden=True, context_settings=_PASSED_ON)
    def command(context: typer.Context) -> None:
        raise ValueError(
            f"there is no command for {objective}, as TRL has no stable trainer for it. Its loss is streamed in a loop of yours: "
            "streamgrad.objectives.dpo_loss, which docs/trainers.md shows for orpo, simpo and cpo. Or pass one of "
            f"{', '.join(_HELP)}."
        )


for _objective in ("orpo", "simpo", "cpo"):  # before they are taken for misspelt names of others
    _refuse(_objective)


def run(objective: str, arguments: Sequence[str], console: Console) -> None:
    """Train with `objective` and TRL's flags, `arguments`, and print how the loss or reward has changed."""
    # Imported here, so that other commands work without trl, and `train --help` need not wait for torch.
    try:
        with Console(stderr=True, quiet=os.environ.get("RANK", "0") != "0").status("Loading torch and TRL ..."):
            import torch

            from streamgrad.trl.command import Command
            from streamgrad.trl.command import train as train_as
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("trl", "datasets"):
            raise
        missing = f'training needs {error.name}, which is not installed. Run: pip install "streamgrad[trl]"'
        raise ValueError(missing if isinstance(error, ModuleNotFoundError) else str(error)) from error

    defaults = {"output_dir": f"out/{objective}", "use_cpu": not torch.accelerator.is_available()}
    defaults |= _QUICK | _QUICK_OF[objective]
    command = Command.parse(objective, arguments, without_model=defaults)
    console.quiet = command.training.process_index != 0
    if not console.quiet:
        writable_folder(Path(command.training.output_dir))
    embedded: dict[str, Any] = {}
    if command.model.model_name_or_path is not None and not command.has_dataset:
        raise ValueError("a model is given without a dataset to train it on. Pass --dataset_name, or leave both out to try it.")
    if command.model.model_name_or_path is None:
        # Beside the result and not in a temporary place: an adapter trained on it refers to it.
        start = Path(command.training.output_dir) / "start"
        with command.training.main_process_first(local=False):
            if command.training.process_index == 0:
                save_embedded_model(start)
                if objective == "distillation":
                    save_embedded_model(start / "teacher", seed=1, spread=0.3)
        command.model.model_name_or_path = str(start)
        if objective == "distillation":
            command.training.teacher_model_name_or_path = command.training.teacher_model_name_or_path or str(start / "teacher")
        torch.set_num_threads(1)  # matrices this small gain nothing from more threads
        console.print(f"No model given: a tiny one with random weights, kept in {start}", soft_wrap=True)
    if not command.has_dataset:
        embedded = {"dataset": embedded_dataset(objective), "reward_funcs": [letter_e]}
        console.print("No dataset given: the demo's text", soft_wrap=True)
    try:
        trainer = train_as(command, **embedded)
    except KeyboardInterrupt as stop:
        Console(stderr=True, quiet=console.quiet).print(
            f"\nstreamgrad: {stop}" if str(stop) else "\nstreamgrad: stopped before the first step", soft_wrap=True, markup=False
        )
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        if _passed_own_code(error):
            traceback.print_exception(error)
        raise
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    if logged:
        shown = "reward" if "reward" in logged[0] else "loss"
        logged = [entry for entry in logged if shown in entry]  # a step on completions of an earlier one has no rewards
        first, last = (f"{float(entry[shown]):.3f}" for entry in (logged[0], logged[-1]))
        console.print(f"{shown}: {first} at step {logged[0]['step']}, {last} at step {logged[-1]['step']}", soft_wrap=True)
    if trainer.accelerator.num_processes > 1:
        console.print(f"Trained by {trainer.accelerator.num_processes} processes: {trainer.accelerator.distributed_type.value}")
    console.print(f"Saved: {command.training.output_dir}", soft_wrap=True)
    peak = [entry["peak_memory_gib"] for entry in trainer.state.log_history if "peak_memory_gib" in entry]
    if peak:
        where = "of tensors on the GPU" if trainer.args.device.type == "cuda" else "of the whole process"
        console.print(f"Peak memory: {peak[-1]:.1f} GiB, {where}", soft_wrap=True)


def _passed_own_code(error: Exception) -> bool:
    """Return whether the error came through code of the user's own, such as a reward: its one line would not say where in it."""
    installed = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]), "<")
    return not all(frame.f_code.co_filename.startswith(installed) for frame, _ in traceback.walk_tb(error.__traceback__))


def save_embedded_model(path: Path, *, seed: int = 0, spread: float = 0.02) -> None:
    """Save a Qwen3-shaped model with random weights and its byte tokenizer, for `from_pretrained` to load.

    With a larger `spread` of its weights, it has preferences among the tokens.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    names = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", model_max_length=2048)
    tokenizer.chat_template = _CHAT_TEMPLATE
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(names), hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0,
        eos_token_id=1, initializer_range=spread,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)


def embedded_dataset(objective: str) -> Any:
    from datasets import Dataset, DatasetDict

    from streamgrad.cli.demo_run import TEXT

    words = TEXT.split()
    windows = [words[start : start + 30] for start in range(0, len(words) - 30, 3)]
    openings, rests = [" ".join(window[:10]) for window in windows], [window[10:] for window in windows]
    good, bad = ([" " + " ".join(words) for words in side] for side in (rests, [rest[14::-1] for rest in rests]))
    pairs = {"prompt": openings, "chosen": good, "rejected": bad}
    columns = {
        "sft": {"text": [" ".join(window) for window in windows]},
        "dpo": pairs,
        "grpo": {"prompt": openings},
        "kto": {"prompt": openings * 2, "completion": good + bad, "label": [True] * len(good) + [False] * len(bad)},
        "reward": pairs,
        "rloo": {"prompt": openings},
        "distillation": {"prompt": openings},
    }[objective]
    data = Dataset.from_dict(columns).train_test_split(test_size=0.1, seed=0)
    return DatasetDict(train=data["train"], test=data["test"])


def letter_e(completions: list[str], **_: Any) -> list[float]:
    """Return each completion's share of characters that are "e"."""
    return [completion.count("e") / max(len(completion), 1) for completion in completions]
