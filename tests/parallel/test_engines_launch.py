"""Programs as users start them: `accelerate launch` with the ready configurations, and `torchrun`, on two processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from engine_worker import Reference
from gradients import more, worst_gradient_error
from launching import CONFIGS, EXAMPLE, ON_CPU, ROOT, TORCHRUN, begun, run, weights
from tiny import VOCABULARY, tiny_model


def start_model(dtype: torch.dtype):
    return tiny_model("qwen3", dtype=dtype, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A checkpoint to start from."""
    folder = tmp_path_factory.mktemp("start")
    start_model(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(start) -> Reference:
    """What one process makes of it with ordinary backpropagation on the same global batches."""

    def train(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        model = start_model(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for ids in torch.randint(VOCABULARY, (3 * 4, 32), generator=torch.Generator().manual_seed(0)).split(4):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: parameter.detach() for name, parameter in model.named_parameters()}

    reference = Reference.of(train)
    moved, _ = worst_gradient_error(weights(start), reference.plain)
    assert moved > 0.05, "training hardly moved, so nothing would be compared"
    return reference


def check_run(launcher: list, start: Path, plain: Reference, output: Path, says: str) -> None:
    """Streaming under the launcher gives the weights of plain backpropagation, and the engine is the one that was asked for."""
    done = run(*launcher, ON_CPU, EXAMPLE, start, "--length", 32, "--chunk-size", 8, "--output", output)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"2 processes, {says}\n" in done.stdout
    plain.check(weights(output))


@pytest.mark.parametrize(
    ("config", "engine"),
    [
        pytest.param("ddp", "MULTI_CPU", marks=more),
        pytest.param("fsdp2", "FSDP", marks=more),  # started as documented in test_documented_launches.py
        pytest.param("zero2", "DEEPSPEED", marks=more),
        pytest.param("zero3", "DEEPSPEED", marks=more),  # tests/trl/test_train_launch.py starts it
    ],
)
def test_accelerate_launch(start, plain, tmp_path, config, engine):
    launcher = ["-m", "accelerate.commands.launch", "--config_file", CONFIGS / f"{config}.yaml", "--main_process_port", "0"]
    # In fp32 and without clipping, to be comparable; a clipping of 0 would mean Accelerate's default.
    launcher += ["--mixed_precision", "no", *(["--gradient_clipping", "1e9"] if engine == "DEEPSPEED" else [])]
    check_run(launcher, start, plain, tmp_path, says=engine)


def test_torchrun(start, plain, tmp_path):
    check_run(TORCHRUN, start, plain, tmp_path, says="MULTI_CPU")


@more
def test_a_failing_rank_ends_the_job_with_its_message():
    """The other rank waits in an all-reduce at that moment; `run` raises if the job does not end."""
    done = run(*TORCHRUN, ROOT / "tests" / "support" / "failing_rank.py")
    assert done.returncode != 0
    assert "[rank1]: ValueError: target 1000 is outside the vocabulary of 61 tokens" in done.stderr
    assert "[rank0]: rank 1 has failed: ValueError: target 1000 is outside" in done.stderr


@more
def test_ranks_end_within_their_timeout():
    """Without a launcher that stops them, and although the rank that failed goes on running."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    script = ROOT / "tests" / "support" / "failing_rank.py"
    first, second = (begun(script, 40, environment=meeting | {"RANK": str(rank)}) for rank in (0, 1))
    with first, second:
        try:
            _, said = first.communicate(timeout=300)
            assert first.returncode not in (0, None) and second.poll() is None
        finally:
            first.kill()
            second.kill()
    reason, ended = (said.find(words) for words in ("rank 1 has failed: ValueError: target 1000", "Timed out waiting 40000ms"))
    assert 0 <= reason < ended, said[-3000:]
