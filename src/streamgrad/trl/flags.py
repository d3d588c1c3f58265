"""The parser of a training command: TRL's, whose help begins with streamgrad's flags, and which suggests what was meant."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from trl import TrlParser

# TRL has some two hundred flags. These are described by `--help`, the others by `--help_all`.
OFTEN_USED = (
    "model_name_or_path", "dataset_name", "output_dir", "max_length", "learning_rate", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_steps", "num_train_epochs", "use_peft", "lora_r", "load_in_4bit", "dtype", "reward_funcs",
    "teacher_model_name_or_path", "loss_type", "beta", "num_generations", "max_completion_length", "resume_from_checkpoint",
    "report_to", "use_cpu",
)  # fmt: skip


class _HelpAll(argparse.Action):
    """`--help_all`: print the help with every flag described, and exit."""

    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        parser.describes_all = True
        parser.print_help()
        parser.exit()


class FlagParser(TrlParser):
    """A parser of TRL's dataclasses, of which the fields in `own` are streamgrad's."""

    describes_all = False

    def __init__(self, kinds: Sequence[type], *, own: Sequence[str], **options: Any) -> None:
        super().__init__(kinds, **options)
        self.own = own
        for action in self._actions:
            if action.dest == "dataset_name":
                action.help = "JSON, JSON lines, CSV or Parquet file, a directory of them, or a name on the hub."
            if getattr(action.type, "__name__", "") == "string_to_bool" and action.nargs is None:  # --bf16, without a default
                action.nargs, action.const = "?", True
        self.add_argument("--help_all", action=_HelpAll, nargs=0, dest=argparse.SUPPRESS, help="describe every flag, and exit")

    def format_help(self) -> str:
        """Return streamgrad's flags, those of TRL's that most runs use, and the names of the others."""
        formatter = self.formatter_class(prog=self.prog)
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        own, other = ([each for each in self._actions if (each.dest in self.own) is ours] for ours in (True, False))
        often = [each for name in OFTEN_USED for each in other if each.dest == name]
        for title, actions in (("streamgrad's flags", own), ("TRL's flags", other if self.describes_all else often)):
            formatter.start_section(title)
            formatter.add_arguments(map(_with_one_spelling, filter(_is_said, actions)))
            formatter.end_section()
        if not self.describes_all:
            rest = [each.option_strings[0] for each in other if each not in often and _is_said(each)]
            formatter.add_text(f"All other flags, which --help_all describes: {', '.join(rest)}")
        return formatter.format_help()

    def suggestion(self, unknown: Iterable[str]) -> str:
        """Return " Did you mean ...?" with a flag for each of the unknown ones that is much like it, or nothing."""
        flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
        known = [spelling for action in self._actions for spelling in action.option_strings]
        close = [match for flag in flags for match in difflib.get_close_matches(flag, known, n=1)]
        return f". Did you mean {' and '.join(dict.fromkeys(close))}?" if close else ""


def _is_said(action: argparse.Action) -> bool:
    """Return False for the `--no_x` of an `--x` that takes true or false, and for what prints this help."""
    return action.dest not in (argparse.SUPPRESS, "help") and action.const is not False


def _with_one_spelling(action: argparse.Action) -> argparse.Action:
    """Return the action without its spelling with hyphens, which is read as well."""
    shown = copy.copy(action)
    shown.option_strings = action.option_strings[:1]
    return shown
