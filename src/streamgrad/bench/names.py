"""Names that the command line needs before anything is measured: of methods, and of files."""

from __future__ import annotations

from pathlib import Path

# In the order in which they run: Liger patches transformers for the whole process, so its kernels come after everything else, and
# its fused loss last.
METHODS = ("hf", "mst", "streamgrad", "streamgrad-fsdp2", "streamgrad-zero3", "streamgrad-liger", "liger", "liger-offload")

RESULTS = Path("benchmarks/results")
REPORT = Path("benchmarks/REPORT.md")
