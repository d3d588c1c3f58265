"""verl's own FSDP2 engine on a CPU, with the plug and without: the same losses, log-probabilities and gradient norms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plugged import needs, python, save_tiny_model

pytestmark = needs("verl")

SCRIPT = Path(__file__).with_name("verl_steps.py")
PLUG = {"external_lib": "streamgrad.integrations.verl"}
FUSED = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "torch"}}
CASES = {
    "packed": ({}, {"use_remove_padding": True}),
    "packed-fused": (FUSED, {"use_remove_padding": True, "use_fused_kernels": True}),
    "padded-lora": ({"lora_rank": 4}, {"use_remove_padding": False}),
}


def run(folder: Path, options: dict, **environment: str) -> str:
    return python("verl", folder, str(SCRIPT), json.dumps(options), **environment)


@pytest.mark.parametrize("case", CASES)
def test_verl_trains_as_without_the_plug(tmp_path, case):
    save_tiny_model(tmp_path / "model")
    model, batch = CASES[case]
    plain = run(tmp_path, {"model": model, "batch": batch})
    streamed = run(tmp_path, {"model": model | PLUG, "batch": batch}, STREAMGRAD='{"chunk_size": 5}')
    assert "chunks of at most 5" in streamed
    expected, actual = (
        [json.loads(line.removeprefix("STEP ")) for line in out.splitlines() if line.startswith("STEP ")]
        for out in (plain, streamed)
    )
    assert len(expected) == 4
    for step, exact in zip(actual, expected, strict=True):
        assert step.keys() == exact.keys()
        for name in exact:
            assert step[name] == pytest.approx(exact[name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("model", "engine", "environment", "told"),
    [
        ({"enable_activation_offload": True}, {}, "", r"enable_activation_offload moves every tensor"),
        ({}, {"ulysses_sequence_parallel_size": 2}, "", r"ulysses_sequence_parallel_size=2 cuts sequences between ranks"),
        ({}, {"strategy": "fsdp"}, "", r"Set strategy=fsdp2"),
        ({}, {}, "[4096]", r"names no options"),
    ],
)
def test_what_cannot_be_streamed_is_refused(tmp_path, model, engine, environment, told):
    save_tiny_model(tmp_path / "model")
    with pytest.raises(AssertionError, match=told):
        run(tmp_path, {"model": model | PLUG, "engine": engine, "batch": {}}, STREAMGRAD=environment)
