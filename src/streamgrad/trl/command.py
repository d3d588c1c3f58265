"""Training from a command line: TRL's own flags and YAML, read by TRL's own parser, plus the options of `StreamConfig`."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
import yaml  # type: ignore[import-untyped]
from transformers.utils.logging import disable_progress_bar
from trl import (
    DatasetMixtureConfig,
    DistillationConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    RewardConfig,
    RLOOConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.rloo import RLOOScriptArguments

from streamgrad.config import ATTENTION_BACKENDS, FUSED_KERNEL_MODES, KEEP_POLICIES, OFFLOAD_PLACES, StreamConfig, parse_count
from streamgrad.hf.configs import check_causal, short_reason, stored_config
from streamgrad.hf.presets import check_stored, preset_of, presets
from streamgrad.parallel import check_launch
from streamgrad.trl.checkpoints import checkpoint_to_resume, last_checkpoint, named_if_it_fails, refuse_other_states
from streamgrad.trl.datasets import accepted_columns, dataset_of, split_of
from streamgrad.trl.extra_inputs import rewards, teacher
from streamgrad.trl.flags import FlagParser
from streamgrad.trl.optimizer_place import chosen_optimizer, is_by_bitsandbytes
from streamgrad.trl.requirements import check_installed
from streamgrad.trl.trainers import (
    Sharing,
    StreamDistillationTrainer,
    StreamDPOTrainer,
    StreamGRPOTrainer,
    StreamKTOTrainer,
    StreamRewardTrainer,
    StreamRLOOTrainer,
    StreamSFTTrainer,
)
from streamgrad.trl.weights_place import (
    accumulate_on_host,
    check_with_weights_on_host,
    environment_of_before_if_refused,
    keep_weights,
)

# By objective: the trainer, its arguments, and the arguments of TRL's script for it.
OBJECTIVES: dict[str, tuple[Any, Any, Any]] = {
    "sft": (StreamSFTTrainer, SFTConfig, ScriptArguments),
    "dpo": (StreamDPOTrainer, DPOConfig, ScriptArguments),
    "grpo": (StreamGRPOTrainer, GRPOConfig, GRPOScriptArguments),
    "kto": (StreamKTOTrainer, KTOConfig, ScriptArguments),
    "reward": (StreamRewardTrainer, RewardConfig, ScriptArguments),
    "rloo": (StreamRLOOTrainer, RLOOConfig, RLOOScriptArguments),
    "distillation": (StreamDistillationTrainer, DistillationConfig, ScriptArguments),
}
# Defaults that differ from TRL's. By this one PEFT wraps a classifier, and trains its head too.
_DEFAULTS = {"reward": {"lora_task_type": "SEQ_CLS"}}

_STREAM_HELP = {
    "chunk_size": "tokens that a decoder layer processes at a time, or auto.",
    "head_chunk_size": "tokens whose logits exist at a time, or auto.",
    "keep": f"what a layer keeps for its backward pass: {', '.join(KEEP_POLICIES)}.",
    "offload": f"where what is kept waits for backward: {', '.join(OFFLOAD_PLACES)}.",
    "recompute_layers": "keep only every n-th layer's input, and let backward run the layers between once more, or auto.",
    "attention": f"the attention kernel: {', '.join(ATTENTION_BACKENDS)}.",
    "fused_kernels": f"norms, rotary embeddings, gates, routes to experts as one kernel each: {', '.join(FUSED_KERNEL_MODES)}.",
    "compile_layers": "compile layers by torch.compile, for steps so short that every layer keeps its graph.",
    "memory_budget": "device memory that a step may use, weights included, for example 80GiB; by default, what is free.",
    "optimizer": "as for streamgrad plan: adamw, or what --optim says; adamw8bit; in-backward, where each gradient is used and "
    "freed at once and max_grad_norm clips by the last step's norm; host: states and gradients on the host, for max_grad_norm 0.",
    "weights": "as for streamgrad plan: device, or host, where gradients and the optimizer's states are with them, and layers "
    "come one ahead (by FSDP2, on one GPU or several). With --bf16, Accelerate keeps what is trained in float32.",
    "share_prompts": "whether rows with equal prompts compute them once, to the same losses, metrics and gradients.",
}
# Options that count something, from 1 on. TRL checks some of them; wrong values of others would silently train on nothing.
_COUNTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "max_length", "num_generations",
    "num_iterations", "max_completion_length", "steps_per_generation", "generation_batch_size", "lora_r", "pad_to_multiple_of",
)  # fmt: skip
_LARGEST_COUNT = 1 << 31
# Code of other libraries' that acts on options. What fails in the model's code, or in a reward, keeps its traceback.
_TRAINER_MODULES = ("transformers.trainer", "transformers.integrations", "trl.", "accelerate.")
# Options that may be infinite: they are bounds, and an infinite one bounds nothing.
_BOUNDS = ("max_grad_norm", "epsilon", "epsilon_high", "delta")


def _stream_arguments(trainer: type) -> type:
    """Return the options of `StreamConfig` and of the trainer as a dataclass that TRL's parser can read."""
    known = dataclasses.fields(StreamConfig)
    options: list[Any] = [(each.name, bool if each.default is False else str | None, each.default) for each in known]
    options += [("optimizer", str, "adamw"), ("weights", str, "device")]
    options += [("share_prompts", bool, True)] if issubclass(trainer, Sharing) else []
    fields = [
        (name, kind, dataclasses.field(default=default, metadata={"help": _STREAM_HELP[name]})) for name, kind, default in options
    ]
    return dataclasses.make_dataclass("StreamArguments", fields)


