"""`streamgrad plan`: its tables, its JSON and its pictures say what `streamgrad.estimate` returns."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import streamgrad
from streamgrad.cli.app import app
from streamgrad.cli.plan_picture import picture_of
from streamgrad.hf.estimates import shapes
from streamgrad.memory import this_machine
from streamgrad.memory.cards import GPUS


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """Plans for this machine's GPU would say something else on every machine."""
    monkeypatch.setattr(this_machine, "this_gpu", lambda: None)


def run(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": "160"})


def test_the_table_says_what_the_report_says(tmp_path):
    picture = tmp_path / "plots" / "plan.png"
    result = run("qwen3-8b", "--seq-len", "65536", "--optimizer", "none", "--out", str(picture))
    assert result.exit_code == 0, result.output
    report = streamgrad.estimate("qwen3-8b", 65_536, optimizer="none")
    assert f"{report.streamed.longest_tokens:,}" in result.output and str(report.streamed.plan) in result.output
    for component, count in report.streamed.device_bytes.items():
        if count:
            assert re.search(rf"{component} .*{count / 2**30:,.2f} GiB", result.output), component
    assert all(line in result.output for line in report.assumptions)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen3-4b", "--seq-len", "4000000"], r"4,000,000 tokens do not fit. Up to [\d,]+ tokens would.*Smallest plan: "),
        (
            ["qwen3-8b", "--seq-len", "1000", "--gpu-memory", "24GiB"],
            r"1,000 tokens do not fit: nothing fits 24.0 G.*gradients: these alone take 61.0 GiB.*What fits: --optimizer host, ",
        ),
        (
            ["qwen3-8b", "--seq-len", "1000", "--gpu-memory", "24GiB", "--optimizer", "in-backward"],
            "What fits: --optimizer host, --optimizer host --weights host, or a larger GPU",  # an engine is refused in backward
        ),
        (
            ["qwen3-32b", "--seq-len", "1000", "--gpu-memory", "24GiB", "--engine", "ddp", "--gpus", "2"],
            "What fits: --engine zero3 --gpus 32, or a larger GPU. Adapters need less: --method lora",  # which DDP keeps whole
        ),
        (
            ["qwen3-8b", "--seq-len", "1000", "--gpu-memory", "52GiB"],
            "take 61.*What fits: --optimizer in-backward, --optimizer host, ",  # without gradients it would
        ),
        (
            ["qwen3-8b", "--seq-len", "8192", "--gpu-memory", "24GiB", "--optimizer", "none"],
            "take 3.* GiB on each GPU. What fits: --weights host, --engine zero3 --gpus 2, or",
        ),
    ],
)
def test_what_does_not_fit_says_what_would(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 0 and re.search(words, " ".join(result.output.split()))


def test_json_is_the_report():
    result = run("qwen3-4b", "--max", "--method", "lora", "--json", "--gpu-memory", "24GiB", "--gemm-tflops", "100")
    row = json.loads(result.output)
    rates = replace(GPUS["h100"].rates, gemm=100e12)
    expected = streamgrad.estimate("qwen3-4b", method="lora", gpu_memory="24GiB", rates=rates).to_dict()
    choices = row.pop("choices")
    assert {key: row[key] for key in row if key != "assumptions"} == json.loads(
        json.dumps({key: expected[key] for key in expected if key != "assumptions"})
    )
    assert [(each["option"], each["value"]) for each in choices] == [
        ("optimizer", "adamw8bit"), ("optimizer", "in-backward"), ("optimizer", "host"), ("weights", "host"),
    ]  # fmt: skip
    assert row["streamed"]["seconds"]["total"] > 0 and row["streamed"]["plan"].startswith(("36 x", "1", "2", "3"))


def test_a_length_or_the_longest():
    for arguments in ([], ["--max", "--seq-len", "9"]):
        result = run("qwen3-4b", *arguments)
        assert isinstance(result.exception, ValueError) and "--max" in str(result.exception)


def test_the_table_in_the_documentation_is_what_the_command_prints():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    command = re.search(r"^python -m streamgrad plan (.*)$", text, flags=re.MULTILINE)
    shown = re.search(r"^```\n(qwen3-8b.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert command is not None and shown is not None
    result = CliRunner().invoke(app, ["plan", *command[1].split()], env={"COLUMNS": "100"})
    printed = "\n".join(line.rstrip() for line in result.output.splitlines())
    assert printed.startswith(shown[1]), (
        "run the command with COLUMNS=100 and --out docs/images/plan.png, and show what it prints"
    )


def test_several_lengths_are_columns_of_one_table(monkeypatch):
    shapes_made = []
    stock = shapes.shape_of
    monkeypatch.setattr(
        "streamgrad.hf.estimates.estimate.shape_of", lambda *args, **kw: shapes_made.append(args) or stock(*args, **kw)
    )
    result = run("qwen3-4b", "--seq-len", "8192, 65536,4000000", "--method", "lora")
    assert result.exit_code == 0 and len(shapes_made) == 1
    reports = [streamgrad.estimate("qwen3-4b", length, method="lora") for length in (8192, 65_536, 4_000_000)]
    rows = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in result.output.splitlines() if line[:1] in "│┃"]
    assert rows[0] == ["tokens", "8,192", "65,536", "4,000,000"]
    for row, outlooks in zip(
        [row for row in rows if row[0].endswith(", GPU")],
        ([report.streamed for report in reports], [report.checkpointing for report in reports]),
        strict=True,
    ):
        assert row[1:] == [f"{outlook.peak_bytes / 2**30:,.2f} GiB" for outlook in outlooks]
    assert "4,000,000 tokens do not fit." in result.output
    assert all(f"lan of {report.seq_len:,} tokens: {report.streamed.plan}" in result.output for report in reports)


def test_several_lengths_are_a_list_in_json():
    result = run("qwen3-4b", "--seq-len", "8192,65536", "--json")
    expected = [streamgrad.estimate("qwen3-4b", length).to_dict() for length in (8192, 65_536)]
    rows = json.loads(result.output)
    assert all(row.pop("choices") for row in rows) and rows == json.loads(json.dumps(expected))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seq-len", "8192,"], "--seq-len must be whole numbers of at least 1, separated by commas, got '8192,'"),
        (["--seq-len", "8192,0"], "--seq-len must be whole numbers"),
        (["--seq-len", "1,2", "--out", "plan.png"], "--out draws one length, got 2: --seq-len 1,2"),
    ],
)
def test_lengths_that_cannot_be_planned(arguments, words):
    result = run("qwen3-4b", *arguments)
    assert isinstance(result.exception, ValueError) and words in str(result.exception)


