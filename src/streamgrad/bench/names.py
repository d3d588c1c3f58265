"""Names that the command line needs before anything is measured: of methods, and of files."""

from __future__ import annotations

from pathlib import Path

METHODS = ("hf", "mst", "liger", "liger-offload", "streamgrad", "streamgrad-fsdp2", "streamgrad-zero3", "streamgrad-liger")

RESULTS = Path("benchmarks/results")
REPORT = Path("benchmarks/REPORT.md")
