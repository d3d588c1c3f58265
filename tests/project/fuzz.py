"""Compares random training steps with plain backpropagation, and prints a program for each that differs. Run by `make fuzz`."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from dataclasses import fields

import torch

from fuzz_cases import Case, cases_of
from fuzzing import failures

COUNTED = [field.name for field in fields(Case) if field.name not in ("seed", "changes", "layers", "memory_budget")]


def summary(cases: list[Case]) -> str:
    """Return how often each value was drawn; numbers by their range."""
    lines = []
    for name in COUNTED:
        counts = Counter(value for case in cases for value in _values(getattr(case, name)))
        texts = [value for value in counts if isinstance(value, str | bool)]
        numbers = [value for value in counts if not isinstance(value, str | bool) and value is not None]
        parts = [f"{value} {counts[value]}" for value in sorted(texts, key=lambda value: (-counts[value], str(value)))]
        if numbers:
            parts.append(f"{min(numbers)} to {max(numbers)} {sum(counts[number] for number in numbers)}")
        lines.append(f"{name}: {', '.join(parts)}")
    return "\n".join(lines)


def _values(value: object) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases, found, start = cases_of(options.seed, 0, options.cases), 0, time.monotonic()
    for done, case in enumerate(cases, start=1):
        for program in failures([case]):
            found += 1
            print(f"\n--- failure {found} ---\n{program}", flush=True)
        if done % 100 == 0:
            print(f"{done} of {len(cases)} cases, {found} failed, {time.monotonic() - start:.0f} s", flush=True)
    print(summary(cases))
    if found:
        raise SystemExit(f"{found} of {len(cases)} cases differ from plain backpropagation.")
    print(f"All {len(cases)} cases equal plain backpropagation.")


if __name__ == "__main__":
    main()