def _stream_config(given: dict[str, Any]) -> StreamConfig:
    for name, counted in (("chunk_size", "tokens"), ("head_chunk_size", "tokens"), ("recompute_layers", "layers")):
        if isinstance(given[name], str):
            given[name] = parse_count(name, given[name], counted)
    try:
        return StreamConfig(**given)
    except TypeError as error:
        raise ValueError(str(error)) from error


@dataclass
class _Place:
    """Where to train, which some of TRL's defaults depend on."""

    use_cpu: bool = False
    weights: str = "device"


@dataclass
class Command:
    """A parsed command line."""

    objective: str
    script: Any
    training: Any
    model: Any
    mixture: Any
    stream: StreamConfig
    trainer_options: dict[str, bool]  # where the optimizer works, and whether equal prompts are shared
    words: Sequence[str]

    @classmethod
    @environment_of_before_if_refused()
    def parse(cls, objective: str, arguments: Sequence[str], without_model: dict[str, Any] | None = None) -> Command:
        """Parse `arguments`, the words of TRL's command line, with or without `--config file.yaml`.

        `without_model` replaces TRL's defaults if no model is named. An option that does not exist or cannot be read ends the
        program with the usage and exit code 2.
        """
        if objective not in OBJECTIVES:
            raise ValueError(f"{objective!r} is not an objective. Pass one of {', '.join(OBJECTIVES)}.")
        trainer, training, script = OBJECTIVES[objective]
        kinds = (script, training, ModelConfig, DatasetMixtureConfig, _stream_arguments(trainer))
        alone = ", ".join(f"{name} {value}" for name, value in (without_model or {}).items())
        usage = "%(prog)s [--config FILE.yaml] [--help] [--help_all] [flags of streamgrad and TRL]"
        named = {"prog": f"streamgrad train {objective}", "usage": usage}
        parser = FlagParser(
            kinds,
            own=list(_STREAM_HELP),
            **named,
            description=alone and f"Without --model_name_or_path a tiny model is trained, with defaults of its own: {alone}.",
        )
        parser.set_defaults_with_config(**_DEFAULTS.get(objective, {}))
        try:
            # The model's options first: the defaults of TrainingArguments, which checks itself when made, depend on them.
            first = TrlParser((ModelConfig, _Place), add_help=False, **named)
            model, place, others = first.parse_args_and_config(list(arguments), return_remaining_strings=True)
            if place.use_cpu:
                parser.set_defaults_with_config(bf16=False)  # TRL's default, which most CPUs emulate
            if not {"-h", "--help", "--help_all"} & set(others):
                keep_weights(place.weights, use_cpu=place.use_cpu)
                if model.model_name_or_path is None:
                    parser.set_defaults_with_config(**without_model or {})
                else:
                    _check_name(model.model_name_or_path)
            script, training, model, mixture, stream, in_file, unknown = parser.parse_args_and_config(
                list(arguments), return_remaining_strings=True, separate_remaining_strings=True
            )
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"a file that an option names could not be read: {error}.") from error
        except yaml.YAMLError as error:
            raise ValueError(f"the file given as --config is not YAML: {error}") from error
        except IndexError:
            raise ValueError("--config needs a file name. Pass --config FILE.yaml.") from None
        except ZeroDivisionError as error:
            raise ValueError(
                f"a count such as --num_generations is 0, and TRL divides by it ({error}). Pass at least 1."
            ) from error
        except ValueError as error:
            if "bf16/gpu" not in str(error):
                raise
            raise ValueError(
                "bf16 is the default and needs a GPU that supports it, but torch sees none. Pass --use_cpu to train on the CPU, "
                "or --bf16 false."
            ) from error
        if unknown:
            parser.error(f"no such option: {' '.join(unknown)}{parser.suggestion(unknown)}")
        if in_file:
            names = in_file[::2]
            raise ValueError(
                f"the file given as --config has options that do not exist: {' '.join(names)}{parser.suggestion(names) or '.'}"
            )
        options = vars(script) | vars(training) | vars(model) | vars(mixture)
        _check_counts(options)
        _check_finite(options)
        _check_steps(training)
        _check_adapters(model)
        check_launch(training.distributed_state)
        training.resume_from_checkpoint = checkpoint_to_resume(
            training.resume_from_checkpoint, training.output_dir, training.world_size
        )
        optimizer = vars(stream).pop("optimizer")
        if vars(stream).pop("weights") == "host":
            check_with_weights_on_host(optimizer, training, model)
            accumulate_on_host(training)
            optimizer = "adamw"  # which follows the weights
        trainer_options = chosen_optimizer(optimizer, training)
        if training.resume_from_checkpoint is not None:
            refuse_other_states(training.resume_from_checkpoint, by_bitsandbytes=is_by_bitsandbytes(training))
        if hasattr(stream, "share_prompts"):
            trainer_options |= {"share_prompts": vars(stream).pop("share_prompts")}
        return cls(objective, script, training, model, mixture, _stream_config(vars(stream)), trainer_options, arguments)

    @property
    def has_dataset(self) -> bool:
        return bool(self.script.dataset_name or self.mixture.datasets)

    def check_model(self) -> None:
        """Raise, before anything is loaded, for a model that does not exist or that TRL cannot load for training."""
        name = self.model.model_name_or_path
        config = stored_config(name, revision=self.model.model_revision, trust_remote_code=self.training.trust_remote_code)
        if config.is_encoder_decoder:
            check_causal(config)
        if not config.architectures and self.objective != "reward":
            raise ValueError(
                f"the config.json of model={name!r} has no architectures, by which TRL finds the model's class. Save the model "
                "with save_pretrained, which writes them."
            )


