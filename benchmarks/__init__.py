"""Measures the paper's tables and figures and reports them beside the paper's own: `python -m benchmarks`, from a checkout.

Each benchmark appends its rows to `results` as JSON lines. `REPORT.md` is written from them.
"""
