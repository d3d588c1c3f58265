"""Benchmarks, one file a table or figure of the paper; each appends its rows as JSON lines."""
