"""Training from a command line: TRL's own flags and YAML, read by TRL's own parser, plus the options of `StreamConfig`."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trl.rewards
from datasets import load_dataset
from trl import (
    DatasetMixtureConfig,
    DPOConfig,
    GRPOConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_dataset,
    get_peft_config,
    get_quantization_config,
)
from trl.scripts.grpo import GRPOScriptArguments

from streamgrad.config import StreamConfig
from streamgrad.trl.trainers import StreamDPOTrainer, StreamGRPOTrainer, StreamSFTTrainer

# By objective: the trainer, its arguments, and the arguments of TRL's script for it.
OBJECTIVES: dict[str, tuple[Any, Any, Any]] = {
    "sft": (StreamSFTTrainer, SFTConfig, ScriptArguments),
    "dpo": (StreamDPOTrainer, DPOConfig, ScriptArguments),
    "grpo": (StreamGRPOTrainer, GRPOConfig, GRPOScriptArguments),
}


def _stream_arguments() -> type:
    """The options of `StreamConfig` as a dataclass that TRL's parser can read; what is left out keeps its default."""
    fields = [
        (option.name, str | None, dataclasses.field(default=None, metadata={"help": f"streamgrad: StreamConfig.{option.name}."}))
        for option in dataclasses.fields(StreamConfig)
    ]
    return dataclasses.make_dataclass("StreamArguments", fields)


def _stream_config(arguments: Any) -> StreamConfig:
    given: dict[str, Any] = {name: value for name, value in vars(arguments).items() if value is not None}
    for name, value in given.items():
        if isinstance(value, str) and value.lstrip("-").isdigit():
            given[name] = int(value)
    return StreamConfig(**given)


@dataclass
class Command:
    """A command line, read."""

    objective: str
    script: Any
    training: Any
    model: Any
    mixture: Any
    stream: StreamConfig

    @classmethod
    def parse(cls, objective: str, arguments: Sequence[str], without_model: dict[str, Any] | None = None) -> Command:
        """`arguments` as TRL's command line has them, with `--config file.yaml` or without.

        `without_model` replaces defaults of TRL's where no model is named.
        """
        if objective not in OBJECTIVES:
            raise ValueError(f"{objective!r} is not an objective. Pass one of {', '.join(OBJECTIVES)}.")
        _, training, script = OBJECTIVES[objective]
        kinds = (script, training, ModelConfig, DatasetMixtureConfig, _stream_arguments())
        parser = TrlParser(kinds, prog=f"streamgrad train {objective}")
        try:
            # The model alone first: a TrainingArguments checks itself when it is made, and its defaults depend on the answer.
            only_model = TrlParser((ModelConfig,), add_help=False)
            model, _ = only_model.parse_args_and_config(list(arguments), return_remaining_strings=True)
            if model.model_name_or_path is None:
                parser.set_defaults_with_config(**without_model or {})
            script, training, model, mixture, stream = parser.parse_args_and_config(list(arguments))
        except OSError as error:
            raise ValueError(f"the file given as --config could not be read: {error}.") from error
        return cls(objective, script, training, model, mixture, _stream_config(stream))

    @property
    def has_dataset(self) -> bool:
        return bool(self.script.dataset_name or self.mixture.datasets)

    def dataset(self) -> Any:
        if self.mixture.datasets:
            return get_dataset(self.mixture)
        script = self.script
        return load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)

    def reward_funcs(self) -> list[Any]:
        """By name from `trl.rewards`, by dotted path, or a reward model."""
        named = [_reward(name) for name in self.script.reward_funcs or []]
        model = self.script.reward_model_name_or_path
        return [model, *named] if model else named


def _reward(name: str) -> Callable[..., Any]:
    if name == "get_soft_overlong_punishment":
        return trl.rewards.get_soft_overlong_punishment(max_completion_len=1280, soft_punish_cache=256)  # as in TRL's script
    module, _, function = name.rpartition(".")
    if not module:
        if name not in trl.rewards.__all__:
            raise ValueError(f"the reward {name!r} is none of TRL's ({', '.join(trl.rewards.__all__)}), and no dotted path.")
        return getattr(trl.rewards, name)
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the reward {name!r} could not be imported: {error}.") from error
    finally:
        sys.path.remove(os.getcwd())


def train(command: Command, *, dataset: Any = None, reward_funcs: list[Any] | None = None) -> Any:
    """Train as `command` says, save to its `output_dir`, and return the trainer.

    `dataset` (by split) and `reward_funcs` take the place of those that the command names.
    """
    kind = OBJECTIVES[command.objective][0]
    training, model = command.training, command.model
    training.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
    } | (training.model_init_kwargs or {})
    data = command.dataset() if dataset is None else dataset
    inputs: dict[str, Any] = {
        "train_dataset": _split(data, command.script.dataset_train_split),
        "eval_dataset": _split(data, command.script.dataset_test_split) if training.eval_strategy != "no" else None,
        "quantization_config": get_quantization_config(model),
        "peft_config": get_peft_config(model),
    }
    if command.objective == "grpo":
        inputs["reward_funcs"] = command.reward_funcs() or reward_funcs
        if not inputs["reward_funcs"]:
            raise ValueError("grpo needs a reward. Pass --reward_funcs my_module.my_reward, or --reward_model_name_or_path.")
    try:
        trainer = kind(model=model.model_name_or_path, args=training, stream=command.stream, **inputs)
    except KeyError as error:
        columns = ", ".join(inputs["train_dataset"].column_names or ["unknown"])
        raise ValueError(
            f"the dataset has the columns {columns}, and {command.objective} also needs {error}. TRL's documentation lists the "
            "dataset format of each trainer."
        ) from error
    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=command.script.dataset_name)
    return trainer


def _split(dataset: Any, name: str) -> Any:
    if name not in dataset:
        raise ValueError(f"the dataset has no split {name!r}, only {', '.join(dataset)}. Name one by --dataset_train_split.")
    return dataset[name]
