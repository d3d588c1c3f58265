"""Runs `python -m benchmarks COMMAND`; `--help` lists the commands."""

from streamgrad.cli import run


def main() -> None:
    """Run the benchmark in `sys.argv`."""
    run("benchmarks.commands")


if __name__ == "__main__":
    main()