# --- several completions of a prompt --------------------------------------------------------------------------------------

GROUP = ("qwen3-4b", "--objective", "grpo", "--prompt-tokens", "16000", "--completion-tokens", "2000", "--group", "8")


def test_a_group_is_planned_with_prompts_once_and_in_every_row():
    result = run(*GROUP, "--optimizer", "none")
    row = json.loads(run(*GROUP, "--optimizer", "none", "--json").output)
    assert result.exit_code == 0, result.output
    assert (row["shared_tokens"], row["separate_tokens"]) == (16_000 + 8 * 2_000, 8 * 18_000)
    for name in ("shared", "separate"):
        outlook, output = row[name], " ".join(result.output.split())
        assert outlook["plan"] in output and f"{outlook['longest_tokens']:,}" in output
        assert f"{outlook['peak_bytes'] / 2**30:,.2f} GiB" in output and f"{outlook['seconds']['total']:,.1f} s" in output
    # Rows as they are, as a plan of one length says; but of a group, only completions are scored.
    separate = streamgrad.estimate("qwen3-4b", 18_000, batch=8, objective="grpo", optimizer="none").streamed
    assert row["separate"]["peak_bytes"] == separate.peak_bytes
    assert row["separate"]["seconds"]["attention"] == separate.seconds.attention
    assert row["separate"]["seconds"]["head"] == pytest.approx(separate.seconds.head * 2 / 18)
    assert row["shared"]["seconds"]["head"] == row["separate"]["seconds"]["head"]


