"""The dataset of a command: a file, a directory or a name on the hub, with the columns that its trainer takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError
from trl import get_dataset

from streamgrad.hf.presets import may_be_on_hub

# By objective, the columns that its trainer takes, in any of these ways; others may be there as well.
FORMATS: dict[str, list[tuple[str, ...]]] = {
    "sft": [("text",), ("messages",), ("prompt", "completion"), ("conversations",), ("input_ids",)],
    "dpo": [("chosen", "rejected"), ("prompt", "chosen", "rejected")],
    "kto": [("prompt", "completion", "label"), ("prompt", "chosen", "rejected"), ("chosen", "rejected")],
    "reward": [("chosen", "rejected"), ("prompt", "chosen", "rejected"), ("chosen_ids", "rejected_ids")],
    "grpo": [("prompt",)],
    "rloo": [("prompt",)],
    "distillation": [("prompt",)],
}
# The reader of `datasets` for a file, by how its name ends; compressed files end in one more word.
_READERS = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_WAYS = "a JSON, JSON lines, CSV or Parquet file, a directory of them, or a name on the hub, owner/name"


def dataset_of(script: Any, mixture: Any) -> Any:
    """Return the splits that TRL's arguments name. Raise `ValueError`, which names them, for what cannot be loaded."""
    names = [part.path for part in mixture.datasets] if mixture.datasets else [script.dataset_name]
    for name in names:
        _check_name(name)
    try:
        if not mixture.datasets:
            return _loaded(script.dataset_name, script.dataset_config, script.dataset_streaming)
        for part in mixture.datasets:
            if os.path.isfile(part.path):
                part.path, part.data_files = _reader(part.path), part.path
        return get_dataset(mixture)
    except Exception as error:  # any kind: every reader of files fails in its own way
        # For a file that it cannot read, datasets raises a general error, with the specific one as its cause.
        cause = error.__cause__ if type(error) is DatasetGenerationError and error.__cause__ else error
        if "corresponds to no data" in str(error):
            raise ValueError(f"dataset {', '.join(names)} has no examples. Pass one with at least one.") from error
        raise ValueError(f"dataset {', '.join(names)} could not be loaded: {str(cause).rstrip('.')}. Pass {_WAYS}.") from error


def _check_name(name: str) -> None:
    if os.path.isfile(name):
        if _reader(name) is None:
            raise ValueError(f"dataset {name!r} is a file whose name ends in none of {', '.join(_READERS)}. Pass {_WAYS}.")
        if not os.path.getsize(name):
            raise ValueError(f"dataset {name!r} is an empty file. Pass one with at least one example.")
    elif not os.path.exists(name) and (_reader(name) is not None or not may_be_on_hub(name)):
        raise ValueError(f"dataset {name!r}: there is no such file or directory. Pass {_WAYS}.")


def _reader(name: str) -> str | None:
    path = Path(name)
    return _READERS.get((path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path).suffix.lower())


def _loaded(name: str, config: str | None, streaming: bool) -> Any:
    if os.path.isfile(name):
        return load_dataset(_reader(name), data_files=name, streaming=streaming)
    if any(Path(name, file).is_file() for file in ("dataset_dict.json", "state.json")):  # by save_to_disk
        saved = load_from_disk(name)
        return DatasetDict(train=saved) if isinstance(saved, Dataset) else saved
    return load_dataset(name, name=config, streaming=streaming)


def split_of(dataset: Any, name: str, objective: str, text_field: str | None) -> Any:
    """Return the split; raise if it is not there or empty, or has none of the columns that the objective's trainer takes."""
    if name not in dataset:
        flags, splits = "--dataset_train_split or --dataset_test_split", ", ".join(dataset)
        raise ValueError(f"the dataset has no split {name!r}, only {splits}. Name one by {flags}.")
    split = dataset[name]
    if next(iter(split), None) is None:
        raise ValueError(f"the split {name!r} of the dataset is empty. Pass one with at least one example.")
    columns = set(split.column_names or ())  # unknown for some that are streamed
    ways = [*FORMATS[objective], *([(text_field,)] if text_field else [])]
    if columns and not any(columns.issuperset(way) for way in ways):
        raise ValueError(
            f"the dataset has the columns {', '.join(split.column_names)}. {accepted_columns(objective)} Rename or add columns."
        )
    if isinstance(split, Dataset):  # of others, types and missing values are not known beforehand
        unfit = [[name for name in way if _unfit(split, name)] for way in ways if columns.issuperset(way)]
        if all(unfit):
            name = unfit[0][0]
            needed = "true or false" if name == "label" else "text or a list"
            raise ValueError(f"the column {name!r} of the dataset has {_unfit(split, name)}. Let every row have {needed} there.")
    return split


def _unfit(split: Dataset, name: str) -> str:
    """Return what is in the column that a trainer cannot take, or nothing: numbers for text, text for a label, missing values."""
    kind = str(getattr(split.features[name], "dtype", "list"))
    fits = kind.startswith(("bool", "int")) if name == "label" else "string" in kind or kind == "list"
    missing = split.select_columns(name).with_format("arrow")[:][name].null_count  # of the rows that a filter has left
    return (f"{missing} missing value(s)" if missing else "") if fits else f"values of the type {kind}"


def accepted_columns(objective: str) -> str:
    """Return a sentence with the columns that the objective's trainer takes."""
    ways = [", ".join(map(repr, way[:-1])) + f"{' and ' if way[1:] else ''}{way[-1]!r}" for way in FORMATS[objective]]
    named = "; --dataset_text_field names another column of text" if objective == "sft" else ""
    return f"{objective} takes {'; or '.join(ways)}{named}."
