"""The command line of streamgrad. typer, rich and matplotlib are an extra, so they are imported only when a command runs."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_EXTRA = {"typer", "rich", "matplotlib"}
# torch's warning on a CPU without bf16 instructions. The products are right, and most of the text is C++ frames.
_PRODUCTS_FALL_BACK = r".*failed, switching to (BLAS gemm|baddbmm)"


class CheckFailed(Exception):
    """Raised when a command ran and found something wrong; the message says what."""


def main() -> None:
    """Run the command in `sys.argv`."""
    run("streamgrad.cli.app")


def run(module: str) -> None:
    """Run the `app` of a module on `sys.argv`. It is imported here, so that a missing package also ends in one line."""
    with one_line_errors():
        _let_segments_grow()
        warnings.filterwarnings("ignore", message=_PRODUCTS_FALL_BACK, category=UserWarning)
        importlib.import_module(module).app()


def _let_segments_grow() -> None:
    """Let torch's allocator grow its segments, unless the user configured it: fragments of fixed ones take a tenth of a GPU."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End the program with one line and exit code 1 for errors that a user can act on. Bugs keep their traceback."""
    try:
        yield
    except (CheckFailed, ValueError, OSError) as error:
        sys.exit(f"{_rank()}streamgrad: {_one_line(error)}")
    except KeyboardInterrupt:  # while something is imported; commands that run catch it themselves
        sys.stderr.write(f"\n{_rank()}streamgrad: interrupted\n")
        sys.exit(130)
    except (RuntimeError, MemoryError) as error:
        from streamgrad.engine.shortage import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        sys.exit(f"{_rank()}streamgrad: out of memory: {_one_line(error)}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(f'streamgrad: the command line needs {package}, which is not installed. Run: pip install "streamgrad[cli]"')


def _rank() -> str:
    """Return a prefix that names the rank, in the form of torch's tracebacks, if a launcher started several processes."""
    return f"[rank{os.environ['RANK']}]: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ else ""


def _one_line(error: Exception) -> str:
    """Return the message without line breaks, and without the C++ frames that torch appends."""
    return " ".join(str(error).partition("\nException raised from")[0].split())
