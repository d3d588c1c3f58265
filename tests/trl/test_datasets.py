"""Datasets of a command: the files it takes, the columns its trainer takes, and what it says to others."""

from __future__ import annotations

import gzip
import json
import re
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict
from trl import DatasetMixtureConfig
from trl.scripts.utils import DatasetConfig

from streamgrad.trl.command import OBJECTIVES
from streamgrad.trl.datasets import FORMATS, dataset_of, split_of

ROWS = {"prompt": ["a", "b", "c"], "completion": ["d", "e", "f"]}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def loaded(name: object, **options: object) -> DatasetDict:
    script = SimpleNamespace(dataset_name=str(name), dataset_config=None, dataset_streaming=False)
    return dataset_of(SimpleNamespace(**vars(script) | options), DatasetMixtureConfig())


def write(path, ending: str) -> None:
    rows = Dataset.from_dict(ROWS)
    lines = "\n".join(json.dumps(row) for row in rows)
    path.parent.mkdir(exist_ok=True)
    if ending == "csv":
        rows.to_csv(str(path))
    elif ending == "parquet":
        rows.to_parquet(str(path))
    elif ending == "json":
        path.write_text(json.dumps(list(rows)))
    elif ending == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(lines)


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet", "jsonl.gz"])
def test_files_and_directories_of_them(tmp_path, ending):
    write(tmp_path / "folder" / f"own data.{ending}", ending)
    for name in (tmp_path / "folder" / f"own data.{ending}", tmp_path / "folder"):
        assert loaded(name)["train"].to_dict() == ROWS


def test_a_file_streamed_in_a_mixture_and_saved_to_disk(tmp_path):
    write(tmp_path / "a.jsonl", "jsonl")
    assert list(loaded(tmp_path / "a.jsonl", dataset_streaming=True)["train"])[2] == {"prompt": "c", "completion": "f"}
    parts = [DatasetConfig(path=str(tmp_path / "a.jsonl")), DatasetConfig(path=str(tmp_path / "a.jsonl"))]
    assert len(dataset_of(SimpleNamespace(dataset_name=None), DatasetMixtureConfig(datasets=parts))["train"]) == 6
    Dataset.from_dict(ROWS).save_to_disk(tmp_path / "disk")
    assert loaded(tmp_path / "disk")["train"].to_dict() == ROWS


def test_names_of_nothing_are_refused_without_asking_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("streamgrad.trl.datasets.load_dataset", lambda *_, **__: pytest.fail("it was looked for"))
    for name in ("data.jsonl", "folder/data.csv", str(tmp_path / "nothing"), "./data"):
        with pytest.raises(ValueError, match=f"dataset '{re.escape(name)}': there is no such file or directory. Pass a JSON, "):
            loaded(name)
    (tmp_path / "data.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"ends in none of \.json, .*\.parquet"):
        loaded(tmp_path / "data.xlsx")


def test_no_examples_are_named(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="is an empty file"):
        loaded(tmp_path / "empty.jsonl")
    (tmp_path / "head.csv").write_text("text,label\n")
    with pytest.raises(ValueError, match="head.csv has no examples. Pass one with at least one."):
        loaded(tmp_path / "head.csv")
    with pytest.raises(ValueError, match="the split 'train' of the dataset is empty"):
        split_of({"train": Dataset.from_dict({"text": []})}, "train", "sft", None)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_wrong_columns_name_every_format(objective):
    columns = {column for way in FORMATS[objective] for column in way}
    with pytest.raises(ValueError, match=f"the dataset has the columns question, answer. {objective} takes ") as raised:
        split_of({"train": Dataset.from_dict({"question": ["a"], "answer": ["b"]})}, "train", objective, None)
    assert all(repr(column) in str(raised.value) for column in columns)
    for way in FORMATS[objective]:
        data = Dataset.from_dict({column: [True] if column == "label" else ["a"] for column in way})
        assert split_of({"train": data}, "train", objective, None) is data


def test_a_text_column_of_another_name():
    data = Dataset.from_dict({"body": ["a"]})
    assert split_of({"train": data}, "train", "sft", "body") is data
    with pytest.raises(ValueError, match="--dataset_text_field names another column of text"):
        split_of({"train": data}, "train", "sft", "text")


@pytest.mark.parametrize(
    ("objective", "columns", "said"),
    [
        (
            "sft",
            {"text": [1, 2]},
            "column 'text' of the dataset has values of the type int64. Let every row have text or a list",
        ),
        ("sft", {"text": ["a", None]}, "the column 'text' of the dataset has 1 missing value"),
        ("sft", {"text": [None, None]}, "'text' of the dataset has values of the type null"),
        (
            "dpo",
            {"prompt": ["a"], "chosen": ["b"], "rejected": [0.5]},
            "'rejected' of the dataset has values of the type float",
        ),
        (
            "kto",
            {"prompt": ["a"], "completion": ["b"], "label": ["no"]},
            "'label' .* type string. Let every row have true or false",
        ),
    ],
)
def test_values_that_no_trainer_takes(objective, columns, said):
    with pytest.raises(ValueError, match=said):
        split_of({"train": Dataset.from_dict(columns)}, "train", objective, None)


def test_values_that_trainers_take():
    """Conversations, token ids, labels as numbers; and other columns may have anything."""
    talk = [[{"role": "user", "content": "a"}]]
    for objective, columns in (
        ("sft", {"messages": talk, "id": [None]}),
        ("sft", {"input_ids": [[1, 2]]}),
        ("sft", {"text": [3], "prompt": ["a"], "completion": ["b"]}),
        ("kto", {"prompt": talk, "completion": talk, "label": [1]}),
    ):
        data = Dataset.from_dict(columns)
        assert split_of({"train": data}, "train", objective, None) is data
    filtered = Dataset.from_dict({"text": ["a", None]}).select([0])
    assert split_of({"train": filtered}, "train", "sft", None) is filtered
