"""The first 200 cases of `make fuzz`, and what it does with one that fails."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from fuzz_cases import CHOICES, OTHERS, Case, cases_of
from fuzzing import check, failures
from gradients import more
from streamgrad.engine.kv_chunk import KeyValueStream
from tiny import FAMILIES

ROOT = Path(__file__).parents[2]


# What transformers and PEFT say about sizes as small as these, and about adapters on them.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [pytest.param(n, marks=more if n >= 100 else ()) for n in range(0, 200, 25)])
def test_random_cases_equal_plain_backprop(first):
    found = list(failures(cases_of(0, first, 25)))
    assert not found, "\n\n".join(found)


def test_keys_whose_last_axis_is_not_consecutive():
    """A case that once failed."""
    heads = (("num_attention_heads", 3), ("num_key_value_heads", 3), ("head_dim", 2), ("hidden_size", 12), ("sliding_window", 1))
    check(Case(family="gpt_oss", changes=heads, lengths=(2,), head_chunk_size=1))


def test_cases_have_every_value_and_repeat():
    cases = cases_of(0, 0, 5000)
    for name, values in CHOICES.items():
        assert {getattr(case, name) for case in cases} == set(values)
        assert len({getattr(case, name) for case in cases[:200]}) >= 2
    assert {case.family for case in cases} == {*FAMILIES, *OTHERS}
    assert any(case.balance for case in cases[:200])
    assert cases[1990:2000] == cases_of(0, 1990, 10) != cases_of(1, 1990, 10)
    assert all(eval(str(case), {"Case": Case}) == case for case in cases)


@pytest.fixture
def broken(monkeypatch):
    """What queries of later chunks owe to the first key is lost."""
    stock = KeyValueStream.deposit

    def deposit(self, first, last, dkey, dvalue):
        stock(self, first, last, dkey.index_fill(2, dkey.new_tensor([0], dtype=int), 0.0) if first == 0 else dkey, dvalue)

    monkeypatch.setattr(KeyValueStream, "deposit", deposit)


LARGE = Case(family="qwen2", mask="right", rows=3, lengths=(6, 21), chunk_size=4, keep="attention", offload="host", seed=3)


def test_a_failure_becomes_a_small_program_that_fails_too(broken, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    (program,) = failures([LARGE])
    assert "worst gradient error" in program.splitlines()[0]
    call = program.splitlines()[-1]
    assert call.startswith("check(Case(") and call.count("=") <= 3, "values that the failure does not need were left"
    with pytest.raises(AssertionError, match="worst gradient error"):
        exec(program, {})


@pytest.fixture
def command(monkeypatch):
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tests/project/fuzz.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--cases", "1", "--seed", "7"])
    monkeypatch.setattr(module, "cases_of", lambda seed, first, count: [LARGE])
    return module


def test_the_command_counts_what_it_drew(command, capsys):
    command.main()
    printed = capsys.readouterr().out
    assert "family: qwen2 1\n" in printed and "lengths: 6 to 21 2\n" in printed
    assert printed.endswith("All 1 cases equal plain backpropagation.\n")


def test_the_command_prints_the_program_and_fails(command, broken, capsys):
    with pytest.raises(SystemExit, match="1 of 1 cases differ"):
        command.main()
    assert "--- failure 1 ---\n# Run in the repository's root. AssertionError: worst gradient error" in capsys.readouterr().out