@pytest.mark.parametrize(
    ("model", "objective", "group"), [("qwen3-4b", "grpo", 5), ("qwen3-4b", "dpo", 2), ("gemma-3-1b", "grpo", 3)]
)
def test_seconds_are_those_of_the_visible_pairs(model, objective, group):
    """A token of a completion sees its prompt and what comes before it; a window is one over both."""
    flags = ("--objective", objective, "--prompt-tokens", "3000", "--completion-tokens", "500", "--batch", "2", "--keep", "input")
    row = json.loads(run(model, *flags, *(["--group", str(group)] if group != 2 else []), "--json").output)
    shape = shapes.shape_of(model, dtype="bfloat16", lora_rank=None)

    def pairs(first: int, last: int) -> float:
        whole = sum(place + 0.5 for place in range(first, last))
        seen = sum(min(place + 0.5, shape.window or place + 0.5) for place in range(first, last))
        return shape.full_attention_layers * whole + (shape.layers - shape.full_attention_layers) * seen

    shared, separate = (row[name]["seconds"] for name in ("shared", "separate"))
    ratio = (pairs(0, 3000) + group * pairs(3000, 3500)) / (group * pairs(0, 3500))
    assert shared["attention"] / separate["attention"] == pytest.approx(ratio, rel=1e-3)
    # But for keys of chunks, which are made again or not by how many chunks there are.
    assert shared["layers"] / separate["layers"] == pytest.approx((3000 + group * 500) / (group * 3500), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--prompt-tokens", "9"], "--prompt-tokens 9 describes a part of a group. Pass both"),
        (["--completion-tokens", "9"], "--completion-tokens 9 describes a part of a group"),
        (["--group", "3"], "--group 3 describes a part of a group"),
        (["--prompt-tokens", "9", "--completion-tokens", "2"], "objective='sft'. Pass one of them, or seq_len"),
        ([*GROUP[1:], "--max"], "--max is for sequences of one length"),
        ([*GROUP[1:], "--seq-len", "9"], "--seq-len is for sequences of one length"),
        ([*GROUP[1:], "--prompt-tokens", "0"], "prompt_tokens must be a whole number of at least 1, got 0"),
        ([*GROUP[1:], "--objective", "dpo"], "group=8 completions of a prompt, but dpo compares two"),
    ],
)
def test_a_group_that_makes_no_sense(arguments, told):
    result = run("qwen3-4b", *arguments)
    assert isinstance(result.exception, ValueError) and told in str(result.exception)


def test_the_group_of_pairs_in_the_documentation():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    (grpo, dpo) = re.findall(r"^python -m streamgrad plan (.*--prompt-tokens.*)$", text, flags=re.MULTILINE)
    assert grpo.split() == [*GROUP, "--optimizer", "none"]
    result = run(*dpo.split())
    assert result.exit_code == 0 and "16,000" in result.output and "28,000" in result.output


def test_a_group_that_does_not_fit_says_which_prompt_would():
    result = run(*GROUP[:4], "9000000", *GROUP[5:])
    assert re.search(r"It does not fit. Prompts of up to [\d,]+ tokens would", result.output)


# --- cards, places and several machines -------------------------------------------------------------------------------------


def test_the_line_of_the_gpu_goes_through_no_number():
    """Numbers in a bar are written on its colour, above the line; totals are below it or above it."""
    report = streamgrad.estimate("qwen3-8b", 131_072, gpu="h100", optimizer="none")
    (axes,) = picture_of(report).axes
    line = report.gpu_memory / 2**30
    assert any(f"{report.gpu},\n {line:.1f} GiB" in text.get_text() for text in axes.texts)
    for text in axes.texts:
        boxed, height = text.get_bbox_patch() is not None, 0.04 * axes.get_ylim()[1]
        bottom = text.get_position()[1]
        assert boxed or not bottom < line < bottom + height, text.get_text()


def test_a_report_prints_as_a_table():
    text = str(streamgrad.estimate("qwen3-8b", 65_536, gpu="rtx4090", optimizer="in-backward"))
    assert "adamw in backward: 1 x 65,536 tokens" in text and "RTX 4090" in text and "longest sequence" in text
    assert "Outlook(" not in text and len(text.splitlines()) > 10


def test_amounts_dtypes_and_names_are_taken_as_people_write_them():
    texts = [
        run(model, "--seq-len", "8192", "--gpu-memory", size, "--dtype", dtype, "--method", "lora", "--json").output
        for model, size, dtype in (
            ("qwen3-8b", "24GiB", "bfloat16"),
            ("Qwen3-8B", "24G", "bf16"),
            ("Qwen/Qwen3-8B", "24", "bf16"),
        )
    ]
    peaks = {json.loads(text)["streamed"]["peak_bytes"] for text in texts}
    assert len(peaks) == 1


def test_choices_are_named_with_what_they_save():
    result = run("qwen3-8b", "--seq-len", "8192", "--gpu", "h100")
    assert re.search(r"--optimizer in-backward: 15.3 GiB less on the GPU\n", result.output)
    assert re.search(r"--optimizer host: 45.4 GiB less on the GPU, and 61.0 GiB more on the host", result.output)
    assert "the GPU is H100 80GB" in result.output and "as measured on an H200" in result.output


