"""`streamgrad env`: what it prints is what is there, and what it calls working has been compared with float64."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch
import transformers
from typer.testing import CliRunner

import streamgrad
from streamgrad.attention.backends.sdpa import SdpaBackend
from streamgrad.cli import env_report as env
from streamgrad.cli.app import app
from streamgrad.engine.kv_chunk import Attended

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU has")
KINDS = ["plain", "sliding window", "packed", "left-padded", "right-padded", "4-D mask", "softcap"]


def printed(*options: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["env", *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_json():
    found = env.Environment(**json.loads(printed("--json")))
    assert found.versions["streamgrad"] == streamgrad.__version__
    assert found.versions["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found.versions["transformers"] == transformers.__version__
    assert found.host_available_bytes > 0
    assert len(found.devices) == torch.cuda.device_count()
    assert list(found.attention) == KINDS
    for answers in found.attention.values():
        assert list(answers) == ["auto", "cudnn", "flash", "sdpa", "eager"]
        assert answers[answers["auto"]] == "works" and answers["eager"] == "works"


@ON_CPU
def test_what_auto_takes_on_a_cpu():
    found = env.environment()
    assert found.dtype == "float32"
    assert {kind: answers["auto"] for kind, answers in found.attention.items()} == dict.fromkeys(KINDS, "sdpa") | {
        "softcap": "eager"
    }
    assert "needs an NVIDIA GPU" in found.attention["plain"]["flash"]
    assert "no softcap" in found.attention["softcap"]["sdpa"]


@ON_CPU
def test_the_table():
    text = printed()
    assert "No GPU that torch can see" in text and "Host memory available" in text and "FlashAttention: FA2" in text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert list(rows) == KINDS
    assert rows["packed"].split("│")[2].strip() == "sdpa" and rows["softcap"].split("│")[2].strip() == "eager"
    assert "sdpa: torch's scaled_dot_product_attention has no softcap" in text


def test_an_active_flash_implementation_is_named(monkeypatch):
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
    assert env.environment().flash == "FA3"


def test_an_installed_flash_implementation_that_is_not_active_is_named(monkeypatch):
    stock = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: "4.0.1" if package == "flash-attn-4" else stock(package))
    said = env.environment().flash
    assert "flash-attn-4 4.0.1 is installed" in said and 'activate_flash_attention_impl("FA4")' in said


@ON_CPU
@pytest.mark.parametrize(("fault", "expected"), [("raises", "failed: no kernel image"), ("scales", "wrong: off by")])
def test_a_kernel_that_fails_or_is_wrong_is_not_called_working(monkeypatch, fault, expected):
    plain = SdpaBackend.forward

    def faulty(self, *args):
        if fault == "raises":
            raise RuntimeError("no kernel image\nis available")
        done = plain(self, *args)
        return Attended(done.out_BHLD * 1.1, done.lse_BHL)

    monkeypatch.setattr(SdpaBackend, "forward", faulty)
    answers = env.environment().attention["packed"]
    assert answers["sdpa"].startswith(expected) and answers["auto"] == "eager"
