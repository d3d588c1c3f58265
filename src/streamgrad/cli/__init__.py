"""The command line. Its packages (typer, rich, matplotlib) are an extra, so they are imported only once a command runs."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_EXTRA = {"typer", "rich", "matplotlib"}
# torch's warning, once a process, on a processor without bf16 instructions. The products are right; most of it is C++ frames.
_PRODUCTS_FALL_BACK = r".*failed, switching to (BLAS gemm|baddbmm)"


class CheckFailed(Exception):
    """A command ran and found something wrong; the message says what."""


def main() -> None:
    """Run the command in `sys.argv`."""
    with one_line_errors():
        _let_segments_grow()
        warnings.filterwarnings("ignore", message=_PRODUCTS_FALL_BACK, category=UserWarning)
        from streamgrad.cli.app import app

        app()


def _let_segments_grow() -> None:
    """Unless the user has set torch's allocator up: fragments of fixed segments take a tenth of a GPU that is full."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What a user can act on ends the program with one line and exit code 1; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (CheckFailed, ValueError, OSError) as error:
        sys.exit(f"{_rank()}streamgrad: {_one_line(error)}")
    except (RuntimeError, MemoryError) as error:
        import torch

        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in str(error):
            raise
        sys.exit(f"{_rank()}streamgrad: out of memory: {_one_line(error)}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(f'streamgrad: the command line needs {package}, which is not installed. Run: pip install "streamgrad[cli]"')


def _rank() -> str:
    """Of several processes that a launcher started, which one speaks; in the words of torch's tracebacks."""
    return f"[rank{os.environ['RANK']}]: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else ""


def _one_line(error: Exception) -> str:
    """The message without line breaks, and without the frames that torch appends to those of its C++ code."""
    return " ".join(str(error).partition("\nException raised from")[0].split())
