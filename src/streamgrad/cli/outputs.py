"""Checks of the places that a command will write to, run while its options are read: before the work, not after it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def writable_file(path: Path | None) -> Path | None:
    """Return `path`; raise `ValueError` if no file can be written there. Nothing of the attempt remains."""
    if path is not None:
        _try_to_write(path, path)
    return path


def writable_folder(path: Path) -> Path:
    """Return `path`; raise `ValueError` if no file can be written in it. Nothing of the attempt remains."""
    _try_to_write(path, path / ".streamgrad-writes-here")
    return path


def _try_to_write(path: Path, file: Path) -> None:
    new = [folder for folder in file.parents if not folder.exists()]  # the innermost first
    is_new = not file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        in_a_file = any(folder.exists() and not folder.is_dir() for folder in file.parents)
        reason = "a part of its path is a file" if in_a_file else error.strerror
        raise ValueError(f"{path} cannot be written: {reason}. Pass another place to write to.") from None
    with suppress(OSError):  # another process may be writing there already
        if is_new:
            file.unlink()
        for folder in new:
            folder.rmdir()
