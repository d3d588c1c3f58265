"""Breaks the engine on purpose, one way at a time, and shows which proofs notice. Run by `make mutants`.

A tolerance that is too wide, or a comparison that cannot fail, shows here as a proof that lets a mutant live.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutant:
    """One line of the engine replaced by a wrong one, and the proofs that must fail for it."""

    name: str
    file: str
    line: str
    replacement: str
    proofs: tuple[str, ...]


FLOAT64 = "tests/engine/test_exact_gradients.py::test_fp64_gradients_equal_plain_backprop[llama-plain]"
FLOAT32 = "tests/engine/test_exact_gradients.py::test_fp32_gradients_equal_plain_backprop[llama]"
TRAINERS = "tests/trl/test_trl_losses.py::test_float32_against_stock_as_it_is[dpo-full]"
BUDGET = "tests/memory/test_budgeted_steps.py::test_a_step_fills_its_budget_and_does_not_exceed_it"
ENGINES = "tests/parallel/test_engines.py::test_ddp"
EVERYWHERE = (FLOAT64, FLOAT32, TRAINERS, BUDGET, ENGINES)

MUTANTS = (
    Mutant(
        "one chunk's share of dK is dropped",
        "engine/kv_chunk.py",
        "            total[:, :, first:last] += term",
        "            total[:, :, first:last] += 0 * term if term is dkey_BGSD and first == 0 else term",
        EVERYWHERE,
    ),
    Mutant(
        "one gradient of a layer is scaled by 1.001",
        "engine/grad_accumulator.py",
        "        sums = self.take_sums()[::-1]",
        "        sums = self.take_sums()[::-1]\n        sums[-1] = None if sums[-1] is None else 1.001 * sums[-1]",
        EVERYWHERE,
    ),
    Mutant(
        "one chunk's bias gradient is skipped",
        "engine/grad_accumulator.py",
        "        if accumulator.product_sum is None:",
        "        if accumulator.product_sum is None:\n            ctx.needs_input_grad = (True, True, True, False)",
        (FLOAT64, FLOAT32),  # the other proofs' models have no bias
    ),
    Mutant(
        "labels are not shifted",
        "hf/causal_lm.py",
        '        next_ones = nn.functional.pad(arguments["labels"], (0, 1), value=ignore_index)[..., 1:]',
        '        next_ones = arguments["labels"]',
        (FLOAT64, FLOAT32, BUDGET, ENGINES),  # TRL's trainers shift labels themselves
    ),
)


def run(mutant: Mutant, proof: str) -> bool:
    """Whether the proof fails for the mutant, as it should."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        file = source / "streamgrad" / mutant.file
        text = file.read_text()
        assert text.count(mutant.line + "\n") == 1, f"{mutant.name}: the line to be replaced is not in {mutant.file} once"
        file.write_text(text.replace(mutant.line + "\n", mutant.replacement + "\n"))
        line = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", proof]
        line += ["-o", f"pythonpath={source} {ROOT / 'tests' / 'support'}"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{proof} did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> None:
    lived = 0
    for mutant in MUTANTS:
        print(mutant.name, flush=True)
        for proof in mutant.proofs:
            noticed = run(mutant, proof)
            lived += not noticed
            print(f"    {'noticed by' if noticed else 'NOT NOTICED by'} {proof}", flush=True)
    if lived:
        raise SystemExit(f"{lived} proofs did not notice a wrong gradient.")


if __name__ == "__main__":
    main()