def _check_name(name: str) -> None:
    preset = preset_of(name)
    if preset is not None and "/" not in name and not os.path.exists(name):
        published = presets()[preset].get("hub", "Qwen/Qwen3-8B")
        raise ValueError(
            f"model={name!r} is a preset, a shape without weights. Pass a directory, or a name on the hub with its owner: "
            f"{published}."
        )
    check_stored(name)


def _check_counts(options: dict[str, Any]) -> None:
    for name in _COUNTS:
        count = options.get(name)
        if count is not None and not 1 <= count <= _LARGEST_COUNT:
            raise ValueError(f"{name} must be a whole number from 1 to {_LARGEST_COUNT}, got {count}.")


def _check_finite(options: dict[str, Any]) -> None:
    for name, value in options.items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number) and (math.isnan(number) or name not in _BOUNDS):
                raise ValueError(f"{name} must be finite, got {value}.")


def _check_steps(training: Any) -> None:
    """Raise for a run without a step, and for intervals at which transformers would silently do nothing."""
    # With max_steps=0 transformers trains one step, and by epochs only below that.
    if training.max_steps == 0 or (training.max_steps < 0 and training.num_train_epochs <= 0):
        raise ValueError(
            f"max_steps={training.max_steps} and num_train_epochs={training.num_train_epochs} leave no step to train. Pass "
            "max_steps above 0, or leave it out and pass num_train_epochs above 0."
        )
    for name in ("save_steps", "logging_steps", "eval_steps"):
        steps = getattr(training, name)
        if steps is not None and steps <= 0:
            raise ValueError(
                f"{name}={steps} must be above 0: a number of steps, or a share of all of them. Pass 1 for every step."
            )
    if not isinstance(training.model_init_kwargs or {}, dict):
        raise ValueError(
            f'model_init_kwargs={training.model_init_kwargs!r} must be a JSON object, such as \'{{"dtype": "float32"}}\'.'
        )


def _check_adapters(model: Any) -> None:
    for option in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, option) and not model.use_peft:
            raise ValueError(
                f"--{option} keeps weights that cannot be trained, and no adapters were asked for. Pass --use_peft for QLoRA, or "
                f"leave out --{option}."
            )


