"""Releases of other packages: metadata and messages name the same ones, and older ones are refused with the remedy."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from transformers import Cache

import streamgrad
from families import small_model
from streamgrad.versions import SUPPORTED, check_version

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_metadata_and_messages_name_the_same_releases():
    extras = PROJECT["optional-dependencies"]
    requirements = [Requirement(line) for line in (*PROJECT["dependencies"], *extras["peft"], *extras["trl"])]
    assert {each.name: each.specifier for each in requirements} == {
        name: SpecifierSet(f">={oldest},<{beyond}") for name, (oldest, beyond) in SUPPORTED.items()
    }


@pytest.mark.parametrize("package", SUPPORTED)
def test_an_older_release_is_refused_with_the_remedy(package, monkeypatch):
    oldest, beyond = SUPPORTED[package]
    for version in (oldest, f"{oldest}.0+cpu", f"{oldest}.0a0", metadata.version(package)):
        monkeypatch.setattr(metadata, "version", lambda name, version=version: version)
        check_version(package)
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.1")
    words = rf'{package} 0\.17\.1 is installed, and .* needs {package} {oldest} .*pip install "{package}>={oldest},<{beyond}"'
    with pytest.raises(ImportError, match=words):
        check_version(package)


def test_layers_with_states_name_the_transformers_that_streams_them(monkeypatch):
    """As before 5.21, whose caches have no such method."""
    model = small_model("qwen3_next")
    monkeypatch.delattr(Cache, "is_recording_past", raising=False)
    words = r"Qwen3NextForCausalLM cannot be streamed: .*transformers \S+ is installed, and layers with states .* from 5\.21 on"
    with pytest.raises(ValueError, match=words):
        streamgrad.enable(model)
    assert not streamgrad.is_enabled(model)
