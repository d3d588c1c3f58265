"""The machine that is planned for: this one, a named card, or a stated default."""

from __future__ import annotations

import pytest

from streamgrad.memory import this_machine
from streamgrad.memory.cards import GPUS, Gpu, gpu_like, gpu_named
from streamgrad.memory.seconds import Rates
from streamgrad.memory.this_machine import machine


def test_this_machines_gpu_comes_first(monkeypatch):
    monkeypatch.setattr(this_machine, "this_gpu", lambda: Gpu("NVIDIA L4", 21.5, 121, 32))
    monkeypatch.setattr(this_machine, "host_total_bytes", lambda: 64 * 2**30)
    here = machine()
    assert (here.gpu, here.gpu_bytes, here.host_bytes) == ("NVIDIA L4", int(21.5 * 2**30), 64 * 2**30)
    assert "this machine's NVIDIA L4" in here.told[0] and "this machine's" in here.told[1] and "not measured" in here.told[2]
    other = machine(gpu="h200")
    assert other.gpu == "H200" and other.rates == Rates() and other.host_bytes == 256 * 2**30
    assert "say yours with --host-memory" in other.told[1]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(this_machine, "this_gpu", lambda: None)
    nowhere = machine()
    assert nowhere.gpu == "H100 80GB" and "finds no GPU here" in nowhere.told[0] and nowhere.host_bytes == 256 * 2**30
    assert machine(gpu_bytes=24 * 2**30).gpu_bytes == 24 * 2**30


def test_rates_are_a_share_of_the_peak():
    l4, own = GPUS["l4"].rates, Rates()
    for name in ("gemm", "attention_forward", "attention_backward"):
        assert getattr(l4, name) / getattr(own, name) == pytest.approx(121 / 989.4)


@pytest.mark.parametrize(
    ("name", "gib", "label"),
    [
        ("NVIDIA A100-SXM4-80GB", 78.7, "A100 80GB"), ("NVIDIA A100-SXM4-40GB", 38.9, "A100 40GB"),
        ("NVIDIA H100 80GB HBM3", 78.6, "H100 80GB"), ("NVIDIA GeForce RTX 4090", 23.1, "RTX 4090"), ("Tesla T4", 14.1, "T4"),
        ("NVIDIA L40S", 43.9, "L40S"), ("NVIDIA L4", 21.5, "L4"), ("NVIDIA A10G", 21.6, "A10G"), ("Quadro P400", 2.0, None),
    ],
)  # fmt: skip
def test_cards_are_known_by_what_drivers_call_them(name, gib, label):
    found = gpu_like(name, gib)
    assert (found and found.label) == label


def test_a_card_that_is_not_known():
    assert gpu_named("A100_80GB") is GPUS["a100-80gb"] and gpu_named("H100-80GB") is GPUS["h100"]
    with pytest.raises(ValueError, match="gpu='rtx9090' is not known. Pass one of t4, .*or gpu_memory"):
        gpu_named("rtx9090")


def test_the_host_is_that_of_its_control_group():
    assert 2**28 < this_machine.host_total_bytes() < 2**50