@contextmanager
def _one_line(what: str, remedy: str, *, raised_in: tuple[str, ...] = ("",)) -> Iterator[None]:
    """Raise a `ValueError` that says `what` failed, why, and what to do, for errors of other libraries' in modules `raised_in`.

    An error of streamgrad's own code is a bug and keeps its type, and with it its traceback.
    """
    try:
        yield
    except (ValueError, OSError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        module = frame.f_globals.get("__name__", "")
        if module.startswith("streamgrad.") or not module.startswith(raised_in):
            raise
        if isinstance(error, ImportError) or "pip install" in str(error):  # of a package that an option needs
            name = None if "pip install" in str(error) else getattr(error, "name", None)
            install = f". Run: pip install {name.partition('.')[0]}" if name else ""
            raise ValueError(f"a package is missing: {short_reason(error).rstrip('.')}{install}.") from error
        raise ValueError(f"{what}: {type(error).__name__}: {short_reason(error).rstrip('.')}. {remedy}") from error


def train(command: Command, *, dataset: Any = None, reward_funcs: list[Any] | None = None) -> Any:
    """Train as `command` says, save to its `output_dir`, and return the trainer.

    `dataset`, by split, replaces the command's; `reward_funcs` are used if the command names none.
    """
    kind = OBJECTIVES[command.objective][0]
    training, model = command.training, command.model
    if training.process_index != 0:  # only the main process shows progress bars, as it does the log
        datasets.disable_progress_bars()
        disable_progress_bar()
    check_installed(training, model)
    command.check_model()
    options = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    training.model_init_kwargs = {"revision": model.model_revision} | options | (training.model_init_kwargs or {})
    data = dataset_of(command.script, command.mixture) if dataset is None else dataset

    def split(name: str) -> Any:
        return split_of(data, name, command.objective, getattr(training, "dataset_text_field", None))

    inputs: dict[str, Any] = {
        "train_dataset": split(command.script.dataset_train_split),
        "eval_dataset": split(command.script.dataset_test_split) if training.eval_strategy != "no" else None,
        "quantization_config": get_quantization_config(model),
        "peft_config": get_peft_config(model),
    } | command.trainer_options
    if hasattr(command.script, "reward_funcs"):
        inputs |= rewards(command.objective, command.script, reward_funcs)
    if hasattr(training, "teacher_model_name_or_path"):
        inputs |= teacher(command.objective, training, options)
    columns = ", ".join(inputs["train_dataset"].column_names or ["unknown"])
    with _one_line(
        f"{command.objective} cannot begin with model={model.model_name_or_path!r} and a dataset with the columns {columns}",
        f"Pass a directory that save_pretrained wrote, and a dataset of text or messages. {accepted_columns(command.objective)}",
    ):
        trainer = kind(model=model.model_name_or_path, args=training, stream=command.stream, **inputs)
    if getattr(trainer.train_dataset, "num_rows", 1) == 0:
        cut = f"max_length={getattr(training, 'max_length', None)}"
        raise ValueError(f"no example has anything left to train on at {cut}. Pass a larger one.")
    try:
        with _one_line("training failed", "Change the option that it is about.", raised_in=_TRAINER_MODULES):
            trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_where_it_stopped(trainer.state, command)) from None
    with named_if_it_fails(Path(training.output_dir), training.output_dir, training.world_size):
        trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=command.script.dataset_name)
    if hasattr(trainer, "end"):  # transformers >= 5.18: closes trackers and the process group, as TRL's scripts do
        trainer.end()
    return trainer


def _where_it_stopped(state: Any, command: Command) -> str:
    """Return the step at which training was interrupted, the last whole checkpoint, and the command that goes on from it."""
    output, processes = command.training.output_dir, command.training.world_size
    last = last_checkpoint(output, processes)
    stopped = f"stopped at step {state.global_step} of {state.max_steps}. "
    if last is None:
        return stopped + f"No checkpoint is in {output}; --save_strategy steps --save_steps N writes one every N steps."
    resume, words = "--resume_from_checkpoint", list(command.words)
    while resume in words:
        del words[words.index(resume) : words.index(resume) + 2]
    words = [word for word in words if not word.startswith(f"{resume}=")]
    again = shlex.join(["python", "-m", "streamgrad", "train", command.objective, *words, resume, "last"])
    launched = ", started by the same launcher" if processes > 1 else ""
    return stopped + f"The last checkpoint is {last}. Go on with{launched}: {again}"
