"""Says which releases of other packages streamgrad works with, and refuses older ones by name and with the remedy."""

from __future__ import annotations

import re
from importlib import metadata

# The oldest release that works, and the first that was not tried. pyproject.toml has the same (tests/project/test_versions.py).
SUPPORTED = {"torch": ("2.11", "2.14"), "transformers": ("5.5", "5.23"), "peft": ("0.18", "0.22"), "trl": ("1.15", "1.17")}


def check_version(package: str) -> None:
    """Raise `ImportError` where the installed release of `package` is older than the oldest that works.

    What is not installed is left to whoever imports it. Newer ones are let through: each layer is tried before it is streamed.
    """
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    if _numbers(installed) < _numbers(SUPPORTED[package][0]):
        raise ImportError(f"{package} {installed} is installed, and {needed(package)}", name=package)


def needed(package: str) -> str:
    """Return which releases of `package` are needed, and the command that installs one."""
    oldest, beyond = SUPPORTED[package]
    return f'streamgrad needs {package} {oldest} or newer, before {beyond}. Run: pip install "{package}>={oldest},<{beyond}"'


def _numbers(version: str) -> tuple[int, int]:
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)
