"""Options of `StreamConfig` as JSON in the environment, for frameworks that refuse settings which they do not know."""

from __future__ import annotations

import pytest

from streamgrad import StreamConfig
from streamgrad.integrations.environment import config_from_environment


@pytest.mark.parametrize(
    ("text", "config"),
    [("", StreamConfig()), ('{"chunk_size": 7, "offload": "none"}', StreamConfig(chunk_size=7, offload="none"))],
)
def test_options_are_read(text, config, monkeypatch):
    monkeypatch.setenv("STREAMGRAD", text)
    assert config_from_environment() == config


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("chunk_size=7", ValueError, r"STREAMGRAD='chunk_size=7' is not JSON .* Write STREAMGRAD='\{\"chunk_size\": 4096\}'"),
        ("[4096]", ValueError, r"STREAMGRAD='\[4096\]' names no options"),
        ('{"chunks": 3}', TypeError, "'chunks' is not a streamgrad option"),
    ],
)
def test_what_is_none_is_refused(text, error, told, monkeypatch):
    monkeypatch.setenv("STREAMGRAD", text)
    with pytest.raises(error, match=told):
        config_from_environment()
