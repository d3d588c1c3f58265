"""Places that cannot be written to are found before the work of a command begins."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from streamgrad.cli import main
from streamgrad.cli.app import app
from streamgrad.cli.outputs import writable_file, writable_folder


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--out", "{place}"],
        ["demo", "--memory-image", "{place}"],
        ["plan", "qwen3-8b", "--seq-len", "1000", "--out", "{place}"],
        ["profile", "--out", "{place}"],
    ],
    ids=" ".join,
)
def test_commands_try_their_out_first(tmp_path, words, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("streamgrad.hf.estimates.estimate.estimate_lengths", lambda *_, **__: pytest.fail("it began to work"))
    monkeypatch.setattr("streamgrad.cli.demo_run.run", lambda *_, **__: pytest.fail("it began to work"))
    monkeypatch.setattr("streamgrad.cli.profile_run.profiled_model", lambda *_, **__: pytest.fail("it began to work"))
    result = CliRunner().invoke(app, [word.format(place=tmp_path / "file" / "in a file.png") for word in words])
    assert isinstance(result.exception, ValueError), result.output
    assert "in a file.png cannot be written: a part of its path is a file. Pass another place" in str(result.exception)


def test_training_tries_its_output_dir_before_a_model_is_loaded(tmp_path, monkeypatch, capfd):
    (tmp_path / "file").touch()
    words = ["sft", "--output_dir", str(tmp_path / "file" / "out"), "--max_steps", "1"]
    monkeypatch.setattr(sys, "argv", ["streamgrad", "train", *words])
    monkeypatch.setattr("streamgrad.cli.train.save_embedded_model", lambda *_, **__: pytest.fail("it began to work"))
    with pytest.raises(SystemExit, match="out cannot be written: a part of its path is a file"):
        main()


def test_nothing_remains_of_the_attempt(tmp_path):
    for place in (tmp_path / "a" / "b" / "c.png", tmp_path / "c.png"):
        assert writable_file(place) == place
    assert writable_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not list(tmp_path.iterdir()) and writable_file(None) is None
    (tmp_path / "kept.png").write_text("kept")
    writable_file(tmp_path / "kept.png")
    assert (tmp_path / "kept.png").read_text() == "kept"


def test_ctrl_c_during_imports_gives_no_traceback(monkeypatch, capsys):
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamgrad.cli.importlib.import_module", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130 and capsys.readouterr().err == "\nstreamgrad: interrupted\n"