def test_gpus_of_a_node_share_its_host_and_ranks_of_a_sequence_its_tokens():
    options = {"gpu": "h100", "engine": "zero3", "keep": "input"}
    one, many, shared = (
        streamgrad.estimate("qwen3-8b", 65_536, gpus=gpus, sp=sp, **options) for gpus, sp in ((8, 1), (64, 1), (64, 8))
    )
    assert many.streamed.longest_tokens > one.streamed.longest_tokens  # which has the same share of a host, and larger shards
    assert shared.streamed.device_bytes["hidden states"] < one.streamed.device_bytes["hidden states"]
    assert shared.streamed.seconds.attention == pytest.approx(one.streamed.seconds.attention / 8)
    assert shared.streamed.seconds.exchanges > 0 == many.streamed.seconds.exchanges
    assert shared.tokens_a_second == pytest.approx(8 * 65_536 / shared.streamed.seconds.total)
    # By the table of docs/distributed.md: 6 H + 6 G heads of 128 for each of a rank's tokens and layers, and hidden states.
    elements = 65_536 / 8 * (36 * 128 * (6 * 32 + 6 * 8) + 2 * 4096)
    assert shared.streamed.seconds.exchanges == pytest.approx(2 * elements * 7 / 8 / 450e9)


def test_more_ranks_than_heads_are_a_ring():
    """The smallest that works, or the one that is asked for; keys travel within a node or across, by who has the same heads."""
    options = {"gpu": "h100", "engine": "zero3", "gpus": 64, "sp": 64, "keep": "input"}
    chosen, by_node = (streamgrad.estimate("qwen3-8b", 1 << 20, ring=ring, **options) for ring in (None, 8))
    assert (chosen.ring, by_node.ring) == (2, 8)
    assert any("ring=2, the smallest that works with 32 query heads" in line for line in chosen.assumptions)
    assert "64 to a sequence in rings of 2:" in chosen.title and "of it, the ring" in str(chosen)
    # A rank's 16,384 tokens in 36 layers. With 32 ranks that trade heads each key head is there four times; with 8, once.
    tokens, kilobytes = 36 * (1 << 14), 4096
    for report, others, copies in ((chosen, 1, 4), (by_node, 7, 1)):
        sent = tokens * others * copies * (2 * kilobytes + 2 * kilobytes)  # keys and values twice, and their sums in fp32
        assert report.streamed.seconds.ring == pytest.approx(sent / 50e9)
    in_layers, around = tokens * 2 * 128 * (6 * 32 + 6 * 8), (1 << 14) * 2 * 2 * 4096
    across_all = around / 64 * (7 / 450e9 + 56 / 50e9)
    assert by_node.streamed.seconds.exchanges == pytest.approx(in_layers * 7 / 8 / 450e9 + across_all)
    # A layer at work holds keys, values and sums of the whole sequence for one key head; attention's terms come on top.
    whole = (1 << 20) * 128 * 2 * (2 + 4)
    for report in (chosen, by_node):
        assert whole < report.streamed.device_bytes["keys and values"] < 2.5 * whole
    small = streamgrad.estimate("qwen3-8b", 1 << 20, ring=None, **options | {"gpus": 32, "sp": 32})
    assert small.ring == 1 and small.streamed.seconds.ring == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpus": 64, "sp": 64, "ring": 1}, "^32 attention heads cannot be shared by 64 ranks.*ring=2"),
        ({"gpus": 8, "sp": 8, "ring": 3}, "^ring=3 must be a number that divides the group's 8 ranks.*Pass one of 1, 2, 4, 8"),
        ({"gpus": 8, "ring": 2}, "^ring=2 must be a number that divides the group's 1 ranks"),
        ({"gpus": 8, "sp": 8, "ring": 0}, "ring must be a whole number of at least 1, got 0"),
        ({"gpus": 8, "sp": 3}, "sp=3 with gpus=8"),
        ({"gpus": 12}, "gpus=12 do not fill machines of gpus_per_node=8"),
    ],
)
def test_ranks_that_cannot_be(options, words):
    with pytest.raises(ValueError, match=words):
        streamgrad.estimate("qwen3-8b", 1024, engine="zero3", **options)


def test_every_documented_plan_runs():
    text = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    commands = re.findall(r"^python -m streamgrad plan (.*)$", text, flags=re.MULTILINE)
    assert len(commands) >= 7
    for command in commands:
        result = run(*command.split())
        assert result.exit_code == 0, (command, result.output, result.exception)
